"""Files in folders where other users may write: opening and creating them safely.

A name in such a folder may be another user's file, a symbolic link, or a pipe or device that blocks its reader.  So a
file is opened without following links and without blocking, and is checked after it is open, never by name.  Files of
root count as the user's own: root can write everywhere anyway.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

#: The flags for reading a file that may be a link, a pipe or a device.
READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
#: The flags for creating a file that must not exist.
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 2**20


def is_own(state: os.stat_result, folder: os.stat_result | None = None) -> bool:
    """Return whether a file belongs to this user, to root, or to the owner of its folder.

    The owner of the folder matters to root, whose files on a network file system may belong to nobody.
    """
    return state.st_uid in (os.geteuid(), 0) or (folder is not None and state.st_uid == folder.st_uid)


def is_trusted(state: os.stat_result, folder: os.stat_result) -> bool:
    """Return whether a file in a folder that the user has named can be trusted.

    It can if it belongs to this user or to root, or if only the folder's owner and group may write to the folder.
    """
    return is_own(state) or not folder.st_mode & stat.S_IWOTH


def others_can_write(state: os.stat_result) -> bool:
    """Return whether users other than the owner may write to a file."""
    return bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def user_in_words(number: int) -> str:
    """Return ``user me (uid 1000)``; without a name where the system knows none."""
    with suppress(ImportError, KeyError):
        import pwd  # here, for the quick import

        return f"user {pwd.getpwuid(number).pw_name} (uid {number})"
    return f"uid {number}"


def open_own(name: str, folder: int | None = None) -> int:
    """Open a file of this user for reading; return its descriptor.

    Args:
        name: its path.
        folder: the descriptor of the open folder that `name` is relative to, whose owner's files are taken, too; None
            for an ordinary path.

    Raises:
        OSError: when it cannot be opened, is not a regular file, or belongs to another user; `strerror` says which.
    """
    descriptor = open_file(name, folder)
    owner = os.fstat(descriptor)
    if not is_own(owner, None if folder is None else os.fstat(folder)):
        os.close(descriptor)
        raise PermissionError(errno.EACCES, f"it belongs to {user_in_words(owner.st_uid)}", name)
    return descriptor


def open_file(name: str, folder: int | None = None) -> int:
    """Open a file of any user for reading; otherwise as `open_own`."""
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
    """Open a file that the user has named for reading; as `open_own`, but for files that `is_trusted` accepts."""
    descriptor = open_file(name)
    state = os.fstat(descriptor)
    if not is_trusted(state, os.stat(os.path.dirname(name) or os.curdir)):
        os.close(descriptor)
        owner = user_in_words(state.st_uid)
        raise PermissionError(errno.EACCES, f"it belongs to {owner}, and everybody can write to its folder", name)
    return descriptor


def read(name: str, most: int, folder: int | None = None) -> bytes:
    """Return the bytes of a small file of this user.

    Args:
        name: its path.
        most: the most bytes it may have.
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
    """Return the bytes of an open file from its position on; OSError when there are more than `most`."""
    pieces, left = [], most + 1
    while left > 0 and (piece := os.read(descriptor, min(left, _PIECE_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    if left <= 0:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", name)
    return b"".join(pieces)


# ------------------------------------------------------------------------------------------------ new ones


def file_mode(folder: os.stat_result) -> int:
    """Return the mode of a new file in a folder: readable by the user, and by the group where the folder is setgid.

    The umask may remove permissions.
    """
    return 0o640 if folder.st_mode & stat.S_ISGID else 0o600


def make_folder(path: str) -> None:
    """Make a folder for the user; inside a setgid folder also for its group, which the new one inherits.

    Raises:
        OSError: when it exists already, or cannot be made.
    """
    above = os.stat(os.path.dirname(path) or os.curdir)
    os.mkdir(path, 0o750 if above.st_mode & stat.S_ISGID else 0o700)


def make_folders(path: str) -> None:
    """Make a folder and its missing parents, each as `make_folder`; OSError when one cannot be made."""
    if not os.path.isdir(path):
        above = os.path.dirname(os.path.abspath(path))
        if above != path:
            make_folders(above)
        with suppress(FileExistsError):
            make_folder(os.path.abspath(path))


def new_file(path: str) -> int:
    """Create a file for writing with the mode of `file_mode`; return its descriptor.

    Raises:
        OSError: when the name exists, or the file cannot be created.
    """
    return os.open(path, NEW, file_mode(os.stat(os.path.dirname(path) or os.curdir)))


@contextmanager
def whole_file(path: str) -> Iterator[IO[bytes]]:
    """Open a file for writing with the mode of `file_mode`; it replaces an existing file when it is complete.

    Raises:
        OSError: when it cannot be written; nothing has changed then.
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
    """Open a file for writing under a temporary name; it gets its final name when it is complete.

    Args:
        name: the final name; an existing file is replaced.
        place: the descriptor of its folder, which determines the mode as `file_mode` says.
        temporary: the temporary name, which no other process uses; an existing file was left by an ended process.
        folder: the descriptor of the folder of the temporary file.

    Raises:
        OSError: when it cannot be written; nothing has changed then.
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
