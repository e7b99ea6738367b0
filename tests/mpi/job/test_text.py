"""Paths, names and errors with bytes that are no UTF-8: jobs behave as with any others."""

from __future__ import annotations

import os
from pathlib import Path

import launching
import pytest

NAME = os.fsdecode(b"gr\xf6sse")
SHOWN = "gr\\udcf6sse"
PROGRAM = """
import os, sys, time
import numpy as np
import mpistrategy as ms

how = sys.argv[1]
name = os.fsdecode(b"gr\\xf6sse")
strategy = ms.MirroredStrategy(on_error="raise" if how == "contained" else "abort")
bad = strategy.rank == 1
if how == "well":
    with strategy.scope():
        variable = ms.Variable(np.ones(2), name=name)
    checkpoint = ms.Checkpoint(variable=variable)
    checkpoint.save(os.path.join(os.getcwd(), name))
    assert checkpoint.restore(name) and float(strategy.reduce("SUM", {name: 1.0}, name=name)[name]) == 2
if how == "mismatch":
    strategy.broadcast(1) if bad else strategy.barrier(name)
if how == "late" and bad:
    time.sleep(30)
if how == "contained" and bad:
    raise ValueError(f"no row in {name}")
try:
    strategy.barrier(name)
except ms.errors.RemoteError as error:
    print("told:", ascii(str(error)))
"""
#: What is done, how the job ends, and what it says.
ENDS = {
    "well": (0, ""),
    "mismatch": (1, "CollectiveMismatchError: the ranks do not make the same call"),
    "late": (124, f"barrier name='{SHOWN}'"),
    "contained": (None, f"told: 'rank 1 has ended: ValueError: no row in {SHOWN}"),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.each_mpi] * (how == "mismatch")) for how in ENDS])
def test_a_folder_a_program_and_names_in_latin_1(launch: launching.Launch, tmp_path: Path, how: str) -> None:
    folder = tmp_path / os.fsdecode(b"pr\xf6be")
    folder.mkdir()
    program = launching.program(PROGRAM, folder).rename(folder / f"{NAME}.py")
    run = [] if how == "contained" else ["-m", "mpistrategy", "run"]
    env = {"MPISTRATEGY_TIMEOUT_SECONDS": "1.5" if how == "late" else "30"}
    job = launch(2, [*run, program, how], timeout=25, cwd=folder, env=env)
    status, told = ENDS[how]
    assert status in (None, job.returncode), job
    assert told in job.stdout + job.stderr, job
    assert "watchdog has failed" not in job.stderr, job
    assert "UnicodeEncodeError" not in job.stderr, job
