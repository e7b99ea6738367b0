"""The files of shared memory, where another process is in the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mpistrategy.mpi.shared_memory import segments

pytestmark = pytest.mark.one_rank
OPEN = os.open


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
