"""The file system as checkpoints use it: nothing is followed, nothing is overwritten, everything reaches the disk.

A folder is opened once, and what is in it is named relative to that: whoever swaps a symbolic link in meanwhile moves
nothing.  New files and folders have names of their own (O_EXCL) and the permissions that the umask leaves.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from mpistrategy.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMissingError,
    CheckpointReadError,
    CheckpointWriteError,
)
from mpistrategy.mpi import watchdog

#: Called before each change to the file system, with what it is and the name: a seam for tests, which end the process
#: or raise OSError there.
watcher: Callable[[str, str], None] | None = None

_PIECE_BYTES = 2**24
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not keep us waiting
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def _before(what: str, name: str) -> None:
    if watcher is not None:
        watcher(what, name)


def checksum_of(data: Any = b"") -> Any:
    """Return a running checksum of 16 bytes."""
    return hashlib.blake2b(data, digest_size=16)


@contextlib.contextmanager
def writing(where: str, path: str) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointWriteError.at(
            where,
            found=f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, '?')}) at {path!r}",
            expected="a folder that every rank can write to, with room in it",
            fix="Nothing half-made is left under the checkpoint's name.",
        ) from error


@contextlib.contextmanager
def reading(where: str, path: str) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CheckpointDamagedError.at(
                where,
                found=f"a symbolic link, or no folder, at {path!r}",
                expected="a checkpoint's own folder and files",
                fix="Name the folder itself (os.path.realpath) if you trust where it leads to.",
            ) from error
        if error.errno == errno.ENOENT:
            raise CheckpointMissingError.at(where, found=f"nothing at {path!r}", expected="a checkpoint") from error
        raise CheckpointReadError.at(
            where, found=f"{error.strerror or error} at {path!r}", expected="files that every rank can read"
        ) from error


class Folder:
    """An open folder.

    Args:
        descriptor: of the open folder; closed with this.
        path: its name, for messages.
    """

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor = descriptor
        self.path = path

    @classmethod
    def at(cls, path: str) -> Self:
        """Open a folder by its path; the last part must be no symbolic link."""
        return cls(os.open(path, _FOLDER), path)

    @classmethod
    def parent_of(cls, path: str) -> Self:
        """Open the folder in which `path` lies: links that lead there are the user's own."""
        parent = os.path.dirname(path)
        return cls(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), parent)

    def folder(self, name: str) -> Folder:
        """Open a folder in it."""
        return Folder(os.open(name, _FOLDER, dir_fd=self.descriptor), os.path.join(self.path, name))

    def new_folder(self, prefix: str) -> str:
        """Make a folder that nobody else has; return its name."""
        name = f"{prefix}{secrets.token_hex(8)}"
        _before("mkdir", name)
        os.mkdir(name, dir_fd=self.descriptor)
        return name

    def sweep(self, names: re.Pattern[str]) -> str:
        """Remove the folders with such names that nobody has locked; return one that is locked, or "".

        What is no folder stays, what cannot be removed, and everything where the file system has no locks.
        """
        held = ""
        for name in filter(names.fullmatch, self.names()):
            with contextlib.suppress(OSError), self.folder(name) as left:
                is_free = left.lock()
                if is_free:
                    self.remove(name)
                elif is_free is False:
                    held = name
        return held

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it, and give up a lock on it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def names(self) -> list[str]:
        """Return the names of what is in it."""
        return sorted(os.listdir(self.descriptor))

    def kind_of(self, name: str) -> str:
        """Return "folder", "file", "link", "other" or "" for what is not there."""
        try:
            mode = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return ""
        kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISREG, "file"), (stat.S_ISLNK, "link"))
        return next((kind for is_kind, kind in kinds if is_kind(mode)), "other")

    def holds(self, name: str, folder: Folder) -> bool:
        """Return whether `name` is this open folder, and not what somebody has put in its place."""
        there, ours = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False), os.fstat(folder.descriptor)
        return os.path.samestat(there, ours)

    # ------------------------------------------------------------------------------------------- writing

    def write(self, name: str, pieces: Iterable[Any]) -> tuple[int, str]:
        """Write a new file and see it on the disk; return how many bytes it has and their checksum."""
        checksum, size = checksum_of(), 0
        _before("create", name)
        descriptor = os.open(name, _NEW_FILE, 0o666, dir_fd=self.descriptor)
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for start in range(0, len(view), _PIECE_BYTES):
                    part = view[start : start + _PIECE_BYTES]
                    checksum.update(part)
                    _before("write", name)
                    _write_all(descriptor, part)
                    watchdog.moves_on()
                size += len(view)
            _before("fsync", name)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return size, checksum.hexdigest()

    def sync(self) -> None:
        """See the names in it on the disk."""
        _before("fsync", self.path)
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some file systems have nothing to do for a folder, and say it so
                raise

    def rename(self, old: str, new: str) -> None:
        """Give a folder another name, which nothing but an empty folder may have."""
        _before("rename", f"{old} -> {new}")
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str, first: str = "") -> None:
        """Remove a folder and the files in it; `first` goes first.  Folders inside it, which are not ours, stay."""
        with self.folder(name) as folder:
            for inner in sorted(folder.names(), key=lambda inner: inner != first):
                if folder.kind_of(inner) == "folder":
                    continue
                _before("unlink", inner)
                os.unlink(inner, dir_fd=folder.descriptor)
        _before("rmdir", name)
        os.rmdir(name, dir_fd=self.descriptor)

    def lock(self) -> bool | None:
        """Lock it until it is closed or the process ends; None where the file system has no locks."""
        return _lock(self.descriptor)

    def lock_file(self, name: str) -> Folder | None:
        """Return a locked file in it, made where missing, to be closed; None where the file system has no locks.

        Raises:
            CheckpointExistsError: when another process holds it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = Folder(os.open(name, flags, 0o666, dir_fd=self.descriptor), os.path.join(self.path, name))
        locked = _lock(file.descriptor)
        if not locked:
            file.close()
        if locked is False:
            raise CheckpointExistsError.at(
                "CheckpointManager",
                found=f"another job, or another manager of this one, that writes to {self.path!r}",
                expected="one writer for a folder",
                fix="Give each job a folder of its own, or close() the other manager first.",
            )
        return file if locked else None

    # ------------------------------------------------------------------------------------------- reading

    def read(self, name: str, size: int | None, most: int) -> bytearray:
        """Return the bytes of a file.

        Args:
            name: its name here.
            size: how many bytes it must have; None for any number.
            most: how many it may have at most.

        Raises:
            CheckpointDamagedError: for what is no file, or of another size.
        """
        where = os.path.join(self.path, name)
        descriptor = os.open(name, _OLD_FILE, dir_fd=self.descriptor)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointDamagedError.at("a checkpoint", found=f"no file at {where!r}", expected="a file")
            wanted = found.st_size if size is None else size
            if found.st_size != wanted or wanted > most:
                expected = f"at most {most}" if size is None else f"the {size} that its manifest speaks of"
                raise CheckpointDamagedError.at(
                    "a checkpoint", found=f"{found.st_size} bytes in {where!r}", expected=expected
                )
            data = bytearray(wanted)
            view, done = memoryview(data), 0
            while done < wanted:
                count = os.readv(descriptor, [view[done : done + _PIECE_BYTES]])
                if count == 0:
                    raise CheckpointDamagedError.at(
                        "a checkpoint", found=f"the end of {where!r} after {done} bytes", expected=f"{wanted}"
                    )
                done += count
                watchdog.moves_on()
            return data
        finally:
            os.close(descriptor)


def make_folders(path: str) -> None:
    """Make a folder, and those that it lies in, where they are missing; see their names on the disk."""
    missing = []
    while not os.path.isdir(path) and path != os.path.dirname(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        _before("mkdir", path)
        with contextlib.suppress(FileExistsError):  # another job was quicker; or it is no folder, as will be found out
            os.mkdir(path)
        with contextlib.suppress(PermissionError), Folder.parent_of(path) as parent:
            parent.sync()


def _write_all(descriptor: int, part: memoryview) -> None:
    while len(part):
        part = part[os.write(descriptor, part) :]


def _lock(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
