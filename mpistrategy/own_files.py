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


def is_trusted(state: os.stat_result, folder: os.stat_result | None) -> bool:
    """Return whether a file can be trusted: it belongs to this user or to root, or to a folder that is safe.

    Args:
        state: of the file.
        folder: of its folder, where the user has named it: only its owner and group may write to it.  None: any folder.
    """
    return state.st_uid in (os.geteuid(), 0) or (folder is not None and not folder.st_mode & stat.S_IWOTH)


def open_trusted(name: str, only_own: bool = False) -> int:
    """Open a file for reading; return its descriptor.

    Args:
        name: its path.
        only_own: whether it must be of this user or root in a folder that is safe, too.

    Raises:
        OSError: when it cannot be opened, is not a regular file, or belongs to another user; `strerror` says which.
    """
    try:
        descriptor = os.open(name, READING)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a symbolic link; name the file itself"
        raise
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        problem = OSError(errno.EINVAL, "it is not a regular file", name)
    elif is_trusted(state, None if only_own else _state_of_folder(name)):
        return descriptor
    else:
        why = "" if only_own else ", and everybody can write to its folder"
        problem = PermissionError(errno.EACCES, f"it belongs to uid {state.st_uid}{why}", name)
    os.close(descriptor)
    raise problem


def _state_of_folder(name: str) -> os.stat_result:
    return os.stat(os.path.dirname(name) or os.curdir)


def read(name: str, most: int, only_own: bool = True) -> bytes:
    """Return the bytes of a small file.

    Args:
        name: its path.
        most: the most bytes it may have.
        only_own: as in `open_trusted`.

    Raises:
        OSError: as `open_trusted`; and when it has more bytes.
    """
    with os.fdopen(open_trusted(name, only_own), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", name)
    return data


# ------------------------------------------------------------------------------------------------ new files and folders


def make_folder(path: str) -> None:
    """Make a folder for the user; inside a setgid folder also for its group, which the new folder inherits.

    Raises:
        OSError: when it exists already, or cannot be made.
    """
    os.mkdir(path, 0o750 if _state_of_folder(path).st_mode & stat.S_ISGID else 0o700)


def make_folders(path: str) -> list[str]:
    """Make a folder and its missing parents, each as `make_folder`; return those that were missing.

    Raises:
        OSError: when one cannot be made.
    """
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return []
    missing = [*make_folders(os.path.dirname(path)), path]
    with suppress(FileExistsError):
        make_folder(path)
    return missing


def new_file(path: str) -> int:
    """Create a file for writing; return its descriptor.

    The user can read it, and the group where the folder is setgid; the umask may remove permissions.

    Raises:
        OSError: when the name exists, or the file cannot be created.
    """
    return os.open(path, NEW, 0o640 if _state_of_folder(path).st_mode & stat.S_ISGID else 0o600)


@contextmanager
def whole_file(path: str) -> Iterator[IO[bytes]]:
    """Open a file for writing as `new_file` does; it replaces an existing file when it is complete.

    Raises:
        OSError: when it cannot be written; nothing has changed then.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    temporary = f"{path}.{os.urandom(4).hex()}.new"
    descriptor = new_file(temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
