"""Starts MPI, and ends a rank that waits there for ranks that never come."""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import suppress
from threading import TIMEOUT_MAX
from types import FunctionType

from mpistrategy.errors import LaunchError
from mpistrategy.mpi.contract import timeouts
from mpistrategy.mpi.contract.forks import after_finalize
from mpistrategy.mpi.job import launcher
from mpistrategy.mpi.job.launcher import Claim

#: The other ranks wait so much longer than rank 0: where rank 0 waits, too, it reports for all.
_LATER_SECONDS = 5.0
_CAUSES = (
    "Look for a rank that has failed, has not begun, or is stopped (ps on its node: state T). Do launcher and MPI fit "
    "together (srun --mpi=list), and can the nodes reach each other?"
)


def start(where: str, seconds: float | None = None) -> None:
    """Import `mpi4py.MPI`, which starts MPI, unless that has been done; MPI runs afterwards.

    Where a launcher has started several ranks, this takes Python's one `faulthandler.dump_traceback_later` meanwhile.

    Args:
        where: the public name in messages.
        seconds: how long MPI may take to start; None for the limit of a collective.

    Raises:
        LaunchError: when a rank has started this process, or the program has kept mpi4py from starting MPI and has not
            started it; where mpi4py finds no MPI library.
        ContextError: after MPI.Finalize().
    """
    if "mpi4py.MPI" not in sys.modules:
        claim = launcher.claim_in(os.environ)
        if claim is not None and (refusal := launcher.refusal_of_child(where, claim)) is not None:
            raise refusal
        limit = timeouts.expected() if seconds is None else seconds
        try:
            if claim is None or claim.tasks < 2:
                _import()
            else:
                _import_in_time(where, claim, limit)
        except (ImportError, RuntimeError) as error:
            raise launcher.no_mpi(where, error) from None  # its traceback shows mpi4py's search alone
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise after_finalize(where)
    if not MPI.Is_initialized():
        raise LaunchError.at(
            where,
            found="an MPI that has not been initialized (mpi4py.rc.initialize is False)",
            expected="one that runs",
            fix="Call MPI.Init_thread() before it, and MPI.Finalize() at the end of the program; or leave both to "
            "mpi4py: mpi4py.rc.initialize = True.",
        )
    launcher.tell_children()


def _import() -> None:
    import mpi4py.MPI  # noqa: F401 - starts MPI


def _import_in_time(where: str, claim: Claim, seconds: float) -> None:
    """Start MPI, which waits for all ranks and holds the interpreter: only faulthandler can report and end it then.

    faulthandler prints only file names and line numbers.  So the file name of the code is the message.
    """
    words = (
        f"[rank {claim.rank}/{claim.tasks}] {where}: waited {seconds:g} s ({timeouts.VARIABLE}) in MPI_Init, to which "
        f"all {claim.tasks} ranks must come. {_CAUSES}"
    )
    limit = min(seconds + _LATER_SECONDS * (claim.rank > 0), TIMEOUT_MAX)
    try:
        with suppress(RuntimeError):  # no thread can be started
            faulthandler.dump_traceback_later(limit, exit=True, file=2)
        FunctionType(_import.__code__.replace(co_filename=words), globals())()
    finally:
        faulthandler.cancel_dump_traceback_later()
