"""The file system as checkpoints use it: no links are followed, nothing is overwritten, all writes are synced.

A folder is opened once, and files are opened relative to its descriptor: a symbolic link that is swapped in meanwhile
has no effect.  New files and folders are created exclusively (O_EXCL).  Only the user may read them; in a setgid
folder, the group may, too, if the umask permits.
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
from typing import Any, NamedTuple, Self

from mpistrategy import own_files
from mpistrategy.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMissingError,
    CheckpointReadError,
    CheckpointWriteError,
)
from mpistrategy.mpi.watchdog import watchdog

#: Called before each change to the file system, with the operation and the name; tests end the process or raise there.
watcher: Callable[[str, str], None] | None = None

CHECKSUM_BYTES = 16
#: How many letters make the name of a new folder unique.
TOKEN_LETTERS = 16
TOKEN = f"[0-9a-f]{{{TOKEN_LETTERS}}}"
_PIECE_BYTES = 2**24
#: The names of the files in a checkpoint.
_FILES = re.compile(
    r"manifest\.json|shard-[0-9]{5,}\.safetensors|done-[0-9]{1,9}-[0-9]{1,19}-[0-9a-f]{32}|failed-[0-9]{1,9}"
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def _before(what: str, name: str) -> None:
    if watcher is not None:
        watcher(what, name)


def checksum_of(data: Any = b"") -> Any:
    """Return a running checksum of `CHECKSUM_BYTES`."""
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES)


@contextlib.contextmanager
def writing(where: str, path: str) -> Iterator[None]:
    """Turn OSError into a CheckpointWriteError."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointWriteError.at(
            where,
            found=f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, '?')}) at {path!r}",
            expected="a folder that every rank can write to, with room in it",
        ) from error


@contextlib.contextmanager
def reading(where: str, path: str) -> Iterator[None]:
    """Turn OSError into an error about a checkpoint that cannot be read."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CheckpointDamagedError.at(
                where,
                found=f"a symbolic link, or something else than a folder, at {path!r}",
                expected="a checkpoint's own folder and files",
                fix="Name the folder itself (os.path.realpath) if you trust where it leads to.",
            ) from error
        if error.errno == errno.ENOENT:
            raise CheckpointMissingError.at(where, found=f"nothing at {path!r}", expected="a checkpoint") from error
        raise CheckpointReadError.at(
            where, found=f"{error.strerror or error} at {path!r}", expected="files that every rank can read"
        ) from error


def unique_name(prefix: str) -> str:
    """Return a name that nothing else has: the prefix, and a `TOKEN`."""
    return f"{prefix}{secrets.token_hex(TOKEN_LETTERS // 2)}"


class Folder:
    """An open folder.

    Args:
        descriptor: of the open folder; closed with this.
        path: its name, for messages.
    """

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor: int = descriptor
        self.path = path

    @classmethod
    def at(cls, path: str) -> Self:
        """Open a folder by its path; the last part must be no symbolic link."""
        return cls(os.open(path, _FOLDER), path)

    @classmethod
    def parent_of(cls, path: str) -> Self:
        """Open the parent folder of `path`; symbolic links on the way to it are followed: the user has named them."""
        parent = os.path.dirname(path)
        return cls(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), parent)

    def folder(self, name: str) -> Folder:
        """Open a folder in it."""
        return Folder(os.open(name, _FOLDER, dir_fd=self.descriptor), os.path.join(self.path, name))

    def new_folder(self, prefix: str) -> str:
        """Make a folder with a unique name; return its name."""
        name = unique_name(prefix)
        _before("mkdir", name)
        # Until it is complete, only the user may open it, also in a group's folder: who can open it can lock it.
        os.mkdir(name, 0o700, dir_fd=self.descriptor)
        return name

    def let_group_in(self, file: str) -> None:
        """Let the group read this folder if it may read `file` in it."""
        if os.stat(file, dir_fd=self.descriptor, follow_symlinks=False).st_mode & stat.S_IRGRP:
            with contextlib.suppress(OSError):  # file systems without permissions
                os.fchmod(self.descriptor, stat.S_IMODE(self.state.st_mode) | stat.S_IRGRP | stat.S_IXGRP)

    @property
    def state(self) -> os.stat_result:
        """Its `os.stat_result`."""
        return os.fstat(self.descriptor)

    def owns(self, inside: Folder) -> bool:
        """Return whether a folder in it belongs to this user or to the owner of this one."""
        return own_files.is_own(inside.state, self.state)

    def trusted_folder(self, name: str) -> Folder:
        """Open a folder in it for reading; CheckpointReadError as `check_is_trusted`."""
        found = self.folder(name)
        try:
            check_is_trusted(found.state, self.state, found.path)
        except CheckpointError:
            found.close()
            raise
        return found

    def sweep(self, names: re.Pattern[str]) -> str:
        """Remove the folders with such names that are not locked; return the name of a locked one, or "".

        Other users' folders, folders with foreign files, and what cannot be removed stay; without file locks,
        everything stays.
        """
        held = ""
        for name in filter(names.fullmatch, self.names()):
            with contextlib.suppress(OSError), self.folder(name) as left:
                is_free = left.lock() if self.owns(left) else None
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
        """Return "folder", "file", "link" or "other"; "" if there is nothing."""
        try:
            mode = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return ""
        kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISREG, "file"), (stat.S_ISLNK, "link"))
        return next((kind for is_kind, kind in kinds if is_kind(mode)), "other")

    def holds(self, name: str, folder: Folder) -> bool:
        """Return whether `name` is this open folder, and not something that replaced it."""
        there, ours = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False), os.fstat(folder.descriptor)
        return os.path.samestat(there, ours)

    # ------------------------------------------------------------------------------------------- writing

    def write(self, name: str, pieces: Iterable[Any]) -> tuple[int, str]:
        """Write a new file and sync it; return its size in bytes and its checksum."""
        checksum, size = checksum_of(), 0
        _before("create", name)
        descriptor = os.open(name, own_files.NEW, own_files.file_mode(self.state), dir_fd=self.descriptor)
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for start in range(0, len(view), _PIECE_BYTES):
                    part = view[start : start + _PIECE_BYTES]
                    checksum.update(part)
                    _before("write", name)
                    _write_all(descriptor, part)
                    _moves_on()
                size += len(view)
            _before("fsync", name)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return size, checksum.hexdigest()

    def mark(self, name: str) -> None:
        """Make an empty file."""
        _before("create", name)
        os.close(os.open(name, own_files.NEW, own_files.file_mode(self.state), dir_fd=self.descriptor))

    def unlink(self, name: str) -> None:
        """Remove a file."""
        _before("unlink", name)
        os.unlink(name, dir_fd=self.descriptor)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files in it, in bytes, by name."""
        found = {}
        for name in self.names():
            with contextlib.suppress(OSError):
                found[name] = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_size
        return found

    def sync(self) -> None:
        """Sync the names in it to the disk."""
        _before("fsync", self.path)
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some file systems cannot sync a folder, and need not
                raise

    def rename(self, old: str, new: str) -> None:
        """Rename a folder; the new name must be free, or an empty folder."""
        _before("rename", f"{old} -> {new}")
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def foreign(self) -> str:
        """Return the name of something in it that no checkpoint has; "" if there is nothing else."""
        return next((name for name in self.names() if not _FILES.fullmatch(name) or self.kind_of(name) == "folder"), "")

    def remove(self, name: str) -> None:
        """Remove a folder with the files of a checkpoint: the manifest first, without which nothing restores it.

        Raises:
            OSError: if it cannot be removed; also for another user's folder, and one with anything else in it, which
                stays as it is.
        """
        with self.folder(name) as folder:
            if not self.owns(folder):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), folder.path)
            foreign = folder.foreign()
            if foreign:
                raise OSError(errno.ENOTEMPTY, f"{foreign!r} in it is no file of a checkpoint", folder.path)
            for inner in folder.names():  # manifest.json comes before the shards
                _before("unlink", inner)
                os.unlink(inner, dir_fd=folder.descriptor)
        _before("rmdir", name)
        os.rmdir(name, dir_fd=self.descriptor)

    def lock(self) -> bool | None:
        """Lock it until it is closed or the process ends; as `lock`."""
        return lock(self.descriptor)

    # ------------------------------------------------------------------------------------------- reading

    @contextlib.contextmanager
    def file(self, name: str, size: int | None, most: int) -> Iterator[OpenFile]:
        """Open a file in it for reading.

        Args:
            name: its name.
            size: the size that it must have, in bytes; None for any.
            most: the largest size.

        Raises:
            CheckpointDamagedError: for a symbolic link, something else than a file, or another size.
            CheckpointReadError: for another user's file in a folder that everybody can write to.
        """
        where = os.path.join(self.path, name)
        try:
            descriptor = os.open(name, own_files.READING, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CheckpointDamagedError.at(
                "a checkpoint",
                found=f"a symbolic link at {where!r}",
                expected="a file",
                fix="Put the file itself there if you trust where the link leads to.",
            ) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointDamagedError.at("a checkpoint", found=f"no file at {where!r}", expected="a file")
            check_is_trusted(found, self.state, where)
            wanted = found.st_size if size is None else size
            if found.st_size != wanted or wanted > most:
                expected = f"at most {most}" if size is None else f"{size}, as its manifest says"
                raise CheckpointDamagedError.at(
                    "a checkpoint", found=f"{found.st_size} bytes in {where!r}", expected=expected
                )
            yield OpenFile(descriptor, where, wanted)
        finally:
            os.close(descriptor)

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a file of at most `most`; as `file`."""
        with self.file(name, None, most) as file:
            return file.read(0, file.size)


class OpenFile(NamedTuple):
    """A file that is open for reading.

    Attributes:
        descriptor: of the open file.
        path: its name, for messages.
        size: its size in bytes.
    """

    descriptor: int
    path: str
    size: int

    def read(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start` on.

        Raises:
            CheckpointDamagedError: if the file ends before.
        """
        return b"".join(self.pieces(start, start + count))

    def pieces(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield its bytes from `start` to `stop`, a piece at a time; as `read`."""
        while start < stop:
            piece = os.pread(self.descriptor, min(stop - start, _PIECE_BYTES), start)
            if not piece:
                raise CheckpointDamagedError.at(
                    "a checkpoint", found=f"the end of {self.path!r} after {start} bytes", expected=f"{stop}"
                )
            start += len(piece)
            _moves_on()
            yield piece


def _moves_on() -> None:
    """Tell the watchdog, if there is one, that this rank makes progress with work that may take long."""
    if watchdog.running is not None:
        watchdog.running.moves_on()


def check_is_trusted(inside: os.stat_result, folder: os.stat_result, path: str) -> None:
    """Raise CheckpointReadError unless a file or folder in another one is trusted (`own_files.is_trusted`)."""
    if not own_files.is_trusted(inside, folder):
        raise CheckpointReadError.at(
            "a checkpoint",
            found=f"{path!r}, of {own_files.user_in_words(inside.st_uid)}, in a folder that everybody can write to",
            expected="a file or folder of yours",
            fix="If you trust it, copy it to a folder of your own.",
        )


def make_folders(path: str) -> None:
    """Make a folder and its parents where they are missing; sync their names to the disk."""
    missing = []
    while not os.path.isdir(path) and path != os.path.dirname(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        _before("mkdir", path)
        with contextlib.suppress(FileExistsError):  # by another job; or it is not a folder, which fails later
            own_files.make_folder(path)
        with contextlib.suppress(PermissionError), Folder.parent_of(path) as parent:
            parent.sync()


def _write_all(descriptor: int, part: memoryview) -> None:
    while len(part):
        part = part[os.write(descriptor, part) :]


def lock(descriptor: int) -> bool | None:
    """Lock an open file or folder; return False if another process holds it, None if there are no file locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
