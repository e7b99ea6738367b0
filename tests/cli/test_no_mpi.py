"""Without an MPI, and without mpi4py, every way in tells the same three lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import launching
import pytest

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

CURES = [
    "Load your cluster's MPI module, or install an MPI into this environment: pip install mpich",
    "Without MPI, OneDeviceStrategy and mpistrategy.testing.run_replicas work.",
]
LIBMPI, MPI4PY = "no MPI library (cannot load MPI library; /opt/none/libmpi.so.12: ", "no mpi4py"
#: What is started, its status, what is missing, and how the line that says so begins.
CASES = [
    ("-m mpistrategy run -c print(1)", 2, LIBMPI, "mpistrategy run: found "),
    ("-m mpistrategy run -c print(1)", 2, MPI4PY, "mpistrategy run: found "),
    ("-m mpistrategy doctor", 1, LIBMPI, "BAD   mpi  "),
    ("-m mpistrategy doctor", 1, MPI4PY, "BAD   mpi  "),
    ("-m mpistrategy bench", 2, LIBMPI, "MirroredStrategy: found "),
    ("-c import\tmpistrategy;mpistrategy.MirroredStrategy()", 1, LIBMPI, "MirroredStrategy: found "),
]


@pytest.mark.parametrize(("arguments", "status", "missing", "where"), CASES)
def test_three_lines_say_what_is_missing_and_what_to_do(
    arguments: str, status: int, missing: str, where: str, tmp_path: Path
) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError('No module named mpi4py', name='mpi4py')\n")
    folders = [str(tmp_path)] * (missing == MPI4PY) + [str(Path(ms.__file__).parents[1])]
    library = {"MPI4PY_LIBMPI": "/opt/none/libmpi.so.12"} if missing == LIBMPI else {}
    done = subprocess.run(
        [sys.executable, *arguments.split(" ")],
        env=launching.environment() | {"PYTHONPATH": os.pathsep.join(folders)} | library,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout + done.stderr
    if missing == LIBMPI and "/opt/none" not in said:
        pytest.skip("this mpi4py is built for one MPI and takes no other")
    assert done.returncode == status, done
    lines = [line.removeprefix("mpistrategy.errors.LaunchError: ") for line in said.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith(f"{where}{missing}"))
    assert [line.removeprefix("           ").lstrip("-> ") for line in lines[at + 1 : at + 3]] == CURES
    assert "During handling" not in said
    assert "direct cause" not in said
    if "-m" in arguments:
        assert len(lines) <= at + 4
        assert "Traceback" not in said
