"""How a program ended, written for the job script that decides whether it is started again.

The script makes an empty file and names it by `mpistrategy run --unfinished FILE`.  What it finds there at the end:

- no file: the program has ended with status 0, which rank 0 says;
- a line ``begun``: MPI has been started;
- a line ``stopped ...``: it was told to stop, and has saved its state (status 75);
- a line ``failed ...``: an exception or another status of some rank;
- neither of the last two: no rank could say it. A signal has ended them, or the node is gone.

An error that only reports the end of another rank, or that MPI has raised, is not the program's own: it writes nothing.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from mpistrategy.errors import LaunchError, MpiStrategyError
from mpistrategy.mpi.job.exit_hooks import status_of
from mpistrategy.objects.text import encoded

#: "Saved; start me again": the status of programs that were told to stop.
STOPPED = 75
_MOST = 300  # characters of an error's text


class Unfinished:
    """The file that says how the program ended.

    Args:
        path: its name; "" for none.
    """

    def __init__(self, path: str) -> None:
        # The program may go to another folder, and fork.
        self._path = os.path.abspath(path) if path else ""
        self._rank = -1
        self._pid = os.getpid()

    def begin(self, rank: int) -> None:
        """Write that MPI has been started; this is the rank among all of the job."""
        self._rank = rank
        if rank == 0:
            self._write("begun")

    def note(self, error: BaseException | None) -> None:
        """Write how the program ended on this rank: with this error, or with None."""
        status, where = status_of(error), f" on rank {self._rank}" if self._rank >= 0 else ""
        if status == 0 and self._rank == 0:
            self._remove()
        elif status == STOPPED:
            self._write(f"stopped with status {status}")
        elif isinstance(error, SystemExit) and status:
            self._write(f"failed with status {status}{where}")
        elif status and (isinstance(error, LaunchError) or not _is_from_outside(error)):
            text = " ".join(str(error).split())[:_MOST]
            self._write(f"failed with {type(error).__name__}{where}: {text}".rstrip(": "))

    def _remove(self) -> None:
        try:
            if self._path and os.getpid() == self._pid:
                os.unlink(self._path)
        except OSError as error:
            sys.stderr.write(f"mpistrategy run --unfinished: {error}\n")

    def _write(self, line: str) -> None:
        if self._path and os.getpid() == self._pid:
            # Without the file the script has to go by the status.
            with suppress(OSError), open(os.open(self._path, os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as file:
                file.write(encoded(f"{line}\n"))


def _is_from_outside(error: BaseException | None) -> bool:
    """Return whether an error has its cause in another rank or in MPI: in a node that is gone, for one."""
    visited = []
    while error is not None and error not in visited:
        if isinstance(error, MpiStrategyError) and error._is_printed_elsewhere:
            return True
        if type(error).__module__.partition(".")[0] == "mpi4py":
            return True
        visited.append(error)
        error = error.__cause__ or error.__context__
    return False
