"""How long an all-reduce takes between nodes by each route, and the cheapest route: formulas of the agreed rates.

N nodes of L ranks reduce n bytes.  A message of m bytes takes a + m / b (R. Hockney, "The communication challenge for
MPP", Parallel Computing 20, 1994): the latency a, and b the share of the node's link that each of the ranks has which
use it at once.  Within a node b is the rate of a copy.

The three algorithms of MPI's Allreduce are those of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of
collective communication operations in MPICH", IJHPCA 19 (2005): recursive doubling, Rabenseifner's reduce-scatter and
all-gather, and the ring.  Ranks of a node follow each other, so log2 L of the log2 N L rounds stay within a node.

Every rank as a lane is the design of M. Bayatpour et al., "Scalable reduction collectives with data partitioning-based
multi-leader design" (DPML), SC 2017: each rank adds up its part of the data over its node, all-reduces it with its
counterparts on the other nodes, and all copy the parts of all.

Nothing here communicates.  Equal arguments give equal answers on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal

from mpistrategy.mpi.tuning.thresholds import CostName, Rates, Thresholds

#: "flat" is MPI's Allreduce over all ranks; "lanes": every rank adds up its part of the data over its node, then MPI's
#: Allreduce between counterparts; "pairwise": `multi_node.two_level`.
Route = Literal["flat", "lanes", "pairwise"]

#: Buffers that are larger than this go through the lanes in pieces of it.
LANES_PIECE_BYTES = 4 * 2**20
#: The pairwise exchange is not tried for more nodes than these where a node has one rank.
MOST_NODES_PAIRWISE = 8
#: The preferred route is left only for one whose estimate is below this part of its own: where the rates are assumed,
#: and where MPI's Allreduce and the pairwise exchange were measured.
CLEARLY_ASSUMED = 0.75
CLEARLY_MEASURED = 0.95
#: More lanes of the pairwise exchange do not fill a network better, and their messages are short.
PAIRWISE_LANES = 4
_LEAST_BLOCK_BYTES = 32 * 2**10
_LARGEST_PIECE_BYTES = 4 * 2**20
#: How many of its pieces may be on the network while the node works on one.
PAIRWISE_FLIGHTS = 4


def between_nodes(nodes: int, ranks_per_node: int, nbytes: int, thresholds: Thresholds) -> Route:
    """Return the route of an all-reduce between nodes: the cheapest of those that are allowed.

    It takes some 10 us: keep the answer.

    Args:
        nodes: how many there are.
        ranks_per_node: on average, rounded down.
        nbytes: of the buffer.
        thresholds: agreed on by all ranks, rates included.
    """
    allowed = allowed_between_nodes(nodes, ranks_per_node, nbytes, thresholds)
    if len(allowed) == 1:
        return allowed[0]
    seconds = {route: SECONDS[route](nodes, ranks_per_node, nbytes, thresholds) for route in allowed}
    cheapest = min(allowed, key=lambda route: seconds[route])
    clearly = CLEARLY_MEASURED if thresholds.rates.measured_over_estimated else CLEARLY_ASSUMED
    return cheapest if seconds[cheapest] < clearly * seconds[allowed[0]] else allowed[0]


def allowed_between_nodes(nodes: int, ranks_per_node: int, nbytes: int, thresholds: Thresholds) -> tuple[Route, ...]:
    """Return the routes that may be taken, the preferred one first: it was the faster one wherever both were measured.

    With one rank on each node the pairwise exchange is for few nodes, and only where it was measured to be faster.
    """
    if nodes == 1:
        return ("flat",)
    pairwise: tuple[Route, ...] = ("pairwise",) if nbytes >= thresholds.across_bytes else ()
    if ranks_per_node == 1:
        wins = nodes <= MOST_NODES_PAIRWISE and thresholds.rates.measured_over_estimated
        return ("flat", *pairwise) if wins else ("flat",)

    return ("lanes", "flat", *pairwise) if nbytes >= thresholds.lanes_bytes else ("flat", *pairwise)


def flat_seconds(nodes: int, ranks_per_node: int, nbytes: int, thresholds: Thresholds) -> float:
    """Return how long MPI's Allreduce over all ranks takes."""
    rates = thresholds.rates
    speed = _Speed.of(rates, ranks_per_node, rates.link_bytes_per_second)
    return _by_mpi(nodes, ranks_per_node, nbytes, speed) * _correction("flat", nbytes, rates)


def counterparts_seconds(nodes: int, ranks_per_node: int, nbytes: float, thresholds: Thresholds) -> float:
    """Return how long MPI's Allreduce of `nbytes` between counterparts takes, for all ranks of a node at once."""
    rates = thresholds.rates
    speed = _Speed.of(rates, ranks_per_node, rates.link_bytes_per_second / ranks_per_node)
    return _by_mpi(nodes, 1, nbytes, speed) * _correction("counterparts", nbytes, rates)


def lanes_seconds(nodes: int, ranks_per_node: int, nbytes: int, thresholds: Thresholds) -> float:
    """Return how long the all-reduce takes with every rank as a lane."""
    rates = thresholds.rates
    speed = _Speed.of(rates, ranks_per_node, rates.link_bytes_per_second)
    copies = 2 * nbytes / speed.copy
    additions = nbytes * (1 - 1 / ranks_per_node) / speed.add
    pieces = _pieces(nbytes, LANES_PIECE_BYTES)
    messages = pieces * counterparts_seconds(nodes, ranks_per_node, nbytes / pieces / ranks_per_node, thresholds)
    return rates.lanes_seconds + _overlapped(copies + additions, messages, pieces)


def pairwise_seconds(nodes: int, ranks_per_node: int, nbytes: int, thresholds: Thresholds) -> float:
    """Return how long the all-reduce takes with the pairwise exchange between up to four ranks of each node."""
    rates = thresholds.rates
    speed = _Speed.of(rates, ranks_per_node, rates.link_bytes_per_second)
    lanes = min(PAIRWISE_LANES, ranks_per_node)
    pieces = _pieces(nbytes, pairwise_piece_bytes(lanes, nodes, thresholds))
    copies = 0.0 if ranks_per_node == 1 else 2 * nbytes / speed.copy
    additions = nbytes / lanes * (ranks_per_node - 1 + (nodes - 1) / nodes) / speed.add
    made = pieces * 2 * (nodes - 1) * rates.python_message_seconds
    link = 2 * nbytes * (1 - 1 / nodes) / speed.link + 2 * ceil(pieces / PAIRWISE_FLIGHTS) * rates.latency_seconds
    return _overlapped(copies + additions + made, link, pieces) * _correction("pairwise", nbytes, rates)


#: The estimate of each route: seconds, by nodes, ranks of a node, bytes and thresholds.
SECONDS: dict[Route, Callable[[int, int, int, Thresholds], float]] = {
    "flat": flat_seconds,
    "lanes": lanes_seconds,
    "pairwise": pairwise_seconds,
}


@dataclass(frozen=True)
class _Speed:
    """What one rank has of its node's speed while all of them are busy: bytes or messages a second."""

    latency: float
    link: float
    copy: float
    add: float

    @classmethod
    def of(cls, rates: Rates, ranks_per_node: int, link: float) -> _Speed:
        core = min(1.0, rates.cores / ranks_per_node)
        memory = rates.memory_bytes_per_second / ranks_per_node
        copy, add = (min(core * speed, memory) for speed in (rates.copy_bytes_per_second, rates.add_bytes_per_second))
        return cls(rates.latency_seconds, link, copy, add)


def _by_mpi(nodes: int, ranks: int, nbytes: float, speed: _Speed) -> float:
    """Return the time of the best algorithm, for `ranks` on each node.

    `speed.link` is what these ranks have together.
    """
    size = nodes * ranks
    inside, outside = (ranks - 1).bit_length(), (nodes - 1).bit_length()
    rounds = inside + outside
    # Each rank sends everything in each round.
    doubling = rounds * (speed.latency + nbytes / speed.add) + nbytes * (
        inside / speed.copy + outside * ranks / speed.link
    )
    # Halves, quarters and so on: the nearest ranks exchange the largest ones.
    within, between = 2 * nbytes * (1 - 1 / ranks), 2 * nbytes * (1 - 1 / nodes)
    added = nbytes * (1 - 1 / size) / speed.add
    rabenseifner = 2 * rounds * speed.latency + within / speed.copy + between / speed.link + added
    # One rank of each node sends to the next node, while the others copy.
    slowest = speed.link if ranks == 1 else min(speed.link, speed.copy)
    ring = 2 * (size - 1) * speed.latency + 2 * nbytes * (1 - 1 / size) / slowest + added
    return min(doubling, rabenseifner, ring)


def pairwise_piece_bytes(lanes: int, nodes: int, thresholds: Thresholds) -> int:
    """Return how much of a buffer is one piece; more than the threshold where blocks of it would be short messages."""
    return max(thresholds.across_piece_bytes, min(lanes * nodes * _LEAST_BLOCK_BYTES, _LARGEST_PIECE_BYTES))


def _pieces(nbytes: float, piece: int) -> int:
    return max(1, ceil(nbytes / piece))


def _overlapped(work: float, messages: float, pieces: int) -> float:
    """Return the time of pieces one after the other, each of which travels while the next one is worked on."""
    return (work + messages) / pieces + (1 - 1 / pieces) * max(work, messages)


def _correction(name: CostName, nbytes: float, rates: Rates) -> float:
    """Return the measured time over the estimate: interpolated between two sizes, the nearest one's outside of them.

    Sums, products and quotients alone: exp and log need not have the same bits on every node.
    """
    points = sorted((size, ratio) for what, size, ratio in rates.measured_over_estimated if what == name)
    below = [point for point in points if point[0] <= nbytes]
    above = [point for point in points if point[0] > nbytes]
    if not below or not above:
        nearest = below[-1:] or above[:1]
        return nearest[0][1] if nearest else 1.0
    (small, first), (large, last) = below[-1], above[0]
    part = (_about_log2(int(nbytes)) - _about_log2(small)) / (_about_log2(large) - _about_log2(small))
    return first + part * (last - first)


def _about_log2(number: int) -> float:
    """Return the logarithm of powers of two, and a straight line between them."""
    power = number.bit_length() - 1
    return power - 1 + number / (1 << power)
