"""OrderedAllReduce: the same bits whatever the number of ranks, their order and the packing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.dtypes import Array, dtype_name, host_wire_dtype, sum_dtype_of_mean
from mpistrategy.arrays.gpu import is_cupy
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.cross_device_ops.built_in import PackedCrossDeviceOps
from mpistrategy.cross_device_ops.ordered_sum import combine_ordered, reals, sorting_memory, sum_of_rows
from mpistrategy.errors import UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.shared_memory.node_sum import NodeSum
from mpistrategy.options import ReduceOp
from mpistrategy.reduction import sparse
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.layout.finish import finish
from mpistrategy.reduction.layout.packing import Layout, hybrid
from mpistrategy.reduction.routes.base import Route
from mpistrategy.reduction.routes.communicator import CommunicatorRoute, names_of

if TYPE_CHECKING:
    from mpistrategy.reduction.routes.gpu import GpuOperation

#: About so much of a buffer is exchanged at a time where the ranks do not share memory.  As much is needed besides;
#: three times as much for a last piece that cannot be cut into equal shares.
_PIECE_BYTES = 8 * 2**20


def _node_memory(communicator: Ranks, dtype: np.dtype[Any], op: str) -> tuple[Array, Array]:
    """Return the `sorting_memory` of a dtype, of whatever length: the same for all calls."""
    real = reals(np.empty(0, dtype)).dtype
    make = partial(sorting_memory, communicator.size, real, op, sys.maxsize)
    return communicator.once((sorting_memory, real, op), make)


def _add_on_node(
    node: NodeSum, op: str, memory: dict[np.dtype[Any], tuple[Array, Array]], source: Array, target: Array
) -> None:
    node.run(((source, target),), op, combination=partial(combine_ordered, memory=memory[source.dtype]))


class OrderedAllReduce(PackedCrossDeviceOps):
    """Sums each element in an order that its values give, so that the bits depend on the values alone.

    The same arrays give the same bits whichever rank brings which of them, beside however many ranks that bring zeros
    (under PROD, ones), on any number of nodes, alone or in a list, with any `bytes_per_pack`, with any MPI.
    What a rank adds up before it brings it is that rank's business, as is what MEAN divides by: the number of ranks.

    Method: each rank gets all ranks' values of its share of the elements, sorts those of each element by a network of
    minima and maxima, and adds them from the least to the greatest.  With n values x, of which S is the exact sum and
    A the sum of the magnitudes, and without overflow, the result differs from S by no more than

        float64, complex128    (n-1) u / (1 - (n-1) u) A,  u = 2^-53: the bound of a sum in any order (Higham, Accuracy
                               and Stability of Numerical Algorithms, 4.2)
        float32, complex64     2^-24 |S| + (n-1) 2^-52 A + 2^-150: added in float64, rounded once
        float16, bfloat16      as float32, and rounded once more
        integers               0, modulo 2^bits

    Complex numbers are sums of their parts.  A pre-rounded (binned) summation as of Demmel and Nguyen (Parallel
    Reproducible Summation, 2015) would need less memory traffic between nodes, but a bound on the ranks, a first pass
    for the maxima, and several sums; it loses what is far below the maximum, and this does not.

    A zero is +0.0 always; NaN has one pattern of bits: NaN anywhere, or both infinities, give it.  Values are finite
    as long as the partial sums from the least to the greatest are.  PROD (sorted alike) obeys the same; for MIN and
    MAX, -0.0 is less than +0.0.

    Cost: on one node that of `MpiAllReduce` for two ranks, and with n > 2 the sorting, about log2(n)^2 / 2 comparisons
    for each value.  Between nodes each rank sends all its values once and gets the result once, with no sums on the
    way: `CommunicationOptions.wire` is not followed, and with many ranks on a node this is more than the other
    algorithms send.  Of IndexedSlices rows with the same index are added, and rows are in the order of the indices.
    """

    def _route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        bytes_per_pack: float,
        wire: str | None,
        destination: Destination,
    ) -> Route:
        """Return the route of arrays: through memory of the node, or share by share from rank to rank."""
        packs = hybrid(layouts, ranks.thresholds.pack_bytes, bytes_per_pack)
        names = names_of(ranks, packs, op)
        node, text = ranks.node_sum, op._on_the_wire
        if node is not None and {*names} == {"node_sum"}:
            memory = {pack.dtype: _node_memory(ranks, pack.dtype, text) for pack in packs}
            return CommunicatorRoute(ranks, packs, op, names, partial(_add_on_node, node, text, memory))
        shown = [name if name in ("none", "threads") else "alltoallv" for name in names]
        return CommunicatorRoute(ranks, packs, op, shown, partial(gather_and_combine, ranks, text, destination))

    def _gpu_operation(self, communicator: Ranks, destination: Destination) -> GpuOperation | None:
        """Return None: values are sorted on the host."""
        return None

    def _reduce_slices(self, communicator: Ranks, slices: IndexedSlices, op: ReduceOp, call: Call) -> IndexedSlices:
        """Return all ranks' rows, those with equal indices added up, in the order of their indices; on the host."""
        slices = IndexedSlices(host_array(slices.values), host_array(slices.indices), slices.dense_shape)
        every = sparse.concatenate(communicator, slices, ReduceOp.SUM, call)
        dtype = every.values.dtype
        summed = sum_dtype_of_mean(dtype) if op is ReduceOp.MEAN else dtype
        indices, counts = np.unique(every.indices, return_counts=True)
        order = np.argsort(every.indices, kind="stable")
        starts = np.cumsum(counts) - counts
        total = np.empty((indices.size, *every.values.shape[1:]), host_wire_dtype(summed))
        with np.errstate(all="ignore"):
            for count in np.unique(counts):
                chosen = np.flatnonzero(counts == count)
                rows = every.values[order[starts[chosen, None] + np.arange(count)]].astype(total.dtype)
                width = rows[0, 0].size
                total[chosen] = sum_of_rows(rows.reshape(chosen.size, count, width)).reshape(total[chosen].shape)
        return IndexedSlices(finish(total, dtype, op, communicator.size), indices, slices.dense_shape)

    def _check_values(self, values: Sequence[Any], op: ReduceOp, where: str) -> None:
        """Raise UnsupportedError for a PROD of complex numbers, whose order is not that of their parts."""
        for value in values:
            is_array = isinstance(value, np.ndarray) or is_cupy(value)
            if op is ReduceOp.PROD and is_array and value.dtype.kind == "c":
                raise UnsupportedError.at(
                    where,
                    found=f"PROD of {dtype_name(value.dtype)} by OrderedAllReduce",
                    expected="PROD of real numbers, or SUM or MEAN",
                    fix="Use MpiAllReduce(), or multiply the magnitudes and add the angles.",
                )


def gather_and_combine(communicator: Ranks, op: str, destination: Destination, source: Array, target: Array) -> None:
    """Write the combination of all ranks' `source` into `target`, which may be the same, where it is wanted.

    Each rank gets the others' values of its share, combines them, and sends the result: two collectives for a piece.
    """
    brought, wanted = reals(source.reshape(-1)), reals(target.reshape(-1))
    size, itemsize = communicator.size, wanted.itemsize
    step = size * max(1, _PIECE_BYTES // (size * itemsize))
    room = communicator.guard.on_all(lambda: _room(communicator, op, wanted, step))
    for start in range(0, wanted.size, step):
        sent, result = brought[start : start + step], wanted[start : start + step]
        if result.size % size == 0:
            _combine_piece(communicator, op, destination, sent, result, room)
            continue
        padded = room.padded
        padded[0, : sent.size] = sent
        _combine_piece(communicator, op, destination, padded[0], padded[1], room)
        if destination.includes(communicator.rank):
            result[...] = padded[1, : result.size]


class _Room(NamedTuple):
    """Memory for the exchange of pieces, one after the other.

    Attributes:
        received: for all ranks' values of a share; flat.
        padded: for what is sent and what is combined of the last piece, where that is no whole number of shares.
        sorting: that of `sorting_memory`.
    """

    received: Array
    padded: Array
    sorting: tuple[Array, Array]


def _room(communicator: Ranks, op: str, wanted: Array, step: int) -> _Room:
    size, dtype = communicator.size, wanted.dtype
    largest, last = -(-min(step, wanted.size) // size), wanted.size % step
    padded = np.zeros((2, -(-last // size) * size if last % size else 0), dtype)  # all shares have one size
    received = np.empty(size * largest, dtype)
    return _Room(received, padded, sorting_memory(size, dtype, op, largest))


def _combine_piece(
    communicator: Ranks, op: str, destination: Destination, sent: Array, result: Array, room: _Room
) -> None:
    """Write the combination of all ranks' `sent`, of equal shares, into `result` where it is wanted."""
    rank, size = communicator.rank, communicator.size
    count = result.size // size
    received = room.received[: result.size].reshape(size, count)
    communicator.alltoall(sent, received)
    own = result[rank * count : (rank + 1) * count]
    with np.errstate(all="ignore"):
        combine_ordered(list(received), [own], op, 1, room.sorting)
    root = destination.only_rank
    if root is None:
        communicator.allgatherv(own, [count] * size, result)
    else:
        communicator.gatherv(own, [count] * size, result if rank == root else None, root)
