"""Small files through which the watchdogs of several nodes hear of each other; and where records are written.

Nothing here may stop or slow the job: what cannot be written is not written, after one warning.  Only the user can
write to the directory, and what somebody else has put in its place is not used.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpistrategy.objects.later import later
from mpistrategy.objects.text import decoded, encoded

if TYPE_CHECKING:
    from mpistrategy import own_files
else:
    later(globals(), "mpistrategy.own_files")

#: The environment variable that names the folder of run directories; all nodes must see it.
VARIABLE = "MPISTRATEGY_RUN_DIR"
#: The beginning of their names.
PREFIX = "mpistrategy-run-"
#: What is in them: what a node tells the others, until when one is busy (in the name: its number and a time), and what
#: stays after a collective was late, or an error of several ranks has ended the job.
NODE_FILE = re.compile(r"node-([0-9]{1,9})\.json")
BUSY = re.compile(r"busy-([0-9]{1,9})-([0-9]{1,12})")
ERROR = re.compile(r"error-([0-9]{1,9})\.json")
#: It first says which node calls the roll, which makes it the alarm; then it is the roll call.
ROLL_CALL = "roll-call.txt"
#: Which rank takes no more calls, and why: ranks of other nodes may wait for it.
LEFT = "left.json"
CLAIM = re.compile(r"node ([0-9]{1,9})\n")
MOST_BYTES = 2**24
_PATIENCE_SECONDS = 1.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def place() -> str:
    """Return the folder in which run directories are made; OSError when it is gone."""
    return os.path.abspath(os.environ.get(VARIABLE) or os.getcwd())


def new_path() -> str:
    """Return the path of a new run directory, which is not made yet; all ranks use rank 0's.

    It is called ``mpistrategy-run-JOB-STEP-rRESTART-MARK``: the Slurm job and its step (without Slurm neither), how
    often it had gone back into the queue (not before the first time), and 20 hexadecimal digits that no other run has.
    """
    try:
        folder = place()
    except OSError:  # the current folder is gone
        return ""
    job, step, restart = (_number(f"SLURM_{name}") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    again = f"r{restart}" if job and int(restart or 0) else ""
    words = filter(None, (job, step if job else "", again, os.urandom(10).hex()))
    return os.path.join(folder, PREFIX + "-".join(words))


def _number(variable: str) -> str:
    text = os.environ.get(variable, "")
    return text if re.fullmatch(r"[0-9]{1,18}", text) else ""


class RunDirectory:
    """The files of one communicator's ranks.  Made when something is first written.

    Args:
        path: where, or what returns that when it is first needed; "" for nowhere.
        title: the beginning of warnings; "" for none: another rank warns.
    """

    def __init__(self, path: str | Callable[[], str], title: str = "") -> None:
        self._given = path
        self._title = title
        self._works = True
        self._written: set[str] = set()
        #: The owner of the directory, where the file system shows this user under another number.
        self._owner = -1
        # The watchdog writes while the program closes its strategies; a file system that hangs must keep neither.
        self._lock = threading.Lock()

    @functools.cached_property
    def path(self) -> str:
        """Where the files are; "" for nowhere."""
        return self._given if isinstance(self._given, str) else self._given()

    def write(self, name: str, text: str) -> bool:
        """Write a file as a whole, or warn once; return whether it is there."""
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return False
        try:
            return self._works and bool(self.path) and self._write(name, text)
        finally:
            self._lock.release()

    def write_error(self, kind: str, text: str, rank: int, data: Mapping[str, Any]) -> str:
        """Write ``error-RANK.json``: an error's class, its text, which rank writes, and more; return the path or ""."""
        name = f"error-{rank}.json"
        told = {"class": kind, "text": text, "written_by": rank, **data}
        return os.path.join(self.path, name) if self.write(name, json.dumps(told, indent=1)) else ""

    def _write(self, name: str, text: str) -> bool:
        try:
            self._put(name, encoded(text))
        except OSError as error:
            self._works = False
            if self._title:
                self._warn(error)
            return False
        self._written.add(name)
        return True

    def _put(self, name: str, data: bytes) -> None:
        if not os.path.isdir(self.path):
            own_files.make_folders(self.path)
        temporary = f"{name}.{os.getpid()}.new"
        with self._opened() as folder, own_files.replacing(name, folder, temporary, folder) as file:
            self._owner = os.fstat(file.fileno()).st_uid  # root's files may belong to nobody
            self._check_is_own(os.fstat(folder))
            file.write(data)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the directory; OSError when it cannot be, or others can write to it."""
        folder = os.open(self.path, _FOLDER)
        try:
            if own_files.others_can_write(os.fstat(folder)):
                raise PermissionError(errno.EACCES, "others can write to it")
            yield folder
        finally:
            os.close(folder)

    def _check_is_own(self, state: os.stat_result) -> None:
        if not own_files.is_own(state) and state.st_uid != self._owner:
            raise PermissionError(errno.EACCES, f"it belongs to {own_files.user_in_words(state.st_uid)}")

    def read(self, name: str) -> str:
        """Return the text of a file; "" where there is none."""
        try:
            with self._opened() as folder:
                self._check_is_own(os.fstat(folder))
                descriptor = own_files.open_file(name, folder)
                try:
                    self._check_is_own(os.fstat(descriptor))
                    return decoded(own_files.read_all(descriptor, MOST_BYTES))
                finally:
                    os.close(descriptor)
        except (OSError, ValueError):
            return ""

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        try:
            with self._opened() as folder:
                self._check_is_own(os.stat(name, dir_fd=folder, follow_symlinks=False))
                return True
        except (OSError, ValueError):
            return False

    def names(self) -> list[str]:
        """Return the names of all files; [] where the directory cannot be read."""
        try:
            with self._opened() as folder:
                self._check_is_own(os.fstat(folder))
                return os.listdir(folder)
        except OSError:
            return []

    def claim(self, name: str, text: str) -> None:
        """Write a short file, unless it is there already."""
        with contextlib.suppress(OSError):
            if not os.path.isdir(self.path):
                own_files.make_folders(self.path)
            with self._opened() as folder:
                state = os.fstat(folder)
                file = os.open(name, own_files.NEW, own_files.file_mode(state), dir_fd=folder)
                try:
                    self._owner = os.fstat(file).st_uid
                    self._check_is_own(state)
                    os.write(file, encoded(text))
                except OSError:
                    os.unlink(name, dir_fd=folder)
                finally:
                    os.close(file)

    def discard(self, name: str) -> None:
        """Remove a file that this rank has written."""
        if not self.path:  # there is none: the name would be one in the program's own folder
            return
        with contextlib.suppress(OSError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)
        self._written.discard(name)

    def remove(self) -> None:
        """Remove what this rank has written, and the directory when it is empty; no more is written."""
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return
        self._works = False
        for name in self._written:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))
        if self._written:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
        self._written.clear()
        self._lock.release()

    def _warn(self, error: OSError) -> None:
        sys.stderr.write(
            f"{self._title}mpistrategy cannot write to its run directory {self.path}: {error.strerror or error}. "
            "The job goes on; should a collective hang, the report is less complete. "
            f"{VARIABLE} names another folder.\n"
        )
