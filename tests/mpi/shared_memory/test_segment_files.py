"""The files of shared memory, where another process is in the way."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from mpistrategy.mpi.shared_memory import segments

pytestmark = pytest.mark.one_rank
FLOCK, OPEN = fcntl.flock, os.open


def test_what_is_in_the_place_of_a_file_is_not_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In another container the number of the descriptor may be that of a device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"")
    opened = []

    def opening(path: str, *arguments: Any, **more: Any) -> int:
        opened.append(path)
        return OPEN(path, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", opening)
        for path in ("/dev/tty", "/dev/null", tmp_path / "pipe", tmp_path / "file", tmp_path / "nothing"):
            with pytest.raises(OSError, match=r"."):
                segments._opened(f"1:2 {path}")
    assert not opened
    state = os.stat(tmp_path / "file")
    os.close(segments._opened(f"{state.st_dev}:{state.st_ino} {tmp_path / 'file'}"))
    state = os.stat(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such file"):
        segments._opened(f"{state.st_dev}:{state.st_ino} {tmp_path / 'pipe'}")


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ENOLCK])
def test_a_name_that_another_start_takes_for_a_left_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: int
) -> None:
    """It holds the lock just then, to remove the name; where there are no locks nothing is left behind."""
    monkeypatch.setattr(segments, "FOLDER", str(tmp_path))
    refused = []

    def flock(handle: int, operation: int) -> None:
        if not refused:
            refused.append(handle)
            if error == errno.EAGAIN:
                os.unlink(next(tmp_path.iterdir()))
            raise OSError(error, os.strerror(error))
        FLOCK(handle, operation)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        if error == errno.EAGAIN:
            handle, path = segments._named_file()
            assert [str(each) for each in tmp_path.iterdir()] == [path]
            os.close(handle)
        else:
            with pytest.raises(OSError, match=os.strerror(error)):
                segments._named_file()
            assert not list(tmp_path.iterdir())
    assert refused
    assert len(os.listdir("/proc/self/fd")) == before
