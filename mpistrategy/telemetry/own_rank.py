"""Which rank of the job this process is, asked at any time: before there is a strategy, and after the last."""

from __future__ import annotations

import os

from mpistrategy.mpi import over_threads
from mpistrategy.mpi.job.launcher import ALONE, claim_in
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.options import is_on


def own_place() -> tuple[int, int]:
    """Return this process's number in its job, and how many processes the job has; asks no MPI, and starts none.

    Once this package has started MPI, the numbers are MPI's; before, the launcher's; (0, 1) without
    either.  In a simulated replica: its number among the replicas.
    """
    replica = over_threads.replicas_here.get()
    if replica is not None:
        return replica.rank, replica.size
    if watchdog.here.size:
        return watchdog.here.rank, watchdog.here.size
    claim = None if is_on(os.environ.get(ALONE, "")) else claim_in(os.environ)
    return (0, 1) if claim is None else (claim.rank, claim.tasks)
