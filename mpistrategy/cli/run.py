"""`mpistrategy run program.py`: runs a program on every rank, in place of `python program.py`.

MPI is started and checked before the program runs.  From then on the end of one rank ends the job, also when an import
fails.  Everything else is as under `python`: arguments, path, `__main__`, exit status.  No rank waits for another one
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from mpistrategy.cli.endings import Unfinished
from mpistrategy.errors import LaunchError, MpiStrategyError, OptionError
from mpistrategy.mpi.contract import check_level, timeouts
from mpistrategy.mpi.contract.public_calls import HAS_PLAN, PLAN
from mpistrategy.mpi.faults import plans
from mpistrategy.mpi.job import abort
from mpistrategy.mpi.job.exit_hooks import INTERRUPTED, status_of
from mpistrategy.mpi.job.launcher import no_mpi
from mpistrategy.mpi.job.start import start
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.telemetry import _start_from_environment
from mpistrategy.telemetry.tracing import switch

_WHERE = "mpistrategy run"
_COULD_NOT = 2
_RUNPY = runpy.run_path.__code__.co_filename


@dataclass(frozen=True)
class Setting:
    """An option that sets an environment variable, which the library reads where it is needed.

    Attributes:
        variable: its name.
        metavar: what stands for the value in the help text.
        check: returns the value as text, or raises argparse.ArgumentTypeError.
        summary: one line for the help text.
    """

    variable: str
    metavar: str
    check: Callable[[str], str]
    summary: str


def _checked(parse: Callable[[str, str], object], option: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        try:
            parse(text, f"mpistrategy run {option}")
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


def _folder(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a folder")
    return text


#: A further option that only sets a variable is one line here.
SETTINGS = {
    "--check": Setting(
        check_level.VARIABLE,
        "LEVEL",
        _checked(check_level.parse, "--check"),
        "whether calls are compared between nodes: always or off",
    ),
    "--timeout": Setting(
        timeouts.VARIABLE,
        "SECONDS",
        _checked(timeouts.parse, "--timeout"),
        "how long a rank waits in a collective before the job ends, with a roll call",
    ),
    "--inject": Setting(
        PLAN,
        "PLAN",
        _checked(plans.parse, "--inject"),
        "make a collective fail, to test how the job reacts",
    ),
    "--trace": Setting(
        switch.VARIABLE, "DIR", _folder, "record what the rank does into a folder, for mpistrategy trace"
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy run`."""
    parser.usage = "%(prog)s [option ...] (program.py | -m MODULE | -c CODE) [argument ...]"
    for name, setting in SETTINGS.items():
        parser.add_argument(
            name,
            dest=setting.variable,
            metavar=setting.metavar,
            type=setting.check,
            help=f"{setting.summary}; sets {setting.variable}",
        )
    parser.add_argument(
        "--unfinished",
        metavar="FILE",
        help="write into this file how the program ended, and remove it at status 0; for job scripts",
    )
    rest: dict[str, Any] = {"nargs": argparse.REMAINDER, "default": []}
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does", **rest)
    parser.add_argument("-c", dest="text", metavar="CODE", help="run a text, as python -c does", **rest)
    parser.add_argument("program", metavar="program.py", help="the program and its arguments", **rest)
    parser.set_defaults(refuse=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run the program that the options name; it ends as under `python`."""
    given = [options.module, options.text, options.program]
    if sum(map(bool, given)) != 1:
        options.refuse("name one program: program.py, -m MODULE or -c CODE")
    for setting in SETTINGS.values():
        value = getattr(options, setting.variable)
        if value is not None:
            os.environ[setting.variable] = value
    if os.environ.get(PLAN) and not HAS_PLAN:  # it must be there when the package is imported
        os.execv(sys.executable, sys.orig_argv)
    _start_from_environment()
    _show_stacks_of_crashes()
    unfinished = Unfinished(options.unfinished or "")
    try:
        rank = _start_mpi()
    except LaunchError as error:
        unfinished.note(error)
        sys.stderr.write(f"{error}\n")
        return _COULD_NOT
    unfinished.begin(rank)
    _hide_frames_of_ours()
    try:
        if options.module:
            names = _run_module(*options.module)
        elif options.text:
            names = _run_text(*options.text)
        else:
            names = _run_path(*options.program)
    except BaseException as error:
        trace = _without_ours(error.__traceback__)
        _keep(trace.tb_frame.f_globals if trace is not None else {})
        # An excepthook of the program's own may hide the error; the peers must still learn of the end.
        status = _status_of(error)
        abort.note_end(status, abort.in_words(error, trace) if status else "")
        unfinished.note(error)
        raise
    _keep(names)
    abort.note_end(0)
    unfinished.note(None)
    return 0


def _status_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return status_of(error.code)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


# ------------------------------------------------------------------------------------- before the program


def _start_mpi() -> int:
    """Start MPI, and return this rank's number among all ranks."""
    try:
        start(_WHERE)
        from mpistrategy.mpi.job import world
    except MpiStrategyError:  # some are RuntimeErrors, too
        raise
    except (ImportError, RuntimeError) as error:
        raise no_mpi(_WHERE, error) from error
    world.check(_WHERE)
    world.watch_program()
    return world.rank_in_job()


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


# ------------------------------------------------------------------------------------- the program


def _run_path(path: str, *arguments: str) -> dict[str, Any]:
    """Run a file, a folder or an archive as `__main__`; return its names."""
    whole = os.path.join(os.getcwd(), path)
    if not os.path.exists(whole):
        sys.stderr.write(f"{sys.executable}: can't open file {whole!r}: [Errno 2] No such file or directory\n")
        raise SystemExit(_COULD_NOT)
    sys.argv[:] = [whole, *arguments]
    _set_first_path(os.path.dirname(os.path.realpath(whole)))
    return runpy.run_path(whole, run_name="__main__")


def _run_module(name: str, *arguments: str) -> dict[str, Any]:
    sys.argv[:] = ["-m", *arguments]
    _set_first_path(os.getcwd())
    return runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_text(text: str, *arguments: str) -> dict[str, Any]:
    sys.argv[:] = ["-c", *arguments]
    _set_first_path("")
    code = compile(text, "<string>", "exec", dont_inherit=True)
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(main))
    return vars(main)


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _keep(names: Mapping[str, Any]) -> None:
    """Let what runs after the program, as its atexit callbacks and threads, find its names: pickle looks there."""
    vars(sys.modules["__main__"]).update(names)


# ------------------------------------------------------------------------------------- its traceback


def _hide_frames_of_ours() -> None:
    """Make a traceback begin with the program's first frame, as under `python`."""
    show = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = _without_ours(trace)
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback after the frames of this file and of runpy; all of it where there are none."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename != __file__:
        rest = rest.tb_next
    if rest is None:
        return trace
    while rest is not None and rest.tb_frame.f_code.co_filename in (__file__, _RUNPY):
        rest = rest.tb_next
    return rest
