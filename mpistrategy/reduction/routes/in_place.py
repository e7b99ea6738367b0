"""Reduction of arrays that live in memory which the ranks of a node share: one pass, and no copies.

Every rank owns a share of the elements.  It combines its share of all ranks' arrays, in rank order and in chunks that
stay in the cache, and writes each chunk into all of them, or into one result for the whole node.  One rank computes
each element, so that the bits are the same everywhere.

When a call begins on one node, all ranks have written their arrays (the guard's agreement comes first).  On several
nodes the ranks may not have met before, and each looks at its own array alone.  Nobody may read the result or write its
array again before `communicator.node_barrier()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import COMBINE, Array, divide_by, host_wire_dtype, quiet_runner
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node.reduced_precision import between_nodes
from mpistrategy.mpi.multi_node.rounded_exchange import Wire
from mpistrategy.mpi.multi_node.two_level import across_nodes, allreduce
from mpistrategy.mpi.shared_memory.bounce_buffers import share
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.packing import Member, Pack
from mpistrategy.reduction.routes.base import Copies, Description, Targets
from mpistrategy.reduction.routes.communicator import described

#: The chunks of all ranks' arrays together: about what a core's second cache holds beside other things.
_CACHE_BYTES = 512 * 2**10
_LEAST_CHUNK_BYTES = 16 * 2**10
#: Where memory is not shared and the dtype is not the one that travels, so many elements are converted at a time.
_CONVERTED_ELEMENTS = 2**20


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

    @property
    def my_share(self) -> tuple[int, int]:
        """Where the elements begin and end that this rank computes."""
        mine = self.mine
        return share(mine.size, self.local_rank, len(self.arrays), mine.itemsize)


def typed(memory: SharedMemory, start: int, count: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
    """Return `count` elements from byte `start` on, of every segment."""
    return tuple(segment[start : start + count * dtype.itemsize].view(dtype) for segment in memory.segments)


def joined(memory: SharedMemory) -> Array:
    """Return the segments of all ranks as one flat array; each must be a whole number of pages."""
    nbytes, count = memory.mine.nbytes, len(memory.segments)
    addresses = [segment.ctypes.data for segment in memory.segments]
    assert addresses == [addresses[0] + rank * nbytes for rank in range(count)]
    return np.lib.stride_tricks.as_strided(memory.segments[0], (count * nbytes,), (1,))


def is_in_place(communicator: Communicator, replicas: Replicas) -> bool:
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
        and hasattr(communicator, "links")
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
        communicator: Communicator,
        buckets: Sequence[Replicas],
        op: ReduceOp,
        *,
        into_result: bool,
        wire: str | None = None,
    ) -> None:
        #: For each bucket the dtype in which it travels between nodes, where that is another one.
        self._wires = [between_nodes(communicator, wire, each.mine.dtype, op._on_the_wire) for each in buckets]
        self._communicator, self._buckets, self._op, self._into_result = communicator, buckets, op, into_result
        #: For each bucket what messages need besides it, between `bring` and `run`.
        self._spare: list[_Spare] = [_Spare()] * len(buckets)
        self.packs: tuple[Pack, ...] = tuple(map(self._pack, range(len(buckets)), buckets))
        # Of a bucket without elements nothing is prepared: nodes may have different numbers of ranks.
        self._steps = [self._step(index, replicas) for index, replicas in enumerate(buckets) if replicas.mine.size]
        self._results = [_result(replicas) if into_result else replicas.mine for replicas in buckets]
        self._quiet = quiet_runner()

    def _pack(self, index: int, replicas: Replicas) -> Pack:
        mine, communicator = replicas.mine, self._communicator
        wide, member = host_wire_dtype(mine.dtype), Member(index, 0, mine.size, mine.shape)
        name = communicator.route(mine.size * wide.itemsize, wide, self._op._on_the_wire)
        converts = wide != mine.dtype and name != "none" and not is_in_place(communicator, replicas)
        return Pack(wide if converts else mine.dtype, mine.size, (member,), converts)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> None:
        """Take the memory that messages need besides the arrays, which are where they are combined."""
        communicator, op = self._communicator, self._op._on_the_wire
        for index, replicas in enumerate(self._buckets):
            is_seen = is_seen_across(communicator, replicas, op, self._wires[index])
            if not is_in_place(communicator, replicas) and not is_seen:
                self._spare[index] = _spare_for(replicas, into_result=self._into_result)

    def run(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Combine the buckets on all nodes, and return where the combinations are."""
        # Overflow gives inf here, as it does in MPI; NumPy would warn on the one rank that computes the element.
        for step in self._steps:
            self._quiet(step)
        self._spare[:] = [_Spare()] * len(self._buckets)
        self._communicator.node_barrier()
        return self._results

    def _step(self, index: int, replicas: Replicas) -> Callable[[], None]:
        """Return what combines a bucket."""
        communicator, op, mine = self._communicator, self._op._on_the_wire, replicas.mine
        divisor = self._op._divisor(mine.dtype, communicator.size)
        targets = (_result(replicas),) if self._into_result else replicas.arrays
        if is_in_place(communicator, replicas):
            return partial(combine, replicas.arrays, targets, op, divisor, replicas.my_share)
        target = targets[0] if self._into_result else mine
        wire = self._wires[index]
        return partial(_by_messages, communicator, replicas, targets, target, op, divisor, self._spare, index, wire)

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        return [self._described(ranks, *each) for each in zip(self.packs, self._buckets, self._wires, strict=True)]

    def _described(self, ranks: Communicator, pack: Pack, replicas: Replicas, wire: Wire) -> Description:
        local, into_result, op = len(replicas.arrays), self._into_result, self._op._on_the_wire
        if not is_in_place(ranks, replicas):
            copies: Copies = ((2, f"all into {pack.dtype.name} and the results back"),) if pack.converts else ()
            seen = is_seen_across(ranks, replicas, op, wire)
            name = "lanes" if wire is not None else ranks.route(pack.nbytes, pack.dtype, op)
            return described(ranks, name, [pack], copies, in_place=not into_result, seen=seen, wire=wire)
        read, written = size_in_words(pack.nbytes), size_in_words(pack.nbytes / (local if into_result else 1))
        target = "into the node's one result" if into_result else "into every one"
        return Description(
            [pack],
            f"where the arrays are, each rank 1/{local} of them",
            (),
            f"each rank reads {read} and writes {written}, {target}",
        )


def broadcast_replicas(communicator: Communicator, replicas: Replicas) -> None:
    """Write rank 0's array into everybody's; to be called inside an agreed call by all ranks."""
    if is_on_device(replicas.mine):
        from mpistrategy.reduction.routes import on_device  # here, for the quick import

        on_device.bcast(communicator, replicas.mine, 0)
        return
    if not replicas.is_shared:
        communicator.bcast(replicas.mine, 0)
        return
    if communicator.nodes > 1:
        leaders = communicator.node().leaders
        if leaders is not None:
            leaders.bcast(replicas.mine, 0)
        communicator.node_barrier()
    if replicas.local_rank != 0:
        replicas.mine[...] = replicas.arrays[0]


def combine(arrays: Sequence[Array], targets: Sequence[Array], op: str, divisor: int, part: tuple[int, int]) -> None:
    """Combine a part of all arrays of the node, and write it into each of `targets`.

    Args:
        arrays: flat, by local rank.
        targets: flat, of the same size and dtype, by local rank; may be the arrays themselves.
        op: "SUM", "MIN", "MAX" or "PROD".
        divisor: the result is divided by it; floating dtypes only.
        part: where the elements begin and end.
    """
    dtype = arrays[0].dtype
    begin, end = part
    step = chunk_elements(len(arrays), dtype.itemsize)
    if dtype != host_wire_dtype(dtype):
        _combine_rounded(arrays, targets, op, divisor, (begin, end, step))
        return
    add, first = COMBINE[op], targets[0]
    if len(arrays) == 2 and len(targets) == 1 and divisor == 1:
        step = max(1, end - begin)  # nothing is looked at twice
    for start in range(begin, end, step):
        stop = min(start + step, end)
        total = first[start:stop]
        if len(arrays) > 1:
            # The first target may be the first array: it has been read by then.
            add(arrays[0][start:stop], arrays[1][start:stop], out=total)
        elif first is not arrays[0]:
            total[...] = arrays[0][start:stop]
        for array in arrays[2:]:
            add(total, array[start:stop], out=total)
        divide_by(divisor, total)
        for target in targets[1:]:
            target[start:stop] = total


def chunk_elements(ranks: int, itemsize: int) -> int:
    """Return how many elements make a chunk of which all ranks' arrays fit the cache."""
    return max(_LEAST_CHUNK_BYTES, _CACHE_BYTES // ranks) // itemsize


def _combine_rounded(
    arrays: Sequence[Array], targets: Sequence[Array], op: str, divisor: int, part: tuple[int, int, int]
) -> None:
    begin, end, step = part
    combine = COMBINE[op]
    wide = np.empty((2, min(step, max(0, end - begin))), host_wire_dtype(arrays[0].dtype))
    for start in range(begin, end, step):
        stop = min(start + step, end)
        total, operand = wide[:, : stop - start]
        total[...] = arrays[0][start:stop]
        for array in arrays[1:]:
            operand[...] = array[start:stop]
            combine(total, operand, out=total)
        divide_by(divisor, total)
        targets[0][start:stop] = total
        for target in targets[1:]:
            target[start:stop] = targets[0][start:stop]


class _Spare(NamedTuple):
    """Memory besides a bucket's own; None where it needs none.

    Attributes:
        converted: for a part of it in the dtype that travels.
        result: for a result that another rank of the node writes.
    """

    converted: Array | None = None
    result: Array | None = None


def _spare_for(replicas: Replicas, *, into_result: bool) -> _Spare:
    mine, wire = replicas.mine, host_wire_dtype(replicas.mine.dtype)
    converted = None if wire == mine.dtype else np.empty(min(mine.size, _CONVERTED_ELEMENTS), wire)
    is_another = into_result and replicas.is_shared and replicas.local_rank != 0
    return _Spare(converted, np.empty_like(mine) if is_another else None)


def _by_messages(
    communicator: Communicator,
    replicas: Replicas,
    targets: Sequence[Array],
    target: Array,
    op: str,
    divisor: int,
    spare: Sequence[_Spare],
    index: int,
    wire: Wire,
) -> None:
    """Combine a node's arrays where they are, and the sums of all nodes into `targets`; else do `_allreduce`."""
    if is_seen_across(communicator, replicas, op, wire):
        ranks: Any = communicator
        mine = replicas.mine
        across = across_nodes(ranks)
        within = across.within(replicas.arrays, targets, partial(divide_by, divisor))
        if within is not None:  # else there was no memory for the counters, on any node
            across.allreduce(mine, mine, op, wire, within)
            return
    _allreduce(communicator, replicas, target, op, divisor, spare[index], wire)


def _allreduce(
    communicator: Communicator, replicas: Replicas, target: Array, op: str, divisor: int, spare: _Spare, wire: Wire
) -> None:
    """Write the combination of all ranks' arrays into `target`, this rank's own or the node's result, by messages."""
    source = replicas.mine
    if target is not source and replicas.is_shared:
        communicator.node_barrier()  # until the peers are here they may read the result of the call before
        if replicas.local_rank != 0:  # all ranks take part; the first of each node shows it what came out
            target = np.empty_like(source) if spare.result is None else spare.result
    if communicator.size == 1:
        if target is not source:
            target[...] = source
        return
    converted = spare.converted
    step = target.size if converted is None else converted.size
    for start in range(0, target.size, max(1, step)):
        part = target[start : start + step]
        total = part if converted is None else converted[: part.size]
        if converted is not None:
            total[...] = source[start : start + step]
            communicator.allreduce(total, op)
        else:
            allreduce(communicator, total, op, None if source is target else source[start : start + step], wire)
        divide_by(divisor, total)
        if converted is not None:
            np.copyto(part, total, casting="unsafe")


def _result(replicas: Replicas) -> Array:
    assert replicas.result is not None
    return replicas.result
