"""`mpistrategy run program.py`: runs a program on every rank, in place of `python program.py`.

MPI is started and checked before the program runs.  From then on the end of one rank ends the job, also when an import
fails.  Everything else is as under `python`: arguments, path, `__main__`, exit status.  No rank waits for another rank
here: the other ranks of MPI.COMM_WORLD may run other programs.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import runpy
import signal
import sys
from types import ModuleType
from typing import Any

from mpistrategy.errors import LaunchError, MpiStrategyError
from mpistrategy.mpi.job.exit_hooks import program, status_of
from mpistrategy.mpi.job.launcher import start
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.objects.text import encoded

_WHERE = "mpistrategy run"
_COULD_NOT = 2
#: "Saved; start me again": the status of programs that were told to stop.
STOPPED = 75
_MOST = 300  # characters of an error's text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy run`."""
    parser.usage = "%(prog)s [option ...] (program.py | -m MODULE | -c CODE) [argument ...]"
    parser.add_argument(
        "--unfinished",
        metavar="FILE",
        help="write into this file how the program ended, and remove it at status 0; for job scripts",
    )
    remainder: dict[str, Any] = {"nargs": argparse.REMAINDER, "default": []}
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does", **remainder)
    parser.add_argument("-c", dest="text", metavar="CODE", help="run a text, as python -c does", **remainder)
    parser.add_argument("program", metavar="program.py", help="the program and its arguments", **remainder)
    parser.set_defaults(refuse=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run the program that the options name; it ends as under `python`."""
    if sum(map(bool, (options.module, options.text, options.program))) != 1:
        options.refuse("name one program: program.py, -m MODULE or -c CODE")
    _show_stacks_of_crashes()
    unfinished = Unfinished(options.unfinished or "")
    try:
        start(_WHERE)
        from mpistrategy.mpi.job import world

        world.check(_WHERE)
    except LaunchError as error:
        unfinished.note(error)
        sys.stderr.write(f"{error}\n")
        return _COULD_NOT
    unfinished.begin(world.watch_program())
    try:
        _run_program(options)
    except BaseException as error:
        # An excepthook of the program's own may hide the error; the peers must still learn of the end.
        program.note(status_of(error), world.in_words(error))
        unfinished.note(error)
        raise
    program.note(0)
    unfinished.note(None)
    return 0


def _show_stacks_of_crashes() -> None:
    """Show all threads' stacks when the process crashes; and on SIGQUIT, after which it goes on.

    Job scripts use SIGUSR1, SIGUSR2 and SIGTERM for other purposes.
    """
    with contextlib.suppress(ValueError, OSError, RuntimeError):  # stderr may be no file, or None
        if not faulthandler.is_enabled():
            faulthandler.enable()
        if signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL:
            faulthandler.register(signal.SIGQUIT)
            watchdog.stack_signal = int(signal.SIGQUIT)


def _run_program(options: argparse.Namespace) -> None:
    """Run a file, a folder or an archive, a module, or a text as `__main__`."""
    first, *arguments = options.program or options.module or options.text
    if options.module:
        _set_arguments("-m", arguments, os.getcwd())
        names = runpy.run_module(first, run_name="__main__", alter_sys=True)
    elif options.text:
        _set_arguments("-c", arguments, "")
        sys.modules["__main__"] = ModuleType("__main__")
        names = vars(sys.modules["__main__"])
        exec(compile(first, "<string>", "exec", dont_inherit=True), names)
    else:
        path = os.path.join(os.getcwd(), first)
        if not os.path.exists(path):
            sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno 2] No such file or directory\n")
            raise SystemExit(_COULD_NOT)
        _set_arguments(path, arguments, os.path.dirname(os.path.realpath(path)))
        names = runpy.run_path(path, run_name="__main__")
    vars(sys.modules["__main__"]).update(names)  # for atexit callbacks and threads that pickle objects of it


def _set_arguments(name: str, arguments: list[str], first_path: str) -> None:
    sys.argv[:] = [name, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = first_path


class Unfinished:
    """The file that says how the program ended, for the job script that decides whether it is started again.

    The script makes an empty file and names it by `mpistrategy run --unfinished FILE`.  What it finds there at the end:

    - no file: the program has ended with status 0, which rank 0 says;
    - a line ``begun``: MPI has been started;
    - a line ``stopped ...``: it was told to stop, and has saved its state (status 75);
    - a line ``failed ...``: an exception or another status of some rank;
    - neither of the last two: no rank could say it. A signal has ended them, or the node is gone.

    An error that only reports the end of another rank, or that MPI has raised, is not the program's own: it writes
    nothing.

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
        if not self._path or os.getpid() != self._pid:
            return
        status, where = status_of(error), f" on rank {self._rank}" if self._rank >= 0 else ""
        if status == 0 and self._rank == 0:
            try:
                os.unlink(self._path)
            except OSError as refused:
                sys.stderr.write(f"mpistrategy run --unfinished: {refused}\n")
        elif status == STOPPED:
            self._write(f"stopped with status {status}")
        elif isinstance(error, SystemExit) and status:
            self._write(f"failed with status {status}{where}")
        elif status and (isinstance(error, LaunchError) or not _is_from_outside(error)):
            text = " ".join(str(error).split())[:_MOST]
            self._write(f"failed with {type(error).__name__}{where}: {text}".rstrip(": "))

    def _write(self, line: str) -> None:
        # Without the file the script has to go by the status.
        with (
            contextlib.suppress(OSError),
            open(os.open(self._path, os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as file,
        ):
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
