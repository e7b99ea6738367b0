"""The harness itself, on small pytest sessions under real mpiexec: what conftest.py promises, it does."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1]
HEAD = """
import os, time
import pytest
from mpi4py import MPI

world = MPI.COMM_WORLD
rank = world.rank
"""

Session = Callable[..., launching.Finished]


@pytest.fixture
def session(launch: Callable[..., launching.Finished], tmp_path: Path) -> Session:
    """Run ``session(ranks, source of a test file, *arguments of pytest, **environment)``."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "jobs/launching.py"):
        shutil.copy(HERE / name, tmp_path / "tests")
    shutil.copy(HERE.parent / "pyproject.toml", tmp_path)

    def run(ranks: int, source: str, *arguments: str, **env: str) -> launching.Finished:
        (tmp_path / "tests/test_small.py").write_text(HEAD + textwrap.dedent(source))
        command = [*(arguments or ("-m", "pytest", "--with-mpi")), "--color=no", f"--basetemp={tmp_path}/base"]
        return launch(ranks, command, timeout=60, env=env, cwd=tmp_path)

    return run


def test_a_failing_rank_fails_the_test_everywhere_in_one_report(session: Session, tmp_path: Path) -> None:
    source = """
        from hypothesis import given, strategies

        def test_one():
            world.Barrier()
            assert rank != 1, "this is the reason"

        def test_skip():
            if rank == 2:
                pytest.skip("not here")

        @given(strategies.integers())
        def test_examples(number):
            assert number == world.bcast(number)
            assert rank != 1 or number < 1000

        def test_all():
            raise ValueError("the same reason")

        def test_in_step(comm):
            assert comm.allreduce(1) == 3
    """
    # The statuses are printed, not returned: Open MPI kills the others at the first rank that returns one.
    program = tmp_path / "status.py"
    program.write_text(
        "import sys, pytest\nfrom mpi4py import MPI\nstatus = pytest.main(sys.argv[1:])\n"
        "print(f'rank {MPI.COMM_WORLD.rank} ends with {int(status)}', file=sys.stderr)\n"
    )
    job = session(3, source, str(program), "--with-mpi").check()
    for rank in range(3):
        assert f"rank {rank} ends with 1" in job.stderr, job
    assert job.stdout.count("short test summary info") == 1, job
    assert "4 failed, 1 passed" in job.stdout, job
    assert "test_one - failed on rank 1; passed on ranks 0, 2" in job.stdout, job
    assert "this is the reason" in job.stdout, job
    assert "skipped on rank 2" in job.stdout, job
    assert "number=1000," in job.stdout, job  # the ranks found and shrank the example in step
    assert "failed on ranks 0, 1, 2" in job.stdout, job
    assert job.stdout.count("E       ValueError: the same reason") == 1, job


#: What makes a session end, the environment, and what is said.
ENDS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "a failed rank, and the others are stuck": (
        """
        def test_stuck():
            assert rank != 1, "this is the reason"
            world.Barrier()
        """,
        {"MPISTRATEGY_TEST_GRACE": "2"},
        ["rank 1 of 2: tests/test_small.py::test_stuck", "this is the reason"],
    ),
    "a rank that does not come": (
        """
        def test_late():
            if rank == 1:
                world.recv(source=0)
        """,
        {"MPISTRATEGY_TEST_PATIENCE": "2"},
        ["rank 0 of 2: tests/test_small.py::test_late [call]: the other ranks did not come"],
    ),
    "ranks at different places": (
        """
        def test_leaves():
            if rank == 1:
                pytest.exit("leaving alone", returncode=0)
        """,
        {},
        ["rank 0: tests/test_small.py::test_leaves [call] (passed)", "rank 1: exit status (0)"],
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_session(session: Session, what: str) -> None:
    source, environment, words = ENDS[what]
    job = session(2, source, **environment)
    assert job.returncode != 0, job
    assert job.seconds < 20, job
    assert [word for word in words if word not in job.stdout + job.stderr] == [], job
    assert " passed" not in job.stdout, job
