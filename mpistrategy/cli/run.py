"""`mpistrategy run program.py`: runs a program on every rank, in place of `python program.py`.

MPI is started and checked before the program runs.  From then on the end of one rank ends the job, also when an import
fails.  Everything else is as under `python`: arguments, path, `__main__`, exit status.  No rank waits for another rank
here: the other ranks of MPI.COMM_WORLD may run other programs.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import os
import runpy
import signal
import sys
from types import ModuleType
from typing import Any

from mpistrategy.cli.endings import Unfinished
from mpistrategy.errors import LaunchError
from mpistrategy.mpi.contract import guard
from mpistrategy.mpi.contract.public_calls import HAS_PLAN, PLAN
from mpistrategy.mpi.job.exit_hooks import program, status_of
from mpistrategy.mpi.job.launcher import start
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.telemetry import _start_from_environment
from mpistrategy.telemetry.tracing import recorder

_WHERE = "mpistrategy run"
_COULD_NOT = 2


#: Options that set an environment variable, which the library reads and checks where it is needed: the variable, what
#: stands for the value in the help text, and one line for that.
SETTINGS = {
    "--check": (guard.CHECK, "LEVEL", "whether calls are compared between nodes: always or off"),
    "--timeout": (
        guard.TIMEOUT, "SECONDS", "how long a rank waits in a collective before the job ends, with a roll call"
    ),
    "--inject": (PLAN, "PLAN", "make a collective fail, to test how the job reacts"),
    "--trace": (recorder.VARIABLE, "DIR", "record what the rank does into a folder, for mpistrategy trace"),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy run`."""
    parser.usage = "%(prog)s [option ...] (program.py | -m MODULE | -c CODE) [argument ...]"
    for name, (variable, metavar, summary) in SETTINGS.items():
        parser.add_argument(name, dest=variable, metavar=metavar, help=f"{summary}; sets {variable}")
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
    for variable, _, _ in SETTINGS.values():
        if (value := getattr(options, variable)) is not None:
            os.environ[variable] = value
    if os.environ.get(PLAN) and not HAS_PLAN:  # it must be there when the package is imported
        os.execv(sys.executable, sys.orig_argv)
    _start_from_environment()
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
    with contextlib.suppress(ValueError, OSError, io.UnsupportedOperation):  # stderr may be no file
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
