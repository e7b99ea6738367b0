"""Reduction of arrays that live in memory which the ranks of a node share: where they are, without copies.

Every rank combines its share of all ranks' arrays (`node_sum.where_they_are`), and writes it into all of them, or into
one result for the whole node.

When a call begins on one node, all ranks have written their arrays (the guard's agreement comes first).  On several
nodes the ranks may not have met before, and each looks at its own array alone.  Nobody may read the result or write its
array again before `communicator.node_barrier()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, divide_by, host_wire_dtype, quietly
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.reduced_precision import between_nodes
from mpistrategy.mpi.multi_node.rounded_exchange import Wire
from mpistrategy.mpi.multi_node.two_level import across_nodes
from mpistrategy.mpi.shared_memory.node_sum import where_they_are
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.packing import Member, Pack, layouts_of, plan
from mpistrategy.reduction.routes import on_device
from mpistrategy.reduction.routes.base import Description, Route, Targets
from mpistrategy.reduction.routes.communicator import CommunicatorRoute, described


@dataclass(frozen=True)
class Replicas:
    """One flat array of each rank of a node, of one dtype and size.

    Attributes:
        arrays: by local rank; where `is_shared` is False only this rank's own.
        local_rank: this rank's index among them.
        is_shared: whether they are the peers' own memory.
        result: one array for the whole node that a result can be written to; None without such.
    """

    arrays: tuple[Array, ...]
    local_rank: int = 0
    is_shared: bool = False
    result: Array | None = None

    @property
    def mine(self) -> Array:
        """This rank's own array."""
        return self.arrays[self.local_rank]


def typed(memory: SharedMemory, start: int, count: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
    """Return `count` elements from byte `start` on, of every segment."""
    return tuple(segment[start : start + count * dtype.itemsize].view(dtype) for segment in memory.segments)


def joined(memory: SharedMemory) -> Array:
    """Return the segments of all ranks as one flat array; each must be a whole number of pages."""
    nbytes, count = memory.mine.nbytes, len(memory.segments)
    addresses = [segment.ctypes.data for segment in memory.segments]
    assert addresses == [addresses[0] + rank * nbytes for rank in range(count)]
    return np.lib.stride_tricks.as_strided(memory.segments[0], (count * nbytes,), (1,))


def is_in_place(communicator: Ranks, replicas: Replicas) -> bool:
    """Return whether the ranks' arrays are combined where they are; else they are sent."""
    return replicas.is_shared and communicator.nodes == 1


def is_seen_across(communicator: Any, replicas: Replicas, op: str, wire: Wire) -> bool:
    """Return whether a node's arrays are combined where they are, and the sums sent to other nodes.

    Smaller buffers are left to one call of MPI, and others travel in another dtype.
    """
    mine = replicas.mine
    return (
        replicas.is_shared
        and len(replicas.arrays) > 1
        and communicator.nodes > 1
        and communicator.has_links
        and across_nodes(communicator).sees_node
        and host_wire_dtype(mine.dtype) == mine.dtype
        and (wire is not None or communicator.route(mine.nbytes, mine.dtype, op) == "lanes")
    )


class InPlaceRoute:
    """See `mpistrategy.reduction.routes.base.Route`.

    Args:
        communicator: the ranks.
        buckets: the arrays of this node, one bucket for each array that `bring` and `run` are given.
        op: how they are combined; 16-bit floats in float32 and rounded once, integers wrap.
        into_result: write `Replicas.result` and leave the arrays as they are; else write every array.
        wire: what sums of float32 travel as between nodes; see `mpistrategy.options.CommunicationOptions`.
    """

    def __init__(
        self,
        communicator: Ranks,
        buckets: Sequence[Replicas],
        op: ReduceOp,
        *,
        into_result: bool,
        wire: str | None = None,
    ) -> None:
        #: For each bucket the dtype in which it travels between nodes, where that is another one.
        self._wires = [between_nodes(communicator, wire, each.mine.dtype, op._on_the_wire) for each in buckets]
        self._communicator, self._buckets, self._op, self._into_result = communicator, buckets, op, into_result
        #: For each bucket whether it is combined where it is before it travels to other nodes.
        self._are_seen = [
            is_seen_across(communicator, each, op._on_the_wire, wire)
            for each, wire in zip(buckets, self._wires, strict=True)
        ]
        #: For each bucket what it takes where the ranks of a node do not see each other's arrays.
        self._by_messages = [
            None if seen or is_in_place(communicator, each) else self._route(each, wire)
            for each, seen in zip(buckets, self._are_seen, strict=True)
        ]
        self.packs: tuple[Pack, ...] = tuple(map(self._pack, range(len(buckets)), buckets, self._by_messages))

    def _pack(self, index: int, replicas: Replicas, route: Route | None) -> Pack:
        mine = replicas.mine
        pack = Pack(mine.dtype, mine.size, (), converts=False) if route is None else route.packs[0]
        return replace(pack, members=(Member(index, 0, mine.size, mine.shape),))

    def _route(self, replicas: Replicas, wire: str | None) -> Route:
        ranks, op = self._communicator, self._op
        packs = plan(layouts_of([replicas.mine]), 1, 0, host_wire_dtype)
        return CommunicatorRoute(ranks, packs, op, wire=wire)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> list[Any]:
        """Return the memory that messages need besides the arrays, which are where they are combined."""
        return [
            None if route is None else route.bring([replicas.mine], [self._target(replicas)])
            for replicas, route in zip(self._buckets, self._by_messages, strict=True)
        ]

    @quietly
    def run(self, arrays: Sequence[Array], memory: list[Any]) -> list[Array]:
        """Combine the buckets on all nodes, and return where the combinations are."""
        for each in zip(self._buckets, self._by_messages, memory, self._are_seen, self._wires, strict=True):
            if each[0].mine.size:  # else nodes may have different numbers of ranks
                self._combine(*each)
        self._communicator.node_barrier()
        return [_result(replicas) if self._into_result else replicas.mine for replicas in self._buckets]

    def _combine(self, replicas: Replicas, route: Route | None, memory: Any, is_seen: bool, wire: Wire) -> None:
        ranks, op = self._communicator, self._op._on_the_wire
        if route is None:
            divisor = self._op._divisor(replicas.mine.dtype, ranks.size)
            targets = (_result(replicas),) if self._into_result else replicas.arrays
            if is_seen:
                across_nodes(ranks).in_place(replicas.arrays, targets, op, wire, partial(divide_by, divisor))
            else:
                where_they_are(replicas.arrays, targets, op, divisor, replicas.local_rank)
            return
        if self._into_result and replicas.is_shared:
            ranks.node_barrier()  # until the peers are here they may read the result of the call before
        target, [total] = self._target(replicas), route.run([replicas.mine], memory)
        if target is not None and total is not target:
            np.copyto(target, total, casting="unsafe")

    def _target(self, replicas: Replicas) -> Array | None:
        """Return where the result of messages goes; None where the first rank of the node writes it for all."""
        if not self._into_result:
            return replicas.mine
        return None if replicas.is_shared and replicas.local_rank else _result(replicas)

    def describe(self, ranks: Ranks, arrays: Sequence[Array]) -> list[Description]:
        rows = zip(self.packs, self._buckets, self._are_seen, self._wires, strict=True)
        return [self._described(ranks, *each) for each in rows]

    def _described(self, ranks: Ranks, pack: Pack, replicas: Replicas, seen: bool, wire: Wire) -> Description:
        local, into_result, op = len(replicas.arrays), self._into_result, self._op._on_the_wire
        if not is_in_place(ranks, replicas):
            name = "lanes" if seen or wire is not None else ranks.route(pack.nbytes, pack.dtype, op)
            copies = (f"all into {pack.dtype.name} and the results back",) if pack.converts else ()
            return described(pack, name, copies, wire)
        target = "the node's one result" if into_result else "every one"
        return Description(pack, f"where the arrays are, each rank 1/{local} of them, into {target}", ())


def broadcast_replicas(communicator: Ranks, replicas: Replicas) -> None:
    """Write rank 0's array into everybody's; to be called inside an agreed call by all ranks."""
    if is_on_device(replicas.mine):
        on_device.bcast(communicator, replicas.mine, 0)
        return
    if not replicas.is_shared or communicator.nodes > 1:
        communicator.bcast(replicas.mine, 0)
    elif replicas.local_rank != 0:
        replicas.mine[...] = replicas.arrays[0]


def _result(replicas: Replicas) -> Array:
    assert replicas.result is not None
    return replicas.result
