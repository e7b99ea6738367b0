"""Times of several calls that take turns, so that all of them see the same disturbances."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from mpi4py import MPI


def seconds_in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, repeats: int = 1, world: MPI.Intracomm = MPI.COMM_WORLD
) -> dict[str, npt.NDArray[np.float64]]:
    """Return for each call a row a round: wall seconds of the slowest rank, and CPU seconds of the average rank."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            world.Barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(repeats):
                call()
            wall = world.allreduce(time.perf_counter() - wall, MPI.MAX) / repeats
            cpu = world.allreduce(time.process_time() - cpu) / repeats / world.size
            if number >= 2:  # before, memory is touched for the first time
                seconds[name].append((wall, cpu))
    return {name: np.array(rows) for name, rows in seconds.items()}


def medians(seconds: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
    """Return the median wall seconds of each call."""
    return {name: float(np.median(rows[:, 0])) for name, rows in seconds.items()}
