"""`mpistrategy run program.py`: runs a program on every rank, in place of `python program.py`.

MPI is started and checked before the program runs.  From then on the end of one rank ends the job, also when an import
fails.  Everything else is as under `python`: arguments, path, `__main__`, exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import os
import pkgutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from mpistrategy.cli.endings import Unfinished
from mpistrategy.cli.gpu_trial import try_once
from mpistrategy.errors import LaunchError, OptionError
from mpistrategy.mpi.contract import check_level, timeouts
from mpistrategy.mpi.faults import plans
from mpistrategy.mpi.job import abort, before_mpi
from mpistrategy.mpi.job.exit_hooks import INTERRUPTED, status_of
from mpistrategy.mpi.job.launcher import no_mpi
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.telemetry import _start_from_environment
from mpistrategy.telemetry.tracing import switch

_WHERE = "mpistrategy run"
_COULD_NOT = 2


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
        "MPISTRATEGY_INJECT",
        "PLAN",
        _checked(plans.parse, "--inject"),
        "make a collective fail, to test how the job reacts",
    ),
    "--trace": Setting(
        switch.VARIABLE, "DIR", _folder, "record what the rank does into a folder, for mpistrategy trace"
    ),
}


@dataclass(frozen=True)
class _Program:
    """What is to run as `__main__`."""

    code: CodeType
    arguments: list[str]
    names: dict[str, Any]


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
            program = _module(*options.module)
        elif options.text:
            program = _text(*options.text)
        else:
            program = _file(*options.program)
        exec(program.code, _main_of(program))
    except SystemExit as error:
        _note_exit(error)
        unfinished.note(error)
        raise
    except BaseException as error:
        # An excepthook of the program's own may hide the error; the peers must still learn of the end.
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        abort.note_end(status, abort.in_words(type(error), error, _without_ours(error.__traceback__)))
        unfinished.note(error)
        raise
    abort.note_end(0)
    unfinished.note(None)
    return 0


# ------------------------------------------------------------------------------------- before the program


def _start_mpi() -> int:
    """Start MPI, and return this rank's number among all ranks."""
    try:
        before_mpi.start(_WHERE)
        from mpistrategy.mpi.job import world
    except LaunchError:  # which is a RuntimeError, too
        raise
    except (ImportError, RuntimeError) as error:
        raise no_mpi(_WHERE, error) from error
    world.check(_WHERE)
    hosts = world.watch_from_now_on()
    try_once(world.rank_in_job(), hosts)
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


# ------------------------------------------------------------------------------------- what to run, and as what


def _file(path: str, *arguments: str) -> _Program:
    importer = pkgutil.get_importer(path)
    if importer is not None:  # a folder or an archive with a __main__.py in it
        spec = importer.find_spec("__main__")
        if spec is None:
            _refuse(f"can't find '__main__' module in {path!r}", 1)
        _set_first_path(os.path.join(os.getcwd(), path))
        return _program_of(spec, [path, *arguments])
    whole = os.path.join(os.getcwd(), path)
    try:
        with io.open_code(whole) as file:
            text = file.read()
    except OSError as error:
        _refuse(f"can't open file {whole!r}: [Errno {error.errno}] {error.strerror}", 2)
    _set_first_path(str(Path(path).resolve().parent))
    names = {"__file__": whole, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)}
    return _Program(compile(text, whole, "exec", dont_inherit=True), [path, *arguments], names)


def _text(text: str, *arguments: str) -> _Program:
    _set_first_path("")
    return _Program(compile(text, "<string>", "exec", dont_inherit=True), ["-c", *arguments], {})


def _module(name: str, *arguments: str) -> _Program:
    _set_first_path(os.getcwd())
    sys.argv[:] = ["-m", *arguments]
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = find_spec(name)
    except (ImportError, ValueError) as error:
        if isinstance(error, ImportError) and error.name not in _with_parents(name):
            raise  # something that its package imports
        _refuse(f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})", 1)
    if spec is None:
        _refuse(f"No module named {name}", 1)
    return _program_of(spec, [spec.origin or name, *arguments])


def _with_parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[: count + 1]) for count in range(len(parts))}


def _program_of(spec: ModuleSpec, arguments: list[str]) -> _Program:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        _refuse(f"No code object available for {spec.name}", 1)
    names = {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }
    return _Program(code, arguments, names)


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _main_of(program: _Program) -> dict[str, Any]:
    """Make a new `__main__` for the program, and return its names; keep a reference to ours."""
    main = ModuleType("__main__")
    names = vars(main)
    names.update(program.names, __builtins__=sys.modules["builtins"])
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv[:] = program.arguments
    return names


_replaced: list[ModuleType] = []


def _refuse(text: str, status: int) -> NoReturn:
    sys.stderr.write(f"{sys.executable}: {text}\n")
    raise SystemExit(status)


# ------------------------------------------------------------------------------------- the end


def _note_exit(error: SystemExit) -> None:
    status = status_of(error.code)
    trace = _without_ours(error.__traceback__)
    abort.note_end(status, abort.in_words(SystemExit, error, trace) if status else "")


def _hide_frames_of_ours() -> None:
    """Make a traceback begin with the program's first frame, as under `python`."""
    show = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = _without_ours(trace)
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that comes after this file's frames; all of it where there are none."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename != __file__:
        rest = rest.tb_next
    if rest is None:
        return trace
    while rest is not None and rest.tb_frame.f_code.co_filename == __file__:
        rest = rest.tb_next
    return rest
