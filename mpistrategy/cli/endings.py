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

import contextlib
import os
import sys

from mpistrategy.errors import LaunchError, MpiStrategyError
from mpistrategy.mpi.job.exit_hooks import status_of
from mpistrategy.objects.text import encoded

#: "Saved; start me again": what programs end with that were told to stop.
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
        if self._path and rank == 0:
            self._write("begun")

    def note(self, error: BaseException | None) -> None:
        """Write how the program ended on this rank: with this error, or with None."""
        if not self._path or os.getpid() != self._pid:
            return
        status = status_of(error.code) if isinstance(error, SystemExit) else int(error is not None)
        if error is None or status == 0:
            self._remove()
        elif status == STOPPED and isinstance(error, SystemExit):
            if self._rank == 0:  # all ranks end so
                self._write(f"stopped with status {status}")
        elif isinstance(error, SystemExit):
            self._write(f"failed with status {status} on rank {self._rank}")
        elif isinstance(error, LaunchError) or not _is_from_outside(error):
            text = " ".join(str(error).split())[:_MOST]
            where = f" on rank {self._rank}" if self._rank >= 0 else ""
            self._write(f"failed with {type(error).__name__}{where}: {text}".rstrip(": "))

    def _remove(self) -> None:
        if self._rank:
            return
        try:
            os.unlink(self._path)
        except OSError as error:
            sys.stderr.write(f"mpistrategy run --unfinished: {error}\n")

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # without the file the script has to go by the status
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                if os.fstat(descriptor).st_size < 2**16:  # thousands of ranks may have the same to say
                    os.write(descriptor, encoded(f"{line}\n"))
            finally:
                os.close(descriptor)


def _is_from_outside(error: BaseException) -> bool:
    """Return whether an error has its cause in another rank or in MPI: in a node that is gone, for one."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, MpiStrategyError) and each._is_printed_elsewhere:
            return True
        if type(each).__module__.partition(".")[0] == "mpi4py":
            return True
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return False
