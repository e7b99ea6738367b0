"""Lanes: the ranks of a node that exchange a part of the data each with their counterparts on the other nodes.

Data are cut into slices, as many as there are lanes on the largest node that takes part with all its ranks.  Each node
has an owner for each slice; the owners of one slice on all nodes are counterparts.  A rank of a node with fewer ranks
owns several slices, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpistrategy.mpi.shared_memory.node_sum import share
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT


@dataclass(frozen=True)
class Lanes:
    """The slices, and whose they are on this node.

    Attributes:
        slices: how many slices the data have.
        borders: for each rank of this node, the first of its slices and the one after the last.
        local_rank: this rank's index among them.
        counterparts: for each slice of this rank, the ranks that own it, by node.
    """

    slices: int
    borders: tuple[tuple[int, int], ...]
    local_rank: int
    counterparts: tuple[tuple[int, ...], ...]

    def part_of(self, count: int, local_rank: int, ranks: int, itemsize: int) -> tuple[int, int]:
        """Return where the part of `count` elements begins and ends that a rank of this node owns; see `share`."""
        first, end = self.borders[local_rank]
        return share(count, first, self.slices, itemsize)[0], share(count, end - 1, self.slices, itemsize)[1]

    def slices_of(self, count: int, itemsize: int) -> list[slice]:
        """Return the slices of this rank, counted from where its part begins."""
        first, end = self.borders[self.local_rank]
        begin, _ = self.part_of(count, self.local_rank, len(self.borders), itemsize)
        borders = [share(count, each, self.slices, itemsize) for each in range(first, end)]
        return [slice(start - begin, stop - begin) for start, stop in borders]

    def longest_slice(self, count: int, itemsize: int) -> int:
        """Return how many elements a slice of at most `count` elements has at most.

        Of fewer elements a slice may be longer by a cache line than its share of all of them.
        """
        step = max(1, ALIGNMENT // itemsize)
        return -(-count // (step * self.slices)) * step


def every_rank(node_of: Sequence[int], rank: int) -> Lanes:
    """Return the lanes where every rank is one: as many slices as the largest node has ranks."""
    nodes = _members(node_of)
    slices = max(map(len, nodes))
    mine, me = nodes[node_of[rank]], nodes[node_of[rank]].index(rank)
    borders = tuple((i * slices // len(mine), (i + 1) * slices // len(mine)) for i in range(len(mine)))
    counterparts = tuple(
        tuple(members[((each + 1) * len(members) - 1) // slices] for members in nodes) for each in range(*borders[me])
    )
    return Lanes(slices, borders, me, counterparts)


def _members(node_of: Sequence[int]) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(max(node_of) + 1)]
    for rank, node in enumerate(node_of):
        members[node].append(rank)
    return members
