"""Files of one's own: how they are written, and what of a text is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrategy import own_files
from mpistrategy.objects.text import printable

pytestmark = pytest.mark.one_rank


def test_an_own_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    assert own_files.read(str(tmp_path / "x"), 100) == bytes(100)
    assert own_files.read("/etc/passwd", 2**20), "root's count as one's own"
    with pytest.raises(OSError, match="more than 99 bytes"):
        own_files.read(str(tmp_path / "x"), 99)
    with pytest.raises(FileExistsError):
        own_files.new_file(str(tmp_path / "x"))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        own_files.new_file(str(tmp_path / "link"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_is_written_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")

    def write(text: bytes) -> None:
        with own_files.whole_file(str(tmp_path / "x")) as file:
            file.write(text)
            assert (tmp_path / "x").read_text() == "old"
            if not text:
                raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # its own
        write(b"")
    assert (tmp_path / "x").read_text() == "old"
    write(b"new")
    assert (tmp_path / "x").read_text() == "new"
    assert os.listdir(tmp_path) == ["x"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"), own_files.whole_file(str(tmp_path / "pipe")):
        pass


def test_what_steers_a_terminal_is_shown_as_an_escape() -> None:
    shown = printable("a\x1b[2J\x9b31m\x07\r\n\tb\u202ec\u2066\u2028\x00\ud800é")
    assert shown == "a\\x1b[2J\\x9b31m\\x07\\r\n\tb\\u202ec\\u2066\\u2028\\x00\\ud800é"
    assert printable("a\nb\tc", "") == "a\\nb\\tc"


@given(st.text())
def test_all_text_becomes_printable(text: str) -> None:
    shown = printable(text, "")
    assert shown.isprintable()
    assert shown == text or not text.isprintable()
    assert printable(text).replace("\n", "").replace("\t", "").isprintable()
