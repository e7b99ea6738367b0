"""The command `mpistrategy`: one line of `COMMANDS` for each subcommand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mpistrategy
from mpistrategy.cli import run, trace
from mpistrategy.cli.bench import command as bench
from mpistrategy.cli.doctor import command as doctor
from mpistrategy.cli.guide import command as guide
from mpistrategy.cli.slurm import command as slurm
from mpistrategy.errors import LaunchError

#: The exit status that a shell reports after SIGPIPE.
_NOBODY_READS = 128 + signal.SIGPIPE
_COULD_NOT = 2


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        summary: one line for the list of subcommands.
        add_options: declares its options.
        run: runs it and returns the exit status: 0 success, 1 found something wrong, 2 could not run as asked.
    """

    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "bench": Command("time collectives and training steps beside mpi4py", bench.add_options, bench.run),
    "doctor": Command("examine a job's ranks, or one that hangs, and say what to fix", doctor.add_options, doctor.run),
    "guide": Command("show a page of the user guide, or what an error means", guide.add_options, guide.run),
    "run": Command("run a program on every rank, in place of python", run.add_options, run.run),
    "slurm": Command("write a job script for a cluster, check it, or submit it", slurm.add_options, slurm.run),
    "trace": Command("merge the recordings of all ranks for a trace viewer", trace.add_options, trace.run),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="mpistrategy", description=mpistrategy.__doc__)
    parser.add_argument("--version", action="version", version=f"mpistrategy {mpistrategy.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_options(subparsers.add_parser(name, help=command.summary, description=command.summary))
    options = parser.parse_args(arguments)
    if options.command == "run":
        return run.run(options)
    try:
        status = COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
        return _COULD_NOT
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has closed it. The rest of the output goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _NOBODY_READS
    return status
