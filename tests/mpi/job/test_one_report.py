"""An error that all ranks raise is printed whole by one of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

Launch = Callable[..., launching.Finished]

PROGRAM = """
import sys
import numpy as np
import mpistrategy as ms

how = sys.argv[1]
strategy = ms.MirroredStrategy()
rank = strategy.rank
with strategy.scope():
    variable = ms.Variable(np.zeros(2), name="weights")
if how == "calls that differ":
    strategy.barrier("other") if rank == 2 else strategy.barrier("one")
if how == "the same mistake":
    strategy.reduce("SUM", "no number")
if how == "no such file":
    ms.Checkpoint(variable=variable).restore("none")
if how == "caught on rank 0":
    try:
        strategy.reduce("SUM", "no number")
    except ms.errors.DTypeError:
        if rank:
            raise
    strategy.barrier("on")
"""
#: What is done, and which ranks print a traceback.
WHOLE = {
    "calls that differ": "0",
    "the same mistake": "0",
    "no such file": "0",
    "caught on rank 0": "[12]+",
}


@pytest.mark.parametrize("how", WHOLE)
def test_an_error_of_all_ranks_is_printed_once(launch: Launch, tmp_path: Path, how: str) -> None:
    run = ["-m", "mpistrategy", "run"] if how == "calls that differ" else []
    job = launch(3, [*run, launching.program(PROGRAM, tmp_path), how], timeout=40)
    assert job.returncode == 1, job
    printed = sorted(re.findall(r"\[rank (\d)/3\] Traceback", job.stderr))
    assert re.fullmatch(WHOLE[how], "".join(printed)), job
    for rank in {"0", "1", "2"} - {*printed}:
        lines = [line for line in job.stderr.splitlines() if line.startswith(f"[rank {rank}/3]")]
        assert len(lines) <= 1, job
        assert all("which another rank prints whole" in line for line in lines), job
