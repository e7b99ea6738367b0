"""How long an all-reduce takes between nodes, by formulas: nothing is measured, and no job is needed.

N nodes of L ranks reduce n bytes.  A message of m bytes takes a + m / b (R. Hockney, "The communication challenge for
MPP", Parallel Computing 20, 1994): the latency a, and b the share of the node's link that each of the ranks has which
use it at once.  Within a node b is the rate of a copy.

The three algorithms of MPI's Allreduce are those of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of
collective communication operations in MPICH", IJHPCA 19 (2005): recursive doubling, Rabenseifner's reduce-scatter and
all-gather, and the ring.  Ranks of a node follow each other, so log2 L of the log2 N L rounds stay within a node.  MPI
is assumed to take the best of them.

Every rank as a lane is the design of M. Bayatpour et al., "Scalable reduction collectives with data partitioning-based
multi-leader design" (DPML), SC 2017: each rank adds up its part of the data over its node, all-reduces it with its
counterparts on the other nodes, and all copy the parts of all.
"""

from __future__ import annotations

import argparse
from math import ceil

#: Bytes a second: what a core copies or adds, and what all cores of a node do together.
CORE, MEMORY = 1e10, 2e11
#: Larger buffers go through the lanes in pieces of this; what the lanes cost a call besides, in seconds.
PIECE_BYTES, LANES_SECONDS = 4 * 2**20, 2.5e-5


def by_mpi(nodes: int, ranks: int, nbytes: float, link: float, core: float, latency: float) -> float:
    """Return the time of the best algorithm of MPI's Allreduce; `link` is what the ranks of a node have together."""
    size, inside, outside = nodes * ranks, (ranks - 1).bit_length(), (nodes - 1).bit_length()
    rounds = inside + outside
    doubling = rounds * (latency + nbytes / core) + nbytes * (inside / core + outside * ranks / link)
    within, between = 2 * nbytes * (1 - 1 / ranks), 2 * nbytes * (1 - 1 / nodes)
    added = nbytes * (1 - 1 / size) / core
    rabenseifner = 2 * rounds * latency + within / core + between / link + added
    slowest = link if ranks == 1 else min(link, core)  # one rank of each node sends to the next node, the others copy
    ring = 2 * (size - 1) * latency + 2 * nbytes * (1 - 1 / size) / slowest + added
    return min(doubling, rabenseifner, ring)


def by_lanes(nodes: int, ranks: int, nbytes: float, link: float, core: float, latency: float) -> float:
    """Return the time with every rank as a lane: one piece travels while the next one is worked on."""
    pieces = max(1, ceil(nbytes / PIECE_BYTES))
    work = 2 * nbytes / core + nbytes * (1 - 1 / ranks) / core
    messages = pieces * by_mpi(nodes, 1, nbytes / pieces / ranks, link / ranks, core, latency)
    return LANES_SECONDS + (work + messages) / pieces + (1 - 1 / pieces) * max(work, messages)


def measure(options: argparse.Namespace) -> None:
    """Print a line for each number of nodes."""
    print(f"{options.bytes:.3g} bytes on nodes of {options.ranks} ranks, milliseconds")
    print(f"{'nodes':>8} {'MPI':>10} {'lanes':>10}")
    core = min(CORE, MEMORY / options.ranks)
    for nodes in options.nodes:
        job = nodes, options.ranks, options.bytes, options.link, core, options.latency
        print(f"{nodes:>8} {1e3 * by_mpi(*job):>10.3f} {1e3 * by_lanes(*job):>10.3f}")
