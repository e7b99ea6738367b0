"""What killed jobs leave on a node: found and removed, and never what a running job uses."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import launching
import pytest

from mpistrategy.cli import main
from mpistrategy.cli.doctor import leftovers

pytestmark = pytest.mark.one_rank
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
        assert sorted(map(os.path.basename, leftovers.leftover_paths())) == expected
        assert leftovers.in_words() == f"{len(expected)} files of MPI"
        mapped.close()


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
    assert "/proc/17 (vasp) does not show which files it uses; nothing more was removed" in capfd.readouterr().err
    assert os.listdir(memory) == ["mpich_shm_1"]


WORKS = """
import os, time
import mpistrategy as ms

ms.MirroredStrategy().barrier("all have begun")
print("works", flush=True)
time.sleep(120)
"""


@pytest.mark.each_mpi
@pytest.mark.slow
def test_a_job_keeps_its_files_until_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves something with MPICH and Open MPI."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(leftovers, "_YOUNG_SECONDS", -1.0)
    monkeypatch.setattr(leftovers, "folders", lambda: ("/dev/shm", str(temporary)))
    with subprocess.Popen(
        [*launching._mpiexec(), "-n", "2", sys.executable, str(launching.program(WORKS, tmp_path))],
        env=launching.environment() | {"TMPDIR": str(temporary), launching.JOB_MARK: str(tmp_path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as job:
        assert job.stdout is not None
        try:
            assert "works" in job.stdout.readline()
            processes = launching._marked(str(tmp_path))
            used = "\n".join(path for process in processes for path in leftovers.used_by(f"/proc/{process}"))
            own = {str(path) for folder in leftovers.folders() for path in Path(folder).iterdir() if str(path) in used}
            if not own:
                pytest.skip("this MPI has nothing that could be left")
            assert own.isdisjoint(leftovers.leftover_paths())
        finally:
            launching._kill(job, str(tmp_path))
    # Other tests of this machine leave something, too, and use what they have. A killed process shows no environment
    # any more while it still closes its files.
    end, gone = time.monotonic() + 10, list[str]()
    while not gone and time.monotonic() < end:
        gone = sorted(own & {*leftovers.leftover_paths()})
    assert gone
    monkeypatch.setattr(leftovers, "leftover_paths", lambda: gone)
    assert leftovers.run() == 0
    assert not any(os.path.exists(path) for path in gone)
