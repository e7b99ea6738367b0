"""Locks: of a folder that is being written, and of a folder of checkpoints, into which one job at a time saves.

The lock of a folder of checkpoints is a POSIX lock on a file that only its user can open.  A forked child does not
share it.  Within one process such a lock is always granted, so this module remembers which locks the process holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

from mpistrategy.errors import CheckpointExistsError

#: What file systems without locks say.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: The processes and the files that they have locked by `OneWriter`.
_locked: set[tuple[int, str]] = set()


class Lock:
    """An open file or folder that is locked until it is closed or the process ends.

    Args:
        path: the file or folder.
        flags: of os.open.
        take: `fcntl.flock` or `fcntl.lockf`.

    Attributes:
        is_held: whether it is locked; False where the file system has no locks.

    Raises:
        BlockingIOError: if another one holds the lock.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: str, flags: int, take: Callable[[int, int], object]) -> None:
        self._descriptor: int = os.open(path, flags | _FLAGS, 0o600)
        self.is_held: bool = True
        try:
            take(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.is_held = False
            if error.errno not in _NO_LOCKS:
                self.close()
                raise

    def close(self) -> None:
        """Give the lock up, if it was not before."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class OneWriter(Lock):
    """The lock of a folder of checkpoints: its file ``.lock``.

    Args:
        folder: the folder.

    Attributes:
        process: the process that has locked it.

    Raises:
        CheckpointExistsError: if another job or another manager of this process holds it.
        OSError: if it cannot be opened: it is another user's, say.
    """

    def __init__(self, folder: str) -> None:
        path = os.path.join(os.path.realpath(folder), ".lock")
        self.process: int = os.getpid()
        self._key = self.process, path
        if self._key in _locked:  # opening and closing the file would give up the lock that is there
            raise _held(path)
        try:
            super().__init__(path, os.O_RDWR | os.O_CREAT, fcntl.lockf)
        except BlockingIOError as error:
            raise _held(path) from error
        _locked.add(self._key)

    def close(self) -> None:
        """Give the lock up, if it was not before."""
        super().close()
        _locked.discard(self._key)


def _held(path: str) -> CheckpointExistsError:
    return CheckpointExistsError.at(
        "CheckpointManager",
        found=f"another job, or another manager of this one, that has locked {path!r}",
        expected="one writer for a folder",
        fix="Use a folder for each job, or close() the other manager first.",
    )
