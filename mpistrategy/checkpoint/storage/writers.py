"""Which ranks write a checkpoint, and what: one for a small checkpoint, some on each node for a large one.

Each writer writes one shard: a part of what is saved once, and what a group of ranks has for itself.  A group is one or
several nodes, or a part of a node.  All ranks make the same plan, without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array

#: About how many bytes a writer writes where there are few: one for so many bytes.
BYTES_A_WRITER = 2**26
#: The most writers of a node, and of the job if it has fewer nodes.  There are more where the ranks have so much for
#: themselves that a writer should not gather it.
MOST_A_NODE, MOST_WRITERS = 8, 1024
#: Smaller arrays are not split.
LEAST_CUT_BYTES = 2**20


class Place(NamedTuple):
    """Where an array that is saved once goes: `Item.shard` and `Item.parts`."""

    shard: int
    parts: tuple[int, ...] = ()


class Plan(NamedTuple):
    """Who writes what.

    Attributes:
        writers: the rank that writes each shard; the first is rank 0.
        groups: of each shard, the ranks of which it has what they have for themselves, in ascending order.
        places: of each array that is saved once.
    """

    writers: list[int]
    groups: list[Array]
    places: dict[str, Place]


def plan(node_of: Sequence[int], once: Mapping[str, Array], own_bytes: int) -> Plan:
    """Return who writes what.

    Args:
        node_of: the node of each rank.
        once: the arrays that are saved once, by path.
        own_bytes: what all ranks together have for themselves, in bytes.
    """
    bytes_of_once = sum(array.nbytes for array in once.values())
    numbers = np.asarray(node_of)
    nodes = int(numbers.max()) + 1
    most = max(min(MOST_A_NODE * nodes, max(nodes, MOST_WRITERS)), _over(own_bytes, BYTES_A_WRITER))
    groups = _groups(numbers, nodes, min(_over(bytes_of_once + own_bytes, BYTES_A_WRITER), most))
    return Plan([int(group[0]) for group in groups], groups, _places(once, bytes_of_once, len(groups)))


def _over(number: int, divisor: int) -> int:
    return max(1, -(-number // divisor))


def _groups(node_of: Array, nodes: int, wanted: int) -> list[Array]:
    """Return about as many groups of ranks as are wanted; each within a node, or of whole nodes."""
    if wanted == 1:
        return [np.arange(len(node_of))]
    by_node = np.argsort(node_of, kind="stable")
    ends = np.cumsum(np.bincount(node_of, minlength=nodes))
    if wanted <= nodes:
        last = ends[[nodes * (number + 1) // wanted - 1 for number in range(wanted)]]
        return [np.sort(group) for group in np.split(by_node, last[:-1])]
    each = _over(wanted, nodes)
    return [
        group
        for ranks in np.split(by_node, ends[:-1])
        for group in np.array_split(ranks, min(each, len(ranks)))
    ]  # fmt: skip


def _places(once: Mapping[str, Array], total: int, count: int) -> dict[str, Place]:
    """Return where the arrays go, so that each of `count` shards has about as many bytes of them."""
    if count == 1 or total == 0:
        return dict.fromkeys(once, Place(0))
    found, begin = {}, 0
    for path, array in once.items():
        end = begin + array.nbytes
        first, last = begin * count // total, max(begin, end - 1) * count // total
        if first == last or array.nbytes < LEAST_CUT_BYTES:
            found[path] = Place(min((begin + end) // 2 * count // total, count - 1))
        else:
            found[path] = Place(first, _parts(array, begin, total, range(first, last), count))
        begin = end
    return found


def _parts(array: Array, begin: int, total: int, cuts: range, count: int) -> tuple[int, ...]:
    """Return how many elements of an array that begins at byte `begin` of `total` lie before and after each cut."""
    ends = [(total * (cut + 1) // count - begin) // array.itemsize for cut in cuts]
    edges: list[Any] = [0, *ends, array.size]
    return tuple(after - before for before, after in pairwise(edges))
