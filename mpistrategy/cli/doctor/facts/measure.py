"""Short measurements between the ranks: is a sum right, how fast is it, how far are the nodes' clocks apart?

Everything together takes less than three seconds on a healthy job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpistrategy.cli.doctor.facts.facts import Clock, Speed

if TYPE_CHECKING:
    from mpistrategy.cli.doctor.facts.ranks import Ranks
    from mpistrategy.mpi.over_mpi.communicator import MpiCommunicator

_NBYTES = 4 * 2**20
_MOST_ROUNDS = 7
_BUDGET_SECONDS = 0.4
_PINGS, _LINK_ROUNDS, _LINK_BYTES = 10, 3, 2**20
_TURNS_SECONDS = 1.0
_WAYS = {"node_sum": "in shared memory", "lanes": "within and between nodes", "mpi": "by MPI"}
#: What is expected, in bytes a second: of a node's link (1 Gbit/s), an all-reduce on one node, and a copy.
_LINK, _ON_NODE, _COPY = 1.18e8, 8e9, 1e10


def sums_and_speeds(ranks: Ranks) -> tuple[bool, list[Speed]]:
    """Return whether all ranks add up right, and how fast: copies, MPI's own sum, the library's.  Collective."""
    from mpistrategy.mpi.over_mpi.communicator import MpiCommunicator

    communicator = MpiCommunicator()
    try:
        return _measure(ranks, communicator)
    finally:
        communicator.free()


def _measure(ranks: Ranks, communicator: MpiCommunicator) -> tuple[bool, list[Speed]]:
    count = _NBYTES // 4
    mine = np.resize(np.arange(251, dtype=np.float32), count) + np.float32(ranks.rank)
    total = np.empty_like(mine)
    nodes = communicator.nodes
    way = communicator.route(_NBYTES, mine.dtype, "SUM")
    sent = 2 * (nodes - 1) / nodes * _NBYTES / _LINK
    expected, by_mpi = max(sent, _NBYTES / _ON_NODE), sent or _NBYTES / _ON_NODE

    def ours() -> None:
        communicator.allreduce(total, source=mine)

    ours()
    size = ranks.size
    pattern = np.resize(np.arange(251, dtype=np.float32), count) * size + size * (size - 1) / 2
    is_right = ranks.all_right(bool((total == pattern).all()))
    speeds = [
        Speed("a copy", _NBYTES, _best(ranks, lambda: np.copyto(total, mine)), _NBYTES / _COPY),
        Speed("an all-reduce", _NBYTES, _best(ranks, ours), expected, _WAYS.get(way, way)),
    ]
    if way != "mpi":
        speeds.append(Speed("MPI's Allreduce", _NBYTES, _best(ranks, lambda: ranks.allreduce(total)), by_mpi))
    return is_right, speeds


def _best(ranks: Ranks, work: Callable[[], object]) -> float:
    """Return the time of the quickest of a few rounds, each as long as the slowest rank takes."""
    quickest, began = math.inf, time.monotonic()
    for _ in range(_MOST_ROUNDS):
        ranks.barrier()
        before = time.perf_counter()
        work()
        quickest = min(quickest, ranks.slowest(time.perf_counter() - before))
        if ranks.slowest(time.monotonic() - began) > _BUDGET_SECONDS:
            break
    return quickest


def clocks_and_links(ranks: Ranks, leaders: Sequence[int], hosts: Sequence[str]) -> tuple[list[Clock], list[Speed]]:
    """Return how far the nodes' clocks are from this one's, and how fast they are reached; nothing but on rank 0.

    Args:
        ranks: all of them, each of which calls this.
        leaders: the first rank of each node.  On rank 0.
        hosts: the nodes' names.
    """
    if ranks.rank:
        ranks.serve()
        return [], []
    clocks, links, end = [], [], time.monotonic() + _TURNS_SECONDS
    for leader, host in zip(leaders, hosts, strict=True):
        if leader == 0 or time.monotonic() > end:
            continue
        pings: list[tuple[float, float]] = []

        def ping(before: float, after: float, there: float, pings: list[tuple[float, float]] = pings) -> None:
            pings.append((after - before, there - (before + after) / 2))

        ranks.turn(leader, _PINGS, 8, ping)
        shortest, offset = min(pings)
        clocks.append(Clock(leader, offset, shortest / 2))
        pings.clear()
        ranks.turn(leader, _LINK_ROUNDS, _LINK_BYTES, ping)
        links.append(Speed("a message", _LINK_BYTES, min(pings)[0], 0.0, f"to {host}"))
    ranks.end_turns()
    return clocks, links
