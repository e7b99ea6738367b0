"""Reduction of arrays that live in memory which the ranks of a node share: where they are, without copies.

Every rank combines its share of all ranks' arrays (`node_sum.ShareOfNode`), and writes it into all of them, or into
one result for the whole node.

When a call begins on one node, all ranks have written their arrays (the guard's agreement comes first).  On several
nodes the ranks may not have met before, and each looks at its own array alone.  Nobody may read the result or write its
array again before `communicator.node_barrier()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, host_wire_dtype
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.reduced_precision import Wire, between_nodes
from mpistrategy.mpi.multi_node.two_level import across_nodes
from mpistrategy.mpi.shared_memory.node_sum import ShareOfNode
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.packing import Member, Pack, layouts_of, plan
from mpistrategy.reduction.routes import on_device
from mpistrategy.reduction.routes.base import Description, Route, Targets, copies_of
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


class _Way(ABC):
    """How one bucket is combined, and sent to other nodes: a part of `InPlaceRoute`, which has the same arguments."""

    def __init__(
        self, communicator: Ranks, replicas: Replicas, op: ReduceOp, *, into_result: bool, wire: str | None
    ) -> None:
        self._ranks, self._replicas, self._op, self._into_result = communicator, replicas, op._on_the_wire, into_result
        mine = replicas.mine
        #: The dtype in which sums travel between nodes, where that is another one.
        self._wire: Wire = between_nodes(communicator, wire, mine.dtype, self._op)
        self._divisor = op._divisor(mine.dtype, communicator.size)
        self._targets = (_result(replicas),) if into_result else replicas.arrays
        #: The bucket as one pack.
        self.pack: Pack = Pack(mine.dtype, mine.size, (Member(0, 0, mine.size, mine.shape),))

    def bring(self) -> Any:
        """Return the memory that is needed besides the arrays."""
        return None

    @abstractmethod
    def run(self, memory: Any) -> None:
        """Combine the bucket, after the agreement."""

    def describe(self) -> Description:
        """Return what `run` would do."""
        pack, wire = self.pack, self._wire
        name = "lanes" if wire is not None else self._ranks.route(pack.nbytes, pack.dtype, self._op)
        return described(pack, name, copies_of(pack, [self._replicas.mine]), wire)


class _OnOneNode(_Way):
    """Each rank combines its share of all ranks' arrays, where they are."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        replicas = self._replicas
        self._share = ShareOfNode(replicas.arrays, self._targets, self._op, self._divisor, replicas.local_rank)

    def run(self, memory: Any) -> None:
        self._share.combine()

    def describe(self) -> Description:
        target = "the node's one result" if self._into_result else "every one"
        way = f"where the arrays are, each rank 1/{len(self._replicas.arrays)} of them, into {target}"
        return Description(self.pack, way, ())


class _AcrossNodes(_Way):
    """The node's arrays are combined where they are, and the sums sent to other nodes."""

    def run(self, memory: Any) -> None:
        across_nodes(self._ranks).in_place(self._replicas.arrays, self._targets, self._op, self._wire, self._divisor)


class _ByMessages(_Way):
    """By messages, like other arrays: the ranks of a node do not see each other's."""

    def __init__(
        self, communicator: Ranks, replicas: Replicas, op: ReduceOp, *, into_result: bool, wire: str | None
    ) -> None:
        super().__init__(communicator, replicas, op, into_result=into_result, wire=wire)
        packs = plan(layouts_of([replicas.mine]), 1, 0, host_wire_dtype)
        self._route: Route = CommunicatorRoute(communicator, packs, op, wire=wire)
        self.pack = replace(packs[0], members=self.pack.members)
        #: Where the result goes; None where the first rank of the node writes it for all.
        is_others = into_result and replicas.is_shared and replicas.local_rank > 0
        self._target = None if is_others else _result(replicas) if into_result else replicas.mine

    def bring(self) -> Any:
        return self._route.bring([self._replicas.mine], [self._target])

    def run(self, memory: Any) -> None:
        if self._into_result and self._replicas.is_shared:
            self._ranks.node_barrier()  # until the peers are here they may read the result of the call before
        [total] = self._route.run([self._replicas.mine], memory)
        if self._target is not None and total is not self._target:
            np.copyto(self._target, total, casting="unsafe")


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
        self._ranks = communicator
        self._ways: list[_Way] = [
            _way_of(communicator, each, op, wire)(communicator, each, op, into_result=into_result, wire=wire)
            for each in buckets
        ]
        self._results = [_result(each) if into_result else each.mine for each in buckets]
        packs = enumerate(way.pack for way in self._ways)
        self.packs: tuple[Pack, ...] = tuple(
            replace(pack, members=(replace(pack.members[0], index=index),)) for index, pack in packs
        )

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> list[Any]:
        """Return the memory that messages need besides the arrays, which are where they are combined."""
        return [way.bring() for way in self._ways]

    def run(self, arrays: Sequence[Array], memory: list[Any]) -> list[Array]:
        """Combine the buckets on all nodes, and return where the combinations are."""
        with np.errstate(all="ignore"):
            for way, room in zip(self._ways, memory, strict=True):
                if way.pack.size:  # else nodes may have different numbers of ranks
                    way.run(room)
        self._ranks.node_barrier()
        return self._results

    def describe(self, ranks: Ranks, arrays: Sequence[Array]) -> list[Description]:
        rows = zip(self.packs, self._ways, strict=True)
        return [replace(way.describe(), pack=pack) for pack, way in rows]


def _way_of(communicator: Ranks, replicas: Replicas, op: ReduceOp, wire: str | None) -> type[_Way]:
    """Return how a bucket is combined: where it is, where the ranks see each other's arrays; else it is sent.

    Between nodes smaller buffers are left to one call of MPI, and others travel in another dtype.
    """
    mine, name = replicas.mine, op._on_the_wire
    if not replicas.is_shared:
        return _ByMessages
    if communicator.nodes == 1:
        return _OnOneNode
    is_alone = len(replicas.arrays) == 1 or not communicator.has_links or not across_nodes(communicator).sees_node
    if is_alone or host_wire_dtype(mine.dtype) != mine.dtype:
        return _ByMessages
    is_sent = between_nodes(communicator, wire, mine.dtype, name) is not None
    return _AcrossNodes if is_sent or communicator.route(mine.nbytes, mine.dtype, name) == "lanes" else _ByMessages


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
