"""The lock of a folder of checkpoints: one file that only its user can open.

Who can open a file, even for reading, can lock it.  So the group of a setgid folder cannot open it, and a lock file of
another user is refused.  A forked child does not share its parent's lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from weakref import WeakSet

from mpistrategy import own_files
from mpistrategy.checkpoint.storage.files import Folder, lock
from mpistrategy.errors import CheckpointExistsError

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODE = 0o600
#: Errors of open() for another user's file, a link, a folder or a socket.
_SOMETHING_ELSE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO)


class _Lock(Folder):
    """A locked file.  The lock ends with its last descriptor: a forked child closes its own, and does not unlock."""

    def close(self) -> None:
        """Unlock and close it: a child that is being forked may hold a descriptor, too."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):  # closing unlocks it, too
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        super().close()


_locks: WeakSet[_Lock] = WeakSet()
_watches_forks = False


def _close_in_child() -> None:
    for each in list(_locks):
        Folder.close(each)


def _watch_forks(file: _Lock) -> None:
    global _watches_forks
    _locks.add(file)
    if not _watches_forks:
        _watches_forks = True
        os.register_at_fork(after_in_child=_close_in_child)


def locked_file(folder: Folder, name: str) -> Folder | None:
    """Return a locked file in a folder, made if missing; None if the file system has no locks.  The caller closes it.

    Raises:
        CheckpointExistsError: if another process holds it, or it is not a file of this user.
        OSError: if it cannot be made.
    """
    path = os.path.join(folder.path, name)
    try:
        file = _Lock(os.open(name, _FLAGS, _MODE, dir_fd=folder.descriptor), path)
    except OSError as error:
        if error.errno not in _SOMETHING_ELSE or not folder.kind_of(name):
            raise
        raise _not_ours(path, os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)) from error
    _watch_forks(file)
    try:
        state = file.state
        if not stat.S_ISREG(state.st_mode) or not folder.owns(file):
            raise _not_ours(path, state)
        is_locked = lock(file.descriptor)
        if is_locked is False:
            raise _held(path, stat.S_IMODE(state.st_mode))
        if stat.S_IMODE(state.st_mode) != _MODE:  # of an older version, or a copy
            try:
                os.fchmod(file.descriptor, _MODE)
            except PermissionError as error:
                if state.st_uid == os.geteuid():
                    raise
                raise _not_ours(path, state) from error
    except BaseException:
        file.close()
        raise
    if not is_locked:
        file.close()
    return file if is_locked else None


def _not_ours(path: str, state: os.stat_result) -> CheckpointExistsError:
    what = "a lock" if stat.S_ISREG(state.st_mode) else "something that is not a file"
    return CheckpointExistsError.at(
        "CheckpointManager",
        found=f"{what}, of {own_files.user_in_words(state.st_uid)}, at {path!r}",
        expected="a folder that only you save into",
        fix="Use a folder for each user. If nobody else saves here, remove the lock.",
    )


def _held(path: str, mode: int) -> CheckpointExistsError:
    more = f" Others can open it (mode {mode:o}): if no job of yours saves here, remove it." if mode & 0o066 else ""
    return CheckpointExistsError.at(
        "CheckpointManager",
        found=f"another job, or another manager of this one, that has locked {path!r}",
        expected="one writer for a folder",
        fix=f"Use a folder for each job, or close() the other manager first.{more}",
    )
