"""The harness itself, on small pytest sessions under real mpiexec: what conftest.py promises, it does."""

from __future__ import annotations

import os
import re
import shutil
import sys
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


@pytest.mark.each_mpi
def test_a_failed_rank_ends_the_job_when_the_others_are_stuck(session: Session) -> None:
    source = """
        def test_stuck():
            assert rank != 1, "this is the reason"
            world.Barrier()
    """
    job = session(3, source, MPISTRATEGY_TEST_GRACE="2")
    assert job.returncode != 0, job
    assert job.seconds < 20, job
    assert "rank 1 of 3: tests/test_small.py::test_stuck" in job.stderr, job
    assert "this is the reason" in job.stderr, job


def test_a_rank_that_does_not_come_ends_the_job(session: Session) -> None:
    source = """
        def test_late():
            if rank == 1:
                world.recv(source=0)
    """
    job = session(2, source, MPISTRATEGY_TEST_PATIENCE="2")
    assert job.returncode != 0, job
    assert job.seconds < 20, job
    assert "rank 0 of 2: tests/test_small.py::test_late [call]: the other ranks did not come" in job.stderr, job


def test_ranks_that_all_hang_are_ended_by_the_timeout(session: Session) -> None:
    source = """
        def test_hang():
            if rank == 0:
                world.recv(source=1)
            world.Barrier()
    """
    job = session(2, source, "-m", "pytest", "--with-mpi", "--timeout=2")
    assert job.returncode != 0, job
    assert job.seconds < 20, job
    assert "in test_hang" in job.stdout + job.stderr, job


def test_ranks_at_different_places_end_the_job(session: Session) -> None:
    source = """
        def test_leaves():
            if rank == 1:
                pytest.exit("leaving alone", returncode=0)
    """
    job = session(2, source)
    assert job.returncode != 0, job
    assert "rank 0: tests/test_small.py::test_leaves [call] (passed)" in job.stderr, job
    assert "rank 1: exit status (0)" in job.stderr, job


def test_ranks_that_collect_different_tests_are_refused(session: Session) -> None:
    source = """
        if rank == 1:
            def test_extra(): pass

        def test_common(): pass
    """
    job = session(2, source)
    assert job.returncode == 3, job
    assert "the ranks collected different tests" in job.stdout, job
    assert "rank 1: 2 tests; only here, not on rank 0: ['tests/test_small.py::test_extra']" in job.stdout, job
    assert "passed" not in job.stdout, job


def test_what_has_nothing_to_do_with_ranks_runs_once(session: Session, tmp_path: Path) -> None:
    (tmp_path / "tests" / "mpi").mkdir()
    (tmp_path / "tests" / "mpi" / "test_below.py").write_text("def test_that_is_not_above_mpi(): pass")
    source = """
        @pytest.mark.one_rank
        def test_alone(): assert world.size == 1

        @pytest.mark.one_rank
        @pytest.mark.mpi
        def test_marked(): pass

        def test_common(): pass

        def test_starts_jobs(launch): pass

        @pytest.mark.each_mpi
        @pytest.mark.one_rank
        def test_starts_jobs_that_may_go_otherwise(launch): pass
    """
    again = ("-m", "pytest", "--with-mpi", "--second-mpi")
    assert "6 passed" in session(1, source).check().stdout
    assert "2 passed, 4 deselected" in session(1, source, *again).check().stdout
    for job in (session(2, source), session(2, source, *again)):
        assert "3 passed, 3 deselected" in job.check().stdout, job


def test_a_session_without_with_mpi_is_refused(session: Session) -> None:
    job = session(1, "def test_nothing(): pass", "-m", "pytest")
    assert job.returncode == pytest.ExitCode.USAGE_ERROR, job
    assert "--with-mpi" in job.stderr, job


def test_sessions_that_share_run_each_test_once(session: Session, tmp_path: Path) -> None:
    """Tests of one file share fixtures and stay together; tests that start jobs go one by one, and first."""
    source = """
        @pytest.fixture(scope="module")
        def made():
            print("made")
            yield
            print("removed")

        def test_one(made): print("one")

        def test_job(launch, made): print("job")

        def test_other(made): print("other")
    """
    (tmp_path / "taken").mkdir()
    (tmp_path / "tests/test_more.py").write_text("def test_more(): pass")
    share = ("-m", "pytest", "--with-mpi", "-s", f"--share={tmp_path / 'taken'}")
    taken = session(1, source, *share, "tests/test_more.py").check().stdout
    assert "1 passed" in taken
    rest = session(1, source, *share).check().stdout
    assert "3 passed" in rest
    words = [word for word in re.findall(r"\w+", rest) if word in ("made", "removed", "one", "other", "job")]
    assert words == ["made", "job", "removed", "made", "one", "other", "removed"]
    assert "no tests ran" in session(1, source, *share).check().stdout
    assert "--share is for sessions on one rank" in session(2, source, *share).stderr


@pytest.mark.each_mpi
def test_a_job_over_its_time_leaves_nothing_running(launch: Callable[..., launching.Finished], tmp_path: Path) -> None:
    source = f"""
        import os, pathlib, signal
        from mpi4py import MPI

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path({str(tmp_path)!r}, f"pid{{os.getpid()}}").touch()
        print("started", flush=True)
        while True:
            signal.pause()
    """
    with pytest.raises(TimeoutError, match=r"did not end within 15 s(.|\n)*started"):
        launch(2, source, timeout=5)
    processes = [path.name[3:] for path in tmp_path.glob("pid*")]
    assert len(processes) == 2
    for process in processes:
        try:
            command = Path("/proc", process, "cmdline").read_bytes()
        except OSError:
            continue
        assert not command, f"process {process} still runs"  # a killed one nobody waits for has an empty line


@pytest.mark.each_mpi
def test_a_job_is_a_world_of_its_own(launch: Callable[..., launching.Finished], tmp_path: Path) -> None:
    path = tmp_path / "a program.py"
    path.write_text("import os, sys\nfrom mpi4py import MPI\nsys.exit(7 if MPI.COMM_WORLD.size == 3 else 0)\n")
    assert launch(3, path).returncode == 7
    assert launch(1, "import os, sys; print(os.environ['X'], sys.executable)", env={"X": "y"}).check().stdout.split(
        maxsplit=1
    ) == ["y", sys.executable + os.linesep]
