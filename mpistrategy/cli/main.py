"""The command `mpistrategy`: one line of `COMMANDS` for each subcommand."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import mpistrategy
from mpistrategy.errors import LaunchError, OptionError, TraceError
from mpistrategy.objects.text import printable

#: The exit status that a shell reports after SIGPIPE.
_NOBODY_READS = 128 + signal.SIGPIPE
_COULD_NOT = 2
_DESCRIPTION = (
    "mpistrategy: the tf.distribute programming model on NumPy arrays over MPI, one replica a rank. "
    "`mpistrategy guide` shows how to use it."
)


#: For each subcommand one line for the list, and the module of its functions: `add_options(parser)` declares its
#: options, and `run(options)` returns the exit status: 0 success, 1 found something wrong, 2 could not run as asked.
COMMANDS = {
    "bench": ("time sums beside mpi4py, on CPUs or GPUs; save thresholds", "bench.command"),
    "doctor": ("examine a job's ranks, or one that hangs, and say what to fix", "doctor.command"),
    "guide": ("show a page of the user guide, or what an error means", "guide.pages"),
    "requeue": ("run the program of a job, and have the job go on where it ended too early", "requeue"),
    "run": ("run a program on every rank, in place of python", "run"),
    "slurm": ("write a job script for a cluster", "slurm.command"),
    "trace": ("merge the recordings of all ranks for a trace viewer", "trace"),
}


def load(name: str) -> Any:
    """Return the module of a subcommand: of one only, since every rank of a job loads it."""
    return importlib.import_module(f"mpistrategy.cli.{COMMANDS[name][1]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="mpistrategy", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"mpistrategy {mpistrategy.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    words = sys.argv[1:] if arguments is None else arguments
    command_name = next((word for word in words if not word.startswith("-")), "")
    for name, (summary, _) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == command_name:
            load(name).add_options(subparser)
    options = parser.parse_args(words)
    run = load(options.command).run
    if options.command == "run":
        return int(run(options))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files need not be UTF-8
    try:
        status = int(run(options))
        sys.stdout.flush()
    except (LaunchError, OptionError, TraceError) as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return _COULD_NOT
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has closed it. The rest of the output goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _NOBODY_READS
    return status
