"""Small files through which the watchdogs of several nodes hear of each other; and where records are written.

Nothing here may stop or slow the job: what cannot be written is not written, after one warning.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

#: The environment variable that says where run directories are made: a folder that all nodes see.
VARIABLE = "MPISTRATEGY_RUN_DIR"
_PATIENCE_SECONDS = 1.0


def proposal() -> str:
    """Return a new run directory for this job, which is not made yet: rank 0's is everybody's."""
    job = "-".join(filter(None, (os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", ""))))
    name = "-".join(filter(None, ("mpistrategy-run", job, os.urandom(4).hex())))
    try:
        return os.path.join(os.path.abspath(os.environ.get(VARIABLE) or os.getcwd()), name)
    except OSError:  # the current folder is gone
        return ""


class RunDirectory:
    """The files of one communicator's ranks.  Made when something is first written.

    Args:
        path: where; "" for nowhere.
        title: what warnings begin with; "" for none: another rank warns.
    """

    def __init__(self, path: str, title: str = "") -> None:
        self.path = path
        self._title = title
        self._works = bool(path)
        self._written: set[str] = set()
        # The watchdog writes while the program closes its strategies; a file system that hangs must keep neither.
        self._lock = threading.Lock()

    def write(self, name: str, text: str) -> bool:
        """Write a file as a whole, or warn once; return whether it is there."""
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return False
        try:
            return self._works and self._write(name, text)
        finally:
            self._lock.release()

    def _write(self, name: str, text: str) -> bool:
        target = os.path.join(self.path, name)
        temporary = f"{target}.{os.getpid()}.new"
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, target)
        except OSError as error:
            self._works = False
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if self._title:
                self._warn(error)
            return False
        self._written.add(name)
        return True

    def read(self, name: str) -> str:
        """Return the text of a file; "" where there is none."""
        try:
            with open(os.path.join(self.path, name), encoding="utf-8", errors="replace") as file:
                return file.read()
        except (OSError, ValueError):
            return ""

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return bool(self.path) and os.path.exists(os.path.join(self.path, name))

    def remove(self) -> None:
        """Remove what this rank has written, and the directory when it is empty; nothing is written any more."""
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
