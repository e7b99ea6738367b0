"""Files where other users can write: which are opened, who may read new ones, and what of their text is shown."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrategy import own_files
from mpistrategy.objects.text import printable

pytestmark = pytest.mark.one_rank

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root can give files to another user")


def made_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


#: What may stand under a name, and a word of what is said of it.
OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "No such file"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "a folder": (Path.mkdir, "not a regular file"),
    "a link to a file": (lambda path: path.symlink_to(__file__), "a symbolic link"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "a symbolic link"),
    "a socket": (made_socket, "No such device"),
    "a large file": (lambda path: path.write_bytes(bytes(101)), "more than 100 bytes"),
    "a sparse file": (lambda path: [path.touch(), os.truncate(path, 2**42)], "more than 100 bytes"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_small_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    make, word = OTHERS[what]
    make(tmp_path / "x")
    began = time.monotonic()
    with pytest.raises(OSError, match=word):
        own_files.read(str(tmp_path / "x"), 100)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/full", "/dev/tty"])
def test_devices_are_not_read(device: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011  # of whatever kind the system has
        own_files.read(device, 100)


def test_an_own_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    assert own_files.read(str(tmp_path / "x"), 100) == bytes(100)
    assert own_files.read("/etc/passwd", 2**20), "root's count as one's own"


@as_root
def test_another_users_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"planted")
    os.chown(tmp_path / "x", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=r"it belongs to .*uid 65534"):
        own_files.read(str(tmp_path / "x"), 100)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("is_of_group", [False, True])
def test_new_files_and_folders(tmp_path: Path, umask: int, is_of_group: bool) -> None:
    tmp_path.chmod(0o2775 if is_of_group else 0o777)
    before = os.umask(umask)
    try:
        own_files.make_folders(str(tmp_path / "a" / "b"))
        own_files.make_folders(str(tmp_path / "a" / "b"))
        os.close(own_files.new_file(str(tmp_path / "a" / "b" / "x")))
    finally:
        os.umask(before)
    group = is_of_group and umask != 0o077
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o777 == (0o750 if group else 0o700)
        assert bool(path.stat().st_mode & stat.S_ISGID) == is_of_group
    assert stat.S_IMODE((tmp_path / "a" / "b" / "x").stat().st_mode) == (0o640 if group else 0o600)
    with pytest.raises(FileExistsError):
        own_files.new_file(str(tmp_path / "a" / "b" / "x"))
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
