"""Times of several calls that take turns, so that all of them see the same disturbances."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mpi4py import MPI


def times_in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, repeats: int = 1, world: MPI.Intracomm = MPI.COMM_WORLD
) -> dict[str, list[float]]:
    """Return the seconds of each call, a figure a round: from a barrier to the end of the slowest rank.  Collective."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            world.Barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            took = world.allreduce(time.perf_counter() - began, MPI.MAX) / repeats
            if number >= 2:  # before, memory is touched for the first time
                found[name].append(took)
    return found
