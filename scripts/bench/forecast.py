"""Tells by formulas how long an all-reduce takes between nodes; needs no job, and measures nothing.

    python scripts/bench forecast --bytes 100000000 --link 25e9 --latency 2e-6 --ranks 8 [NODES...]

N nodes of L ranks reduce n bytes.  A message of m bytes takes a + m / b (R. Hockney, "The communication challenge for
MPP", Parallel Computing 20, 1994): the latency a, and b the share of the node's link that each of the ranks has which
use it at once.  Within a node b is the rate of a copy.

The three algorithms of MPI's Allreduce are those of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of
collective communication operations in MPICH", IJHPCA 19 (2005): recursive doubling, Rabenseifner's reduce-scatter and
all-gather, and the ring.  Ranks of a node follow each other, so log2 L of the log2 N L rounds stay within a node.

Every rank as a lane is the design of M. Bayatpour et al., "Scalable reduction collectives with data partitioning-based
multi-leader design" (DPML), SC 2017: each rank adds up its part of the data over its node, all-reduces it with its
counterparts on the other nodes, and all copy the parts of all.

MPI's Allreduce is assumed to take as long as its best algorithm should.
"""

from __future__ import annotations

import argparse
from math import ceil

#: Larger buffers go through the lanes in pieces of this; what the lanes cost a call besides, in seconds.
PIECE_BYTES, LANES_SECONDS = 4 * 2**20, 2.5e-5
NODES = (2, 8, 32, 128, 512, 1024)


def by_mpi(nodes: int, ranks: int, nbytes: float, link: float, copy: float, add: float, latency: float) -> float:
    """Return the time of the best algorithm of MPI's Allreduce; `link` is what the ranks of a node have together."""
    size, inside, outside = nodes * ranks, (ranks - 1).bit_length(), (nodes - 1).bit_length()
    rounds = inside + outside
    doubling = rounds * (latency + nbytes / add) + nbytes * (inside / copy + outside * ranks / link)
    within, between = 2 * nbytes * (1 - 1 / ranks), 2 * nbytes * (1 - 1 / nodes)
    added = nbytes * (1 - 1 / size) / add
    rabenseifner = 2 * rounds * latency + within / copy + between / link + added
    slowest = link if ranks == 1 else min(link, copy)  # one rank of each node sends to the next node, the others copy
    ring = 2 * (size - 1) * latency + 2 * nbytes * (1 - 1 / size) / slowest + added
    return min(doubling, rabenseifner, ring)


def by_lanes(nodes: int, ranks: int, nbytes: float, link: float, copy: float, add: float, latency: float) -> float:
    """Return the time with every rank as a lane: one piece travels while the next one is worked on."""
    pieces = max(1, ceil(nbytes / PIECE_BYTES))
    work = 2 * nbytes / copy + nbytes * (1 - 1 / ranks) / add
    messages = pieces * by_mpi(nodes, 1, nbytes / pieces / ranks, link / ranks, copy, add, latency)
    return LANES_SECONDS + (work + messages) / pieces + (1 - 1 / pieces) * max(work, messages)


def main() -> None:
    """Print a line for each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", nargs="*", type=int, default=NODES)
    parser.add_argument("--ranks", type=int, default=8, help="of a node; default: %(default)s")
    parser.add_argument("--bytes", type=float, default=1e8, help="of the buffer; default: %(default)s")
    parser.add_argument("--link", type=float, default=1.18e8, help="bytes a second of a node; default: 1 Gbit/s")
    parser.add_argument("--latency", type=float, default=5e-5, help="seconds of a message; default: %(default)s")
    parser.add_argument("--copy", type=float, default=1e10, help="bytes a second of a core; default: %(default)s")
    parser.add_argument("--add", type=float, default=1e10, help="bytes a second of a core; default: %(default)s")
    parser.add_argument("--memory", type=float, default=2e11, help="bytes a second of a node; default: %(default)s")
    given = parser.parse_args()
    copy, add = (min(speed, given.memory / given.ranks) for speed in (given.copy, given.add))
    print(
        f"{given.bytes:.3g} bytes on nodes of {given.ranks} ranks, milliseconds\n"
        f"{'nodes':>8} {'flat':>10} {'lanes':>10}"
    )
    for nodes in given.nodes:
        what = nodes, given.ranks, given.bytes, given.link, copy, add, given.latency
        print(f"{nodes:>8} {1e3 * by_mpi(*what):>10.3f} {1e3 * by_lanes(*what):>10.3f}")


if __name__ == "__main__":
    main()
