"""The file system as checkpoints use it: nothing is overwritten, all writes are synced, only the user can read it.

New files and folders are created exclusively.  In a setgid folder the group may read them, too, if the umask permits.
A symbolic link in the place of a checkpoint or of one of its files is refused.

A folder that is being written is locked, and so is a folder of checkpoints, into which one job at a time saves: by a
POSIX lock on a file that only its user can open.  A forked child does not share it.  Within one process such a lock is
always granted, so this module remembers which locks the process holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpistrategy import own_files
from mpistrategy.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMissingError,
    CheckpointReadError,
    CheckpointWriteError,
    MpiStrategyError,
)
from mpistrategy.mpi.watchdog import watchdog


def nobody(operation: str, name: str) -> None:
    """Do nothing before a change to the file system."""


#: Called before each change to the file system, with the operation and the name; tests end the process or raise there.
watcher: Callable[[str, str], None] = nobody

#: What file systems without locks say.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
#: The processes and what they have locked.
_locked: set[tuple[int, str]] = set()
#: What makes the name of a new folder unique.
TOKEN = "[0-9a-f]{16}"
#: Files are written and read in pieces of so many bytes.
PIECE_BYTES = 2**24
#: The names of the files in a checkpoint.
_FILES = re.compile(
    r"manifest\.json|shard-[0-9]{5,}\.safetensors|done-[0-9]{1,9}-[0-9]{1,19}-[0-9a-f]{32}|failed-[0-9]{1,9}"
)
#: What is said of a symbolic link, a file in the place of a folder, something that is not a file, and a large file.
_DAMAGED = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EFBIG)


def checksum_of(data: Any = b"") -> Any:
    """Return a running checksum of 16 bytes."""
    return hashlib.blake2b(data, digest_size=16)


@contextlib.contextmanager
def writing(where: str, path: str) -> Iterator[None]:
    """Turn any error that is not of this package into a CheckpointWriteError."""
    try:
        yield
    except MpiStrategyError:
        raise
    except Exception as error:
        name = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        text = f"{getattr(error, 'strerror', None) or error} ({name})"
        raise CheckpointWriteError.at(
            where,
            found=f"{text} at {getattr(error, 'filename', None) or path!r}",
            expected="a folder that every rank can write to, with room in it",
        ) from error


@contextlib.contextmanager
def reading(where: str, path: str) -> Iterator[None]:
    """Turn OSError and MemoryError into an error about a checkpoint that cannot be read."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        if os.path.lexists(path):
            name = os.path.basename(error.filename)
            raise damaged(path, f"no {name}: it was not finished, or is not a checkpoint") from error
        raise CheckpointMissingError.at(where, found=f"nothing at {path!r}", expected="a checkpoint") from None
    except (OSError, MemoryError) as error:
        text = f"{getattr(error, 'strerror', '') or str(error) or 'not enough memory'} at {path!r}"
        if getattr(error, "errno", 0) in _DAMAGED:
            raise CheckpointDamagedError.at(
                where,
                found=f"a symbolic link, or something else than was written: {text}",
                expected="a checkpoint's own folder and files",
                fix="Name the folder or file itself (os.path.realpath) if you trust where a link leads to.",
            ) from error
        raise CheckpointReadError.at(where, found=text, expected="files that every rank can read") from error


def parts_of(data: Any) -> Iterator[Any]:
    """Yield a view or an array of bytes in parts; tell the watchdog after each that this rank makes progress."""
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
        watchdog.here.moves_on()


# ------------------------------------------------------------------------------------------------ writing


def change(do: Callable[..., object], *paths: str) -> None:
    """Make, remove or rename what is at some paths.  A new name must be free, or an empty folder."""
    watcher(do.__name__, " -> ".join(map(os.path.basename, paths)))
    do(*paths)


def write(path: str, pieces: Iterable[Any]) -> tuple[int, str]:
    """Write a new file and sync it; return its size in bytes and its checksum."""
    checksum, size, name = checksum_of(), 0, os.path.basename(path)
    watcher("create", name)
    with os.fdopen(own_files.new_file(path), "wb") as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for part in parts_of(view):
                checksum.update(part)
                watcher("write", name)
                file.write(part)
            size += len(view)
        file.flush()
        watcher("fsync", name)
        os.fsync(file.fileno())
    return size, checksum.hexdigest()


def make_folders(folder: str) -> None:
    """Make a folder and its missing parents, whose names reach the disk."""
    for new in own_files.make_folders(folder):
        with contextlib.suppress(PermissionError):  # of a folder that cannot be listed
            sync(os.path.dirname(new))


def sync(folder: str) -> None:
    """Sync the names in a folder to the disk."""
    watcher("fsync", os.path.basename(folder))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder, and need not
            raise
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------ locks


class Lock:
    """An open file or folder that this process has locked until it is closed or the process ends.

    Args:
        path: the folder, locked by `flock`; or the file, by a POSIX lock, which a forked child does not share.
        flags: of os.open.

    Attributes:
        process: this process.
        is_held: whether it is locked; False where the file system has no locks.

    Raises:
        BlockingIOError: if it is locked, by this process, too.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: str, flags: int = os.O_RDONLY | os.O_DIRECTORY) -> None:
        self.process: int = os.getpid()
        self._key = self.process, path
        if self._key in _locked:  # opening and closing the file would give up a POSIX lock that is there
            raise BlockingIOError(errno.EAGAIN, "this process has locked it", path)
        self._descriptor: int = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        self.is_held: bool = True
        try:
            lock = fcntl.flock if flags & os.O_DIRECTORY else fcntl.lockf
            lock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locked.add(self._key)
        except OSError as error:
            self.is_held = False
            if error.errno not in _NO_LOCKS:
                os.close(self._descriptor)
                raise

    def close(self) -> None:
        """Give the lock up, if it was not before."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _locked.discard(self._key)


# ------------------------------------------------------------------------------------------------ removing


def is_folder(path: str) -> bool:
    """Return whether there is a folder, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def is_ours(folder: str) -> bool:
    """Return whether there is a folder, and not a link to one, with nothing in it but the files of a checkpoint."""
    names = os.listdir(folder) if is_folder(folder) else ["not a folder"]
    return all(_FILES.fullmatch(name) and not is_folder(os.path.join(folder, name)) for name in names)


def remove(folder: str) -> None:
    """Remove a checkpoint: the manifest first, without which nothing restores it.

    A link, and a folder with anything else in it, stays as it is.

    Raises:
        OSError: if it cannot be removed.
    """
    if is_ours(folder):
        for name in sorted(os.listdir(folder)):  # manifest.json comes before the shards
            change(os.unlink, os.path.join(folder, name))
        change(os.rmdir, folder)


def sweep(folder: str, names: re.Pattern[str]) -> str:
    """Remove the folders with such names that are not locked; return the name of a locked one, or "".

    What cannot be removed stays; without file locks, everything stays.
    """
    locked = ""
    for name in filter(names.fullmatch, sorted(os.listdir(folder))):
        path = os.path.join(folder, name)
        try:
            if is_ours(path):
                with contextlib.closing(Lock(path)) as lock:
                    if lock.is_held:
                        remove(path)
        except OSError as error:
            locked = name if isinstance(error, BlockingIOError) else locked
    return locked


# ------------------------------------------------------------------------------------------------ reading


def check_is_trusted(folder: str) -> None:
    """Raise unless a folder may be read from.

    Raises:
        NotADirectoryError: for a link, or something else than a folder.
        CheckpointReadError: for another user's folder, in a folder that everybody can write to.
    """
    state = os.lstat(folder)
    if not is_folder(folder):
        raise NotADirectoryError(errno.ENOTDIR, "it is a symbolic link, or not a folder", folder)
    if not own_files.is_trusted(state, os.stat(os.path.dirname(folder))):
        raise CheckpointReadError.at(
            "a checkpoint",
            found=f"{folder!r}, of uid {state.st_uid}, in a folder that everybody can write to",
            expected="a file or folder of yours",
            fix="If you trust it, copy it to a folder of your own.",
        )


def damaged(path: str, found: str) -> CheckpointDamagedError:
    """Return the error for a damaged checkpoint or file of arrays."""
    return CheckpointDamagedError.at("a checkpoint", found=f"{found}, at {path!r}", expected="a whole checkpoint")
