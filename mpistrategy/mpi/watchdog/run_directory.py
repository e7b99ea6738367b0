"""Small files through which the watchdogs of several nodes hear of each other; and where reports are written.

The directory is made when somebody has something to say: that a rank is busy for long, that one takes no more calls,
that a collective is late.  Nothing here may stop or slow the job: what cannot be written is not written, after one
warning, and a file system may hang: see `within`.  Only the user can write to the directory, and what somebody else
has put in its place is not used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from mpistrategy import own_files
from mpistrategy.objects.text import decoded, encoded

#: The environment variable that names the folder of run directories; all nodes must see it.
VARIABLE = "MPISTRATEGY_RUN_DIR"
#: The beginning of their names.
PREFIX = "mpistrategy-run-"
#: What is in them: until when a node is busy (in the name: its number and a time); and what stays after a collective
#: was late: a file of each node, which one of its ranks has written.
BUSY = re.compile(r"busy-([0-9]{1,9})-([0-9]{1,12})")
ERROR = re.compile(r"error-([0-9]{1,9})\.json")
#: It is empty at first, made by the node that calls the roll, which makes it the alarm; then it is the roll call.
ROLL_CALL = "roll-call.txt"
#: Which rank takes no more calls, and why: ranks of other nodes may wait for it.
LEFT = "left.json"
MOST_BYTES = 2**24
#: How long a file system may take.
FILE_SECONDS = 2.0
_TRIES = 4
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

T = TypeVar("T")


def new_path() -> str:
    """Return the path of a new run directory, which is not made yet; all ranks use rank 0's.

    It is called ``mpistrategy-run-JOB-STEP-rRESTART-MARK``: the Slurm job and its step (without Slurm neither), how
    often it had gone back into the queue (not before the first time), and 20 hexadecimal digits that no other run has.
    """
    try:
        folder = os.path.abspath(os.environ.get(VARIABLE) or os.getcwd())
    except OSError:  # the current folder is gone
        return ""
    job, step, restart = (_number(f"SLURM_{name}") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    again = f"r{restart}" if job and int(restart or 0) else ""
    words = filter(None, (job, step if job else "", again, os.urandom(10).hex()))
    return os.path.join(folder, PREFIX + "-".join(words))


def _number(variable: str) -> str:
    text = os.environ.get(variable, "")
    return text if re.fullmatch(r"[0-9]{1,18}", text) else ""


def begin(work: Callable[[], object]) -> threading.Thread | None:
    """Do something that may never return, in a thread of its own; return that, or None where none can be started."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, name="mpistrategy watchdog's file", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def within(seconds: float, work: Callable[[], object]) -> None:
    """Do something that may never return; wait at most so many seconds."""
    thread = begin(work)
    if thread is not None:
        thread.join(seconds)


def in_time(work: Callable[[], T], otherwise: T) -> T:
    """Return what `work` returns, or `otherwise` where a file system does not answer in time."""
    found: list[T] = []
    within(FILE_SECONDS, lambda: found.append(work()))
    return found[0] if found else otherwise


def _again(work: Callable[[], object]) -> None:
    """Do something in the directory, which another node may remove, empty, in the middle of it."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            work()
            return
    work()


class RunDirectory:
    """The files of one communicator's ranks.

    Args:
        path: where; "" for nowhere.
        title: the beginning of warnings; "" for none: another rank warns.
    """

    def __init__(self, path: str, title: str = "") -> None:
        self.path = path
        self._title = title
        self._works = bool(path)

    def write(self, name: str, text: str) -> bool:
        """Write a file as a whole, or warn once; return whether it is there."""

        def put() -> None:
            with self._made() as folder, own_files.whole_file(name, folder) as file:
                file.write(encoded(text))

        try:
            if self._works:
                _again(put)
        except OSError as error:
            self._works = False
            if self._title:
                sys.stderr.write(
                    f"{self._title}mpistrategy cannot write to its run directory {self.path}: "
                    f"{error.strerror or error}. The job goes on; should a collective hang, the report is less "
                    f"complete. {VARIABLE} names another folder.\n"
                )
        return self._works

    @contextlib.contextmanager
    def _made(self) -> Iterator[int]:
        """Open the directory as `_opened`, and make it where there is none."""
        own_files.make_folders(os.path.dirname(self.path))
        with contextlib.suppress(FileExistsError):  # not looked for before: NFS may show for a while what is gone
            own_files.make_folder(self.path)
        with self._opened() as folder:
            yield folder

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the directory; OSError when it cannot be, belongs to another user, or others can write to it."""
        folder = os.open(self.path, _FOLDER)
        try:
            state = os.fstat(folder)
            if own_files.others_can_write(state):
                raise PermissionError(errno.EACCES, "others can write to it")
            if not own_files.is_own(state, os.stat(os.path.dirname(self.path))):
                raise PermissionError(errno.EACCES, f"it belongs to {own_files.user_in_words(state.st_uid)}")
            yield folder
        finally:
            os.close(folder)

    def read(self, name: str) -> str:
        """Return the text of a file; "" where there is none."""
        try:
            with self._opened() as folder:
                return decoded(own_files.read(name, MOST_BYTES, folder))
        except OSError:
            return ""

    def names(self) -> list[str]:
        """Return the names of all files; [] where the directory cannot be read."""
        try:
            with self._opened() as folder:
                return os.listdir(folder)
        except OSError:
            return []

    def claim(self, name: str) -> bool:
        """Make an empty file; return False if another rank has made it, True also where none can be made."""

        def make() -> None:
            with self._made() as folder:
                os.close(os.open(name, own_files.NEW, own_files.file_mode(os.fstat(folder)), dir_fd=folder))

        try:
            _again(make)
        except OSError:
            return name not in self.names()
        return True

    def remove(self, *names: str) -> None:
        """Remove files, and the directory when it is empty."""
        with contextlib.suppress(OSError), self._opened() as folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
            os.rmdir(self.path)
