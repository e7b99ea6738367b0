"""An MPI that has not been initialized, or was finalized: who makes a strategy is told so."""

from __future__ import annotations

from pathlib import Path

import launching
import pytest

pytestmark = pytest.mark.each_mpi

NOT_INITIALIZED = """
import mpi4py
mpi4py.rc.initialize = False
import mpistrategy as ms
try:
    ms.MirroredStrategy()
except ms.errors.LaunchError as error:
    assert "MPI.Init_thread()" in str(error), error
else:
    raise SystemExit("made")
from mpi4py import MPI
MPI.Init_thread()
assert ms.MirroredStrategy().reduce("SUM", 1) == 2
MPI.Finalize()
try:
    ms.MirroredStrategy()
except ms.errors.LaunchError as error:
    assert "finalized" in str(error), error
else:
    raise SystemExit("made")
"""


def test_what_is_said_of_an_mpi_that_does_not_run(launch: launching.Launch, tmp_path: Path) -> None:
    job = launch(2, launching.program(NOT_INITIALIZED, tmp_path), timeout=30, cwd=tmp_path)
    assert (job.returncode, job.stderr.strip()) == (0, ""), job
