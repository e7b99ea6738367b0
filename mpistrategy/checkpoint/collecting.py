"""What the writers of a checkpoint write, and how it comes to them from the other ranks.

What is equal on all ranks is on the writers already.  What each rank has for itself goes to the writer of its group:
arrays as rows, one for each rank; plain values as lines of JSON.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage.manifest import ONE, Item, Run, runs_of
from mpistrategy.checkpoint.storage.shards import MOST_AXES, VALUES, check_can_be_read, part_name
from mpistrategy.checkpoint.storage.writers import Plan, plan
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator

_NOTHING = np.empty(0, np.uint8)
_NO_LINE = b"{}\n"


class Collected:
    """What the ranks save together, once they have agreed on what is saved once.  Making it is collective.

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
        own = {path: _little(array) for path, array in arrays.items() if path not in once}
        line = self._line_of(state)
        self._plan: Plan = plan(communicator.node_of, once, self._own_bytes(own, line))
        self.writers: list[int] = self._plan.writers
        self._has_own = bool(own or line)
        self.shard: int | None = None
        if communicator.rank in self.writers:
            self.shard = self.writers.index(communicator.rank)
        for path, (shard, parts) in self._plan.places.items():
            self.items[path] = dataclasses.replace(self.items[path], shard=shard, parts=parts)
        self.arrays: dict[str, Array] = {} if self.shard is None else self._parts(once, self.shard)
        if self._has_own:
            self._gather(own, line)

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
        found = self._communicator.size * sum(array.nbytes for array in own.values())
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
                    found[path] = array
                continue
            for number, start, count in self.items[path].places:
                if number == shard:
                    found[part_name(path, start)] = array.reshape(-1)[start : start + count]
        return found

    def _gather(self, own: dict[str, Array], line: bytes) -> None:
        """Bring what each rank of a group has for itself to the writer of the group, into `arrays`."""
        if len(self.writers) == self._communicator.size:
            self.arrays |= {path: array.reshape(_shape(1, array)) for path, array in own.items()}
            self.arrays[VALUES] = np.frombuffer(line or _NO_LINE, np.uint8)
            return
        members = None if self.shard is None else self._plan.groups[self.shard].tolist()
        mine = np.array([len(line)], np.int64)
        lengths = np.zeros((len(members) if members else 0, 1), np.int64)
        if line:
            self._send(mine, lengths, members)
        self._call.expect_more()
        sent = np.concatenate([_NOTHING, *(_bytes(array) for array in own.values())])
        rows = np.empty((len(lengths), sent.size), np.uint8)
        lines = np.empty(int(lengths.sum()), np.uint8)
        self._call.agree("gather what each rank has")
        if sent.size:
            self._send(sent, rows, members)
        if line:
            self._send(np.frombuffer(line, np.uint8), np.split(lines, np.cumsum(lengths)[:-1]), members)
        if members is not None:
            self.arrays |= _columns(rows, own)
            self.arrays[VALUES] = lines if line else np.frombuffer(_NO_LINE * len(members), np.uint8)

    def _send(self, mine: Array, theirs: Array | list[Array], members: list[int] | None) -> None:
        """Copy `mine` of each rank of a group to the writer of the group, into ``theirs[i]`` of the i-th rank."""
        nothing = mine[:0]
        for root, group in zip(self.writers, self._plan.groups, strict=True):
            block = mine if self._communicator.rank in group else nothing
            blocks = None
            if members is not None and root == self._communicator.rank:
                blocks = [nothing] * self._communicator.size
                for number, rank in enumerate(members):
                    blocks[rank] = theirs[number]
            self._communicator.gather_blocks(block, blocks, root)


def _little(array: Array) -> Array:
    """Return a contiguous array of the byte order in which ranks send it and shards have it."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.nbytes else _NOTHING


def _columns(rows: Array, like: dict[str, Array]) -> dict[str, Array]:
    """Return the arrays in rows of bytes, in each of which they follow each other, as rows of each."""
    found, start = {}, 0
    for path, array in like.items():
        stop, found[path] = start + array.nbytes, np.empty(_shape(len(rows), array), array.dtype)
        if array.nbytes:
            found[path].reshape(len(rows), -1).view(np.uint8)[...] = rows[:, start:stop]
        start = stop
    return found


def _shape(count: int, array: Array) -> tuple[int, ...]:
    """Return the shape of `count` arrays like this one; flat where NumPy has no further axis."""
    return (count, *array.shape) if array.ndim < MOST_AXES else (count, array.size)
