"""Other files and settings that were made up to harm: thresholds, run directories, environment variables."""

from __future__ import annotations

import math
import os
import random
import re
import warnings
from functools import partial
from pathlib import Path

import launching
import pytest
from hostile import MOST_SECONDS, Figures, mutated_bytes, mutated_json, text_of

import mpistrategy as ms
from mpistrategy.mpi.tuning import thresholds as files
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Thresholds


def agreed_alone(version: str) -> Thresholds:
    """Return the thresholds of one rank."""
    return files.agreed(version, 0, (0,), lambda text: [text])


def read_thresholds(folder: Path, count: int, dice: random.Random) -> Figures:
    """Read `count` mutated files of thresholds."""
    figures, file = Figures("mutated threshold files"), folder / "paths.json"
    content = {"source": "x", **DEFAULT.sizes()}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv(files.VARIABLE, str(file))
        warnings.simplefilter("ignore", ms.errors.FallbackWarning)
        for number in range(count):
            told = text_of(mutated_json(dict(content), dice))
            file.write_bytes(told if number % 3 else mutated_bytes(told, dice))
            figures.add(f"number {number}", lambda: agreed_alone("Open MPI v5.0.11"))
    return figures


# ------------------------------------------------------------------------------------------------ the environment

VARIABLES = (
    *(f"MPISTRATEGY_{name}" for name in ("CHECK", "CUDA_AWARE", "FULL_TRACEBACK", "GPU_PATH", "INJECT", "NVTX")),
    *(f"MPISTRATEGY_{name}" for name in ("PATHS", "PROGRESS", "RUN_DIR", "TIMEOUT_SECONDS", "TRACE", "ALONE")),
    *("XDG_CACHE_HOME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_LOCALID"),
)  # fmt: skip
#: What somebody may set a variable to; {folder} has a pipe, a file, and a file of thresholds that is none.
SETTINGS = (
    " ", "-1", "1e400", "nan", "0x10", "\u0663", "x" * 100_000, "\x1b[2J\u202e", "%s%n{}", "os\udcff", "[" * 5000,
    "~nouser/x", "/", "/dev/zero", "/dev/full", "{folder}/pipe", "{folder}/file", "{folder}/none/at/all",
    "{folder}/thresholds", "rank=0", "rank=any, at=#" + "9" * 30 + ", do=kill", "../../x", "9" * 5000,
)  # fmt: skip
WITH_SETTING = """
import os, sys
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()
with strategy.scope():
    x = ms.Variable(np.ones(3))
assert strategy.reduce("SUM", np.ones(3)).tolist() == [2, 2, 2]
for _ in ms.telemetry.progress(range(3)):
    pass
with ms.telemetry.trace(os.environ["FOLDER"] + "/trace"):
    strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(2)))
strategy.close()
"""
_STARTING_SECONDS = 10.0


def run_with(setting: dict[str, str], program: Path, folder: Path) -> None:
    """Run a job of 2 ranks; raise the error of ours that it ends with, or AssertionError for any other."""
    job = launching.launch(2, [program], timeout=_STARTING_SECONDS + MOST_SECONDS, env=setting, cwd=folder)
    raised = re.findall(r"(?m)^(?:\[rank \d/\d\] )*([A-Za-z_][\w.]*(?:Error|Exception)): ", job.stderr)
    ours = [each.removeprefix("mpistrategy.errors.") for each in raised if each.startswith("mpistrategy.errors.")]
    if len(ours) < len(raised) or (job.returncode and not ours):
        raise AssertionError(f"status {job.returncode}: {job.stderr}")
    if job.returncode:
        raise getattr(ms.errors, ours[0])("in a job")


def read_environment(folder: Path, pairs: list[tuple[str, str]]) -> Figures:
    """Start a job of 2 ranks with each of these settings."""
    figures = Figures("jobs with one environment variable set to something")
    (folder / "file").write_text("x")
    (folder / "thresholds").write_text('{"format": 2, "paths": {"a": 1}}')
    os.mkfifo(folder / "pipe")
    program = launching.program(WITH_SETTING, folder)
    for number, (name, value) in enumerate(pairs):
        (here := folder / f"job{number}").mkdir()
        setting = {name: value.replace("{folder}", str(folder)), "FOLDER": str(here)}
        figures.add(f"{name}={value[:40]!r}", partial(run_with, setting, program, here), math.inf)
    return figures
