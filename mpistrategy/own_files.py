"""Files in folders where other users may write: which of them are opened, who may read new ones, what is shown of them.

A name there may stand for anything: somebody else's file, a pipe or a device that keeps its reader waiting, a link to
elsewhere.  So a file is opened without following a link and without waiting, and is looked at once it is open: never
first by name.  What belongs to root counts as the user's own, since root can write everywhere anyway.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

#: How a file is opened that may be something else.
READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
#: And a new one, which nobody has made before.
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 2**20


def is_own(state: os.stat_result, folder: os.stat_result | None = None) -> bool:
    """Return whether something belongs to this user, or to root; or to whom the folder belongs that it is in.

    The last matters to root, whose files on a network's file system may belong to nobody.
    """
    return state.st_uid in (os.geteuid(), 0) or (folder is not None and state.st_uid == folder.st_uid)


def is_trusted(state: os.stat_result, folder: os.stat_result) -> bool:
    """Return whether something in a folder that the user has named was put there by somebody whom the user trusts.

    That is this user, root, and whoever else may write to that folder, its owner or its group; but not everybody.
    """
    return is_own(state) or not folder.st_mode & stat.S_IWOTH


def others_can_write(state: os.stat_result) -> bool:
    """Return whether other users than its owner could have written something."""
    return bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def user_in_words(number: int) -> str:
    """Return ``user me (uid 1000)``; without a name where the system knows none."""
    with suppress(ImportError, KeyError):
        import pwd  # here, for the quick import

        return f"user {pwd.getpwuid(number).pw_name} (uid {number})"
    return f"uid {number}"


def open_own(name: str, folder: int | None = None) -> int:
    """Open a file of this user's own to be read; return its descriptor.

    Args:
        name: its path.
        folder: the descriptor of an open folder that `name` is in; None for a path of its own.

    Raises:
        OSError: when it cannot be opened, is no file, or belongs to somebody else; `strerror` says it.
    """
    descriptor = open_file(name, folder)
    owner = os.fstat(descriptor)
    if not is_own(owner):
        os.close(descriptor)
        raise PermissionError(errno.EACCES, f"it belongs to {user_in_words(owner.st_uid)}", name)
    return descriptor


def open_file(name: str, folder: int | None = None) -> int:
    """Open anybody's file to be read; as `open_own`."""
    try:
        descriptor = os.open(name, READING, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link; name the file itself", name) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", name)
    return descriptor


def open_trusted(name: str) -> int:
    """Open a file that the user has named to be read; as `open_own`, but with the files that `is_trusted` accepts."""
    descriptor = open_file(name)
    state = os.fstat(descriptor)
    if not is_trusted(state, os.stat(os.path.dirname(name) or os.curdir)):
        os.close(descriptor)
        owner = user_in_words(state.st_uid)
        raise PermissionError(errno.EACCES, f"it belongs to {owner}, and everybody can write to its folder", name)
    return descriptor


def read(name: str, most: int, folder: int | None = None) -> bytes:
    """Return the bytes of a small file of this user's own.

    Args:
        name: its path.
        most: how many bytes it may have.
        folder: as in `open_own`.

    Raises:
        OSError: as `open_own`; and when it has more bytes.
    """
    descriptor = open_own(name, folder)
    try:
        return read_all(descriptor, most, name)
    finally:
        os.close(descriptor)


def read_all(descriptor: int, most: int, name: str = "") -> bytes:
    """Return the bytes of an open file from where it is; OSError when there are more than `most`."""
    pieces, left = [], most + 1
    while left > 0 and (piece := os.read(descriptor, min(left, _PIECE_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    if left <= 0:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", name)
    return b"".join(pieces)


# ------------------------------------------------------------------------------------------------ new ones


def file_mode(folder: os.stat_result) -> int:
    """Return who may read a new file in a folder: the user; and the group where the folder is a group's (setgid).

    The umask may take away from that, and adds nothing.
    """
    return 0o640 if folder.st_mode & stat.S_ISGID else 0o600


def make_folder(path: str) -> None:
    """Make a folder for the user; in a folder that is a group's (setgid), whose group it inherits, for the group, too.

    Raises:
        OSError: when it is there already, or cannot be made.
    """
    above = os.stat(os.path.dirname(path) or os.curdir)
    os.mkdir(path, 0o750 if above.st_mode & stat.S_ISGID else 0o700)


def make_folders(path: str) -> None:
    """Make a folder, and those that it lies in, where they are missing, each as `make_folder`; OSError if it cannot."""
    if not os.path.isdir(path):
        above = os.path.dirname(os.path.abspath(path))
        if above != path:
            make_folders(above)
        with suppress(FileExistsError):
            make_folder(os.path.abspath(path))


def new_file(path: str) -> int:
    """Open a file that is not there yet to be written; return its descriptor.  Readable as `file_mode` says.

    Raises:
        OSError: when there is something, or it cannot be made.
    """
    return os.open(path, NEW, file_mode(os.stat(os.path.dirname(path) or os.curdir)))


@contextmanager
def whole_file(path: str) -> Iterator[IO[bytes]]:
    """Open a file to be written; what is there is replaced once all is written.  Readable as `file_mode` says.

    Raises:
        OSError: when it cannot be written; then there is nothing new.
    """
    temporary = f"{path}.{os.urandom(4).hex()}.new"
    descriptor = new_file(temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextmanager
def replacing(name: str, place: int, temporary: str, folder: int) -> Iterator[IO[bytes]]:
    """Open a file to be written, under a name that nobody else uses; it gets its own name once all is written.

    Args:
        name: its own; what is there is replaced.
        place: the descriptor of the folder of that; the file is readable as `file_mode` says of it.
        temporary: the name meanwhile; what has it is of a process that is gone.
        folder: the descriptor of the folder of that.

    Raises:
        OSError: when it cannot be written; then there is nothing new.
    """
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    descriptor = os.open(temporary, NEW, file_mode(os.fstat(place)), dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=place)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


# ------------------------------------------------------------------------------------------------ their text


def printable(text: str, keep: str = "\n\t") -> str:
    """Return a text for a terminal: what would steer it, or turn its letters around, is shown as an escape.

    Args:
        text: the text.
        keep: control characters that stay; "" for what has to stay in its line.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )
