"""Which ranks write a checkpoint, what they write, and how it comes to them from the other ranks.

One rank writes a small checkpoint, some on each node a large one.  Each writer writes one shard: a part of what is
saved once, and what a group of ranks has for itself.  A group is one or several nodes, or a part of a node.  All ranks
make the same plan, without communication.

What is equal on all ranks is on the writers already.  What each rank has for itself goes to the writer of its group:
arrays of one shape as rows, one for each rank; arrays whose shapes differ, and rows of global arrays, as elements, rank
after rank; plain values as lines of JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage.manifest import ONE, Item, Run, runs_of
from mpistrategy.checkpoint.storage.shards import MOST_AXES, VALUES, check_can_be_read, part_name
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator

#: About how many bytes a writer writes where there are few: one for so many bytes.
BYTES_A_WRITER = 2**26
#: The most writers of a node, and of the job if it has fewer nodes.  There are more where the ranks have so much for
#: themselves that a writer should not gather it.
MOST_A_NODE, MOST_WRITERS = 8, 1024
#: Smaller arrays are not split.
LEAST_CUT_BYTES = 2**20

_NOTHING = np.empty(0, np.uint8)
_NO_LINE = b"{}\n"


# ------------------------------------------------------------------------------------------------ the plan


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
            found[path] = Place(first, _lengths(array, begin, total, range(first, last), count))
        begin = end
    return found


def _lengths(array: Array, begin: int, total: int, cuts: range, count: int) -> tuple[int, ...]:
    """Return how many elements of an array that begins at byte `begin` of `total` lie before and after each cut."""
    ends = [(total * (cut + 1) // count - begin) // array.itemsize for cut in cuts]
    edges: list[Any] = [0, *ends, array.size]
    return tuple(after - before for before, after in pairwise(edges))


# ------------------------------------------------------------------------------------------------ what is written


class Collected:
    """What the ranks save together, once they have agreed on what is saved once.  Making it is collective.

    When it is made, the ranks expect one more agreement: a rank that has no memory for its part tells the others.

    Args:
        state: this rank's objects.
        communicator: the ranks.
        call: the public call.

    Attributes:
        items: the table, with the places of arrays that are saved once.
        writers: the rank that writes each shard.
        shard: the number of the shard that this rank writes; None if it writes none.
        arrays: the arrays in this shard, by the name that they have there.

    Raises:
        OptionError: on every rank, for more plain values of a rank than `restore` accepts.
    """

    def __init__(self, state: State, communicator: Communicator, call: Call) -> None:
        self._communicator = communicator
        self._call = call
        arrays = state.arrays
        self.items: dict[str, Item] = dict(state.items)
        once = {path: array for path, array in arrays.items() if self.items[path].copies == ONE}
        own = {path: host_array(array) for path, array in arrays.items() if path not in once}
        line = self._line_of(state)
        own_bytes = self._own_bytes(own, line)
        self._plan: Plan = plan(communicator.node_of, once, own_bytes)
        self.writers: list[int] = self._plan.writers
        self._has_own = bool(own or line)
        self.shard: int | None = None
        if communicator.rank in self.writers:
            self.shard = self.writers.index(communicator.rank)
        for path, (shard, parts) in self._plan.places.items():
            self.items[path] = dataclasses.replace(self.items[path], shard=shard, parts=parts)
        self.arrays: dict[str, Array] = self._gathered(own, line, own_bytes) if self._has_own else {}
        call.expect_more()  # parts of arrays that are not contiguous take memory
        if self.shard is not None:
            self.arrays = self._parts(once, self.shard) | self.arrays

    def runs(self) -> list[tuple[Run, ...]]:
        """Return the ranks whose rows and lines are in each shard."""
        return [runs_of(group.tolist()) if self._has_own else () for group in self._plan.groups]

    def _line_of(self, state: State) -> bytes:
        """Return the plain values that this rank has for itself, as a line; nothing if there are none on any rank."""
        values = {path: state.values[path] for path, item in self.items.items() if item.has_lines}
        if not values:
            return b""
        self._call.expect_more()
        line = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        check_can_be_read(line, self._call.where)
        self._call.agree("take the values of each rank")
        return line

    def _own_bytes(self, own: dict[str, Array], line: bytes) -> int:
        """Return how many bytes all ranks have for themselves."""
        ranks = np.arange(self._communicator.size)
        found = sum(int(self.items[path].counts(ranks).sum()) * array.itemsize for path, array in own.items())
        if line:
            lengths = np.array([len(line)], np.int64)
            self._communicator.allreduce(lengths)
            found += int(lengths[0])
        return found

    def _parts(self, once: dict[str, Array], shard: int) -> dict[str, Array]:
        """Return what a shard has of the arrays that are saved once."""
        found = {}
        for path, array in once.items():
            if not self.items[path].parts:
                if self.items[path].shard == shard:
                    found[path] = host_array(array)  # only on the rank that writes it
                continue
            for number, start, count in self.items[path].places:
                if number == shard:
                    found[part_name(path, start)] = host_array(array.reshape(-1)[start : start + count])
        return found

    def _gathered(self, own: dict[str, Array], line: bytes, own_bytes: int) -> dict[str, Array]:
        """Return what each rank of a group has for itself, on the writer of the group; nothing on the other ranks."""
        if len(self.writers) == self._communicator.size:
            self._call.expect_more()
            arrays = {path: _little(array).reshape(self._shape(path, array, 1)) for path, array in own.items()}
            return arrays | {VALUES: np.frombuffer(line or _NO_LINE, np.uint8)}
        group = np.empty(0, np.int64) if self.shard is None else self._plan.groups[self.shard]
        members = group.tolist()
        lengths = np.zeros((len(members), 1), np.int64)
        if line:
            self._send(np.array([len(line)], np.int64), lengths, members)
        self._call.expect_more()
        sent = np.concatenate([_NOTHING, *(_bytes(_little(array)) for array in own.values())])
        sizes = {path: self.items[path].counts(group) * array.itemsize for path, array in own.items()}
        received = [np.empty(int(nbytes), np.uint8) for nbytes in sum(sizes.values(), np.zeros(len(members), np.int64))]
        lines = np.empty(int(lengths.sum()), np.uint8) if line else np.frombuffer(_NO_LINE * len(members), np.uint8)
        arrays = {
            path: np.empty(self._shape(path, array, len(members), int(sizes[path].sum())), _little_dtype(array))
            for path, array in own.items()
            if members
        }
        self._call.agree("gather what each rank has")
        if own_bytes > 0 and own:
            self._send(sent, received, members)
        if line:
            self._send(np.frombuffer(line, np.uint8), np.split(lines, np.cumsum(lengths)[:-1]), members)
        begins = np.zeros(len(members), np.int64)
        for path, array in arrays.items():
            ends = begins + sizes[path]
            parts = zip(received, begins.tolist(), ends.tolist(), strict=True)
            if array.nbytes:
                np.concatenate([data[begin:end] for data, begin, end in parts], out=_bytes(array))
            begins = ends
        return arrays | ({VALUES: lines} if members else {})

    def _shape(self, path: str, array: Array, count: int, nbytes: int | None = None) -> tuple[int, ...]:
        """Return the shape of the arrays of `count` ranks together, of `nbytes`: a row for each, or the elements."""
        if self.items[path].shapes:
            return ((array.nbytes if nbytes is None else nbytes) // array.itemsize,)
        return (count, *array.shape) if array.ndim < MOST_AXES else (count, array.size)

    def _send(self, mine: Array, theirs: Array | list[Array], members: list[int]) -> None:
        """Copy `mine` of each rank of a group to the writer of the group, into ``theirs[i]`` of the i-th rank."""
        nothing = mine[:0]
        for root, group in zip(self.writers, self._plan.groups, strict=True):
            block = mine if self._communicator.rank in group else nothing
            blocks = None
            if members and root == self._communicator.rank:
                blocks = [nothing] * self._communicator.size
                for number, rank in enumerate(members):
                    blocks[rank] = theirs[number]
            self._communicator.gather_blocks(block, blocks, root)


def _little(array: Array) -> Array:
    """Return a contiguous array of the byte order in which ranks send it and shards have it."""
    return np.ascontiguousarray(array, _little_dtype(array)).reshape(array.shape)


def _little_dtype(array: Array) -> np.dtype[Any]:
    return array.dtype.newbyteorder("<")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.nbytes else _NOTHING
