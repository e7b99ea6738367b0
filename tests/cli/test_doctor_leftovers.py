"""What killed jobs leave on a node: found and removed, and never what a running job uses."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import launching
import pytest
from mpi4py import MPI

from mpistrategy.cli import main
from mpistrategy.cli.doctor import leftovers

one_rank = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts processes: runs in the session on 1 rank")
GONE = 4194305  # more than Linux has


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return folders in place of /dev/shm and TMPDIR, in which also young files count."""
    memory, temporary = tmp_path / "memory", tmp_path / "temporary"
    memory.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(leftovers, "_YOUNG_SECONDS", -1.0)
    monkeypatch.setattr(leftovers, "folders", lambda: (str(memory), str(temporary)))
    monkeypatch.setattr(leftovers, "sees_all_processes", lambda: True)
    return memory, temporary


def names_found() -> list[str]:
    return [os.path.basename(path) for path in leftovers.leftover_paths()]


@pytest.mark.one_rank
def test_what_is_in_use_is_not_left(places: tuple[Path, Path]) -> None:
    memory, temporary = places
    names = ["mpich_shm_1", "sm_segment.node1.0.5.0", "ucx_shm_posix_2", "nccl-abc", "psm2_shm.0f", "Intel_MPI_x"]
    for name in (*names, "somebody-else"):
        (memory / name).write_bytes(bytes(4096))
    (memory / "nccl-folder").mkdir()
    (memory / "nccl-link").symlink_to(memory / "somebody-else")
    for name in (f"ompi.{GONE}", f"ompi.{os.getpid()}", f"ompi.{GONE + 1}", f"prte.{GONE}", "ompi.mine"):
        (temporary / name / "1").mkdir(parents=True)
        (temporary / name / "1" / "file").write_bytes(bytes(8192))
    (temporary / f"ompi.{GONE + 2}").symlink_to(temporary / f"ompi.{GONE}")
    with (
        open(memory / "mpich_shm_1", "rb"),
        open(temporary / f"ompi.{GONE + 1}" / "1" / "file", "rb"),
        open(memory / "nccl-abc", "rb") as closed,
    ):
        mapped = mmap.mmap(closed.fileno(), 0, access=mmap.ACCESS_READ)
        closed.close()
        expected = sorted([*names[1:3], *names[4:], f"ompi.{GONE}", f"prte.{GONE}"])
        assert sorted(names_found()) == expected
        assert leftovers.in_words() == f"{len(expected)} files of MPI"
        mapped.close()


@pytest.mark.one_rank
def test_the_command(places: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    memory, temporary = places
    (memory / "mpich_shm_1").write_bytes(bytes(4096))
    (memory / "mpich_shm_2").write_bytes(bytes(4096))
    (temporary / f"ompi.{GONE}").mkdir()
    (temporary / f"ompi.{GONE}" / "link").symlink_to(memory)
    with open(memory / "mpich_shm_2", "rb"):
        assert main.main(["doctor", "--remove-leftovers"]) == 0
    assert os.listdir(temporary) == []
    assert os.listdir(memory) == ["mpich_shm_2"]
    told = capfd.readouterr()
    assert f"removed {memory / 'mpich_shm_1'}\n" in told.out
    assert f"removed {temporary / f'ompi.{GONE}'}\n" in told.out
    (memory / "mpich_shm_2").unlink()
    assert main.main(["doctor", "--remove-leftovers"]) == 0
    assert "nothing of a killed job of yours is left" in capfd.readouterr().out


@pytest.mark.one_rank
def test_nothing_is_removed_where_processes_are_hidden(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    memory, _ = places
    (memory / "mpich_shm_1").touch()
    with monkeypatch.context() as patched:
        patched.setattr(leftovers, "sees_all_processes", lambda: False)
        assert main.main(["doctor", "--remove-leftovers"]) == 2
        assert "sees only those of its container" in capfd.readouterr().err

    def look_into(*arguments: object) -> None:
        raise PermissionError(13, "/proc/17 (vasp) does not show which files it uses")

    monkeypatch.setattr(leftovers, "used_by", look_into)
    assert main.main(["doctor", "--remove-leftovers"]) == 2
    assert "/proc/17 (vasp) does not show which files it uses; nothing was removed" in capfd.readouterr().err
    assert os.listdir(memory) == ["mpich_shm_1"]


WORKS = """
import os, sys, time
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()


def step():
    return ms.get_replica_context().all_reduce("SUM", np.array([float(os.path.exists("end"))]))


strategy.run(step)
open(f"ready-{strategy.replica_id_in_sync_group}", "w").close()
while not strategy.run(step)[0]:
    time.sleep(0.01)  # leave the machine to others
"""


def tree(process: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield process
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from tree(int(child))


def kill(job: subprocess.Popen[bytes]) -> None:
    """Kill a job as a whole, launcher and ranks."""
    for process in list(tree(job.pid)) if job.poll() is None else []:
        os.kill(process, signal.SIGKILL)
    job.wait(20)


def until(happened: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.each_mpi
@one_rank
@pytest.mark.slow
def test_a_killed_job_is_cleared_away_beside_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves something with MPICH and Open MPI."""
    program, temporary = launching.program(WORKS, tmp_path), tmp_path / "temporary"
    monkeypatch.setattr(leftovers, "_YOUNG_SECONDS", -1.0)
    monkeypatch.setattr(leftovers, "folders", lambda: ("/dev/shm", str(temporary)))
    temporary.mkdir()
    environment = launching.environment() | {"TMPDIR": str(temporary)}
    before = set(os.listdir("/dev/shm"))
    command = [*launching._mpiexec(), "-n", "2", sys.executable, "-m", "mpistrategy", "run", str(program)]
    jobs, ready = [], []
    for name in ("killed", "runs"):
        (tmp_path / name).mkdir()
        ready += [tmp_path / name / f"ready-{rank}" for rank in (0, 1)]
        jobs.append(subprocess.Popen(command, cwd=tmp_path / name, env=environment, start_new_session=True))
    killed, runs = jobs
    try:
        until(lambda: all(path.exists() for path in ready), "the jobs do not start")
        used = {path for job in jobs for pid in tree(job.pid) for path in leftovers.used_by(f"/proc/{pid}")}
        new = [path for path in (*Path("/dev/shm").iterdir(), *temporary.iterdir()) if path.name not in before]
        own = {str(path) for path in new if any(str(path) in each for each in used)}
        if not own:
            pytest.skip("this MPI has nothing that could be left")
        # Other tests of this machine leave something meanwhile, too.
        assert own.isdisjoint(leftovers.leftover_paths()), "both jobs run"
        kill(killed)
        until(lambda: own & set(leftovers.leftover_paths()), "nothing is left")
        gone = own & set(leftovers.leftover_paths())
        with monkeypatch.context() as patched:
            patched.setattr(leftovers, "sees_all_processes", lambda: True)
            patched.setattr(leftovers, "leftover_paths", lambda: sorted(gone))
            assert leftovers.run() == 0
        assert not any(os.path.exists(path) for path in gone)
        (tmp_path / "runs" / "end").touch()
        assert runs.wait(30) == 0, "it has lost nothing that it needs"
    finally:
        for job in jobs:
            kill(job)
