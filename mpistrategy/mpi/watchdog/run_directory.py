"""Messages between the nodes of a job: names and small files in one directory, which all nodes see.

The directory is made for the first message: that a node is busy for long, that a rank takes no more calls, or that a
collective is late.  Nothing here may stop or slow the job: what cannot be written is not written, after one warning,
and a file system may hang.  Nobody else can have made the directory before: its name is random.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from mpistrategy import own_files
from mpistrategy.mpi.watchdog import reports
from mpistrategy.objects.text import decoded, encoded

#: The environment variable that names the folder of run directories; all nodes must see it.
VARIABLE = "MPISTRATEGY_RUN_DIR"
#: The beginning of their names.
PREFIX = "mpistrategy-run-"
#: Until when a node is busy, in seconds of time.time(): in the name, behind its number.
BUSY = re.compile(r"busy-[0-9]{1,9}-([0-9]{1,12})")
#: The statuses of a node's ranks, written by one rank after a collective was late.
ERROR = re.compile(r"error-([0-9]{1,9})\.json")
#: The node that calls the roll makes it empty, as an alarm, and then writes the roll call to it.
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


class RunDirectory:
    """The files of one communicator's ranks.

    Args:
        path: where; "" for nowhere.
        warns: whether this rank says so where it cannot write.
    """

    def __init__(self, path: str, *, warns: bool) -> None:
        self.path = path
        self._warns = warns
        self._works = bool(path)
        self._worker = threading.Thread()  # none yet
        self._shown = ""

    def _ask(self, work: Callable[[], T], otherwise: T) -> T:
        """Run `work` on files; return `otherwise` where it fails or hangs, or an earlier call still hangs."""
        if not self.path or self._worker.is_alive():
            return otherwise
        result, self._worker = reports.in_time(work, otherwise, FILE_SECONDS)
        return result

    def write(self, name: str, text: str) -> bool:
        """Write a file as a whole, or warn once; return whether it is there."""
        return self._works and self._ask(lambda: self._write(name, text), False)

    def _write(self, name: str, text: str) -> bool:
        try:
            self._make()
            with own_files.whole_file(os.path.join(self.path, name)) as file:
                file.write(encoded(text))
        except OSError as error:
            self._works = False
            if self._warns:
                reports.say(
                    f"mpistrategy cannot write to its run directory {self.path}: {error.strerror or error}. The job "
                    f"goes on; should a collective hang, the report is less complete. {VARIABLE} names another folder."
                )
        return self._works

    def _make(self) -> None:
        own_files.make_folders(os.path.dirname(self.path))
        with suppress(FileExistsError):  # not looked for before: NFS may show a removed folder for a while
            own_files.make_folder(self.path)

    def claim(self, name: str) -> bool:
        """Make an empty file; return False if another rank has made it, or none can be made."""
        return self._ask(lambda: self._claim(name), False)

    def _claim(self, name: str) -> bool:
        self._make()
        os.close(own_files.new_file(os.path.join(self.path, name)))
        return True

    def read(self, name: str) -> str:
        """Return the text of a file; "" where there is none."""
        return self._ask(lambda: decoded(own_files.read(os.path.join(self.path, name), _MOST_BYTES)), "")

    def names(self) -> list[str]:
        """Return the names of all files; [] where the directory cannot be read."""
        return self._ask(lambda: os.listdir(self.path), [])

    def busy_until(self) -> float:
        """Return until when some node is busy, in seconds of time.time(); 0 where none is."""
        return max((float(match[1]) for match in map(BUSY.fullmatch, self.names()) if match), default=0.0)

    def show(self, name: str, text: str = "") -> None:
        """Write a file in place of the one that this rank has shown before, once; the name "" shows none."""
        before, self._shown = self._shown, name
        if name not in ("", before):
            self.write(name, text)
        if before not in ("", name):
            self._ask(lambda: self._remove(before), None)

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(os.path.join(self.path, name))
            os.rmdir(self.path)  # refused where another node has a file in it
