"""Small files through which the watchdogs of several nodes hear of each other; and where reports are written.

The directory is made when somebody has something to say: that a rank is busy for long, that one takes no more calls,
that a collective is late.  Nothing here may stop or slow the job: what cannot be written is not written, after one
warning, and a file system may hang: see `in_time`.  Nobody else can have made the directory before: its name is random.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
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
_MOST_BYTES = 2**26
#: How long a file system may take.
FILE_SECONDS = 2.0

T = TypeVar("T")


def new_path() -> str:
    """Return the path of a new run directory, which is not made yet; all ranks use rank 0's.

    It is called ``mpistrategy-run-JOB-STEP-MARK``: the Slurm job and its step (without Slurm neither), and 20
    hexadecimal digits that no other run has.
    """
    numbers = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    name = PREFIX + "-".join([*filter(str.isdigit, numbers), os.urandom(10).hex()])
    with suppress(OSError):  # the current folder is gone
        return os.path.join(os.path.abspath(os.environ.get(VARIABLE) or os.getcwd()), name)
    return ""


def begin(work: Callable[[], object]) -> threading.Thread:
    """Do something that may never return, in a thread of its own; return that (not started: there is no thread)."""

    def quietly() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, name="mpistrategy watchdog's file", daemon=True)
    with suppress(RuntimeError):
        thread.start()
    return thread


def in_time(work: Callable[[], T], otherwise: T, seconds: float = FILE_SECONDS) -> T:
    """Return what `work` returns, or `otherwise` where it does not return in time, or raises."""
    found = [otherwise]
    thread = begin(lambda: found.append(work()))
    if thread.is_alive():
        thread.join(seconds)
    return found[-1]


class RunDirectory:
    """The files of one communicator's ranks.

    Args:
        path: where; "" for nowhere.
        title: the beginning of warnings; "" for none: another rank warns.

    Attributes:
        is_used: whether this rank has written to it.
    """

    def __init__(self, path: str, title: str = "") -> None:
        self.path = path
        self._title = title
        self._works = bool(path)
        self.is_used: bool = False

    def write(self, name: str, text: str) -> bool:
        """Write a file as a whole, or warn once; return whether it is there."""
        try:
            if self._works:
                self._make()
                with own_files.whole_file(os.path.join(self.path, name)) as file:
                    file.write(encoded(text))
        except OSError as error:
            self._works = False
            if self._title:
                sys.stderr.write(
                    f"{self._title}mpistrategy cannot write to its run directory {self.path}: "
                    f"{error.strerror or error}. The job goes on; should a collective hang, the report is less "
                    f"complete. {VARIABLE} names another folder.\n"
                )
        return self._works

    def _make(self) -> None:
        self.is_used = True
        own_files.make_folders(os.path.dirname(self.path))
        with suppress(FileExistsError):  # not looked for before: NFS may show for a while what is gone
            own_files.make_folder(self.path)

    def read(self, name: str) -> str:
        """Return the text of a file; "" where there is none."""
        with suppress(OSError):
            return decoded(own_files.read(os.path.join(self.path, name), _MOST_BYTES))
        return ""

    def names(self) -> list[str]:
        """Return the names of all files; [] where the directory cannot be read."""
        with suppress(OSError):
            return os.listdir(self.path) if self.path else []
        return []

    def claim(self, name: str) -> bool:
        """Make an empty file; return False if another rank has made it, True also where none can be made."""
        try:
            self._make()
            os.close(own_files.new_file(os.path.join(self.path, name)))
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def remove(self, name: str) -> None:
        """Remove a file."""
        with suppress(OSError):
            os.unlink(os.path.join(self.path, name))

    def leave(self, *names: str) -> None:
        """Remove files, and the directory if it is empty: not before, since other nodes may be writing to it."""
        for name in names:
            self.remove(name)
        with suppress(OSError):
            os.rmdir(self.path)
