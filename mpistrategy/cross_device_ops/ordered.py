"""OrderedAllReduce: the same bits whatever the number of ranks, their order and the packing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import numpy as np

from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.dtypes import COMBINE, Array, divide_by, dtype_name, host_wire_dtype, quietly, sum_dtype_of_mean
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.cross_device_ops.algorithms import PackedCrossDeviceOps
from mpistrategy.errors import UnsupportedError
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.shared_memory.node_sum import piece_elements
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.collectives import by_shares, concatenate, room_for_shares
from mpistrategy.reduction.inputs import Destination
from mpistrategy.reduction.routes.host import CommunicatorRoute
from mpistrategy.reduction.transfer import Layout, Transfer, finish, packs_of

#: So many rows are put in order by minima and maxima: 4 rows of float32 take 4 ns an element so, 150 by `numpy.sort`.
_FEW_ROWS = 8


class OrderedAllReduce(PackedCrossDeviceOps):
    """Sums each element in an order that its values give, so that the bits depend on the values alone.

    It sums each element in sorted order, so the result does not depend on rank order, packing, the number of nodes or
    the MPI.  Further ranks with zeros (under PROD, ones) do not change it.  Only the reduction is reproducible: sums
    inside a rank still depend on how rows are split, and MEAN divides by the number of ranks.

    Method: each rank gets all ranks' values of its share of the elements, sorts the values of each element, and adds
    them from the least to the greatest.  Let n be the number of values, S their exact sum and A the sum of their
    magnitudes.  Without overflow, the result differs from S by no more than

        float64, complex128    (n-1) u / (1 - (n-1) u) A,  u = 2^-53: the bound of a sum in any order (Higham, Accuracy
                               and Stability of Numerical Algorithms, 4.2)
        float32, complex64     2^-24 |S| + (n-1) 2^-52 A + 2^-150: added in float64, rounded once
        float16, bfloat16      as float32, and rounded once more
        integers               0, modulo 2^bits

    Complex numbers are sums of their parts.  A pre-rounded (binned) summation as of Demmel and Nguyen (Parallel
    Reproducible Summation, 2015) would need less memory traffic between nodes, but a bound on the ranks, a first pass
    for the maxima, and several sums; it loses values far below the maximum; this method does not.

    A zero is +0.0 always; NaN has one pattern of bits: NaN anywhere, or both infinities, give it.  Values are finite
    as long as the partial sums from the least to the greatest are.  PROD (sorted alike) obeys the same; for MIN and
    MAX, -0.0 is less than +0.0.

    Cost: on one node as `MpiAllReduce` for two ranks; with n > 2 also sorting the n values of each element.
    Between nodes each rank sends all its values once and gets all results once, with no sums on the way:
    `CommunicationOptions.wire` is not followed, and with many ranks on a node this is more than the other algorithms
    send.  Of IndexedSlices rows with the same index are added, and rows are in the order of the indices.
    """

    _by_host = True

    def _route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Transfer:
        """Return the route of arrays: through memory of the node, or share by share from rank to rank.

        Raises:
            UnsupportedError: for a PROD of complex numbers, which cannot be combined part by part.
        """
        for dtype, _ in layouts:
            if op is ReduceOp.PROD and dtype.kind == "c":
                raise UnsupportedError.at(
                    "OrderedAllReduce",
                    found=f"PROD of {dtype_name(dtype)} by OrderedAllReduce",
                    expected="PROD of real numbers, or SUM or MEAN",
                    fix="Use MpiAllReduce(), or multiply the magnitudes and add the angles.",
                )
        packs, text = (
            packs_of(layouts, options.bytes_per_pack, alone_bytes=ranks.thresholds.pack_bytes),
            op._on_the_wire,
        )
        nbytes = sum(pack.nbytes for pack in packs)
        names = {ranks.route(nbytes, pack.dtype, text) for pack in packs}
        if names == {"node_sum"}:
            return CommunicatorRoute(ranks, packs, op, "node_sum", combination=combine_ordered)
        shown = "alltoallv" if names.isdisjoint(("none", "threads")) else names.pop()
        return CommunicatorRoute(ranks, packs, op, shown, partial(combine_by_shares, ranks, text))

    def _reduce_slices(self, ranks: Ranks, slices: IndexedSlices, op: ReduceOp) -> IndexedSlices:
        """Return all ranks' rows in the order of their indices, rows with equal indices added up; on the host."""
        slices = IndexedSlices(host_array(slices.values), host_array(slices.indices), slices.dense_shape)
        gathered = concatenate(ranks, slices, ReduceOp.SUM)
        dtype = gathered.values.dtype
        indices, counts = np.unique(gathered.indices, return_counts=True)
        order, starts = np.argsort(gathered.indices, kind="stable"), np.cumsum(counts) - counts
        summed = host_wire_dtype(sum_dtype_of_mean(dtype) if op is ReduceOp.MEAN else dtype)
        total = np.empty((indices.size, *gathered.values.shape[1:]), summed)
        for count in np.unique(counts):
            positions = np.flatnonzero(counts == count)
            rows = [gathered.values[order[starts[positions] + number]].astype(summed) for number in range(count)]
            combine_ordered([row.reshape(-1) for row in rows], [rows[0].reshape(-1)], "SUM", 1)
            total[positions] = rows[0]
        return IndexedSlices(finish(total, dtype, op, ranks.size), indices, slices.dense_shape)


def combine_by_shares(ranks: Ranks, op: str, source: Array, target: Array) -> None:
    """Write the combination of all ranks' `source` into `target`, which may be the same."""
    memory = ranks.guard.on_all(partial(room_for_shares, ranks, reals(target)))
    if target is not source:
        target[...] = source
    by_shares(ranks, reals(target), memory, lambda rows: combine_ordered([*rows], [*rows], op, 1))


@quietly
def combine_ordered(arrays: Sequence[Array], targets: Sequence[Array], op: str, divisor: int) -> None:
    """Do what `node_sum.in_rank_order` does, with the same bits whatever the order of `arrays`.

    The values of an element are sorted, and added from the least to the greatest.  The order of the ranks does not
    matter then, nor do zeros: they are added exactly, wherever they stand.

    Args:
        arrays: flat, one of each rank, in a dtype of the wire.
        targets: flat, of the same size and dtype; may be the arrays themselves.
        op: "SUM", "MIN", "MAX" or "PROD"; no PROD of complex numbers.
        divisor: the result is divided by it; floating and complex dtypes only.
    """
    # The real and the imaginary parts are numbers of their own.
    numbers, results = [*map(reals, arrays)], [*map(reals, targets)]
    dtype, adds = numbers[0].dtype, op in ("SUM", "PROD")
    # Two values are combined alike either way, and MIN, MAX and integers in any order.
    sorts = len(numbers) > 2 and dtype.kind == "f" and adds
    step = piece_elements(len(numbers), dtype.itemsize) & ~1  # no complex number is cut in two
    for start in range(0, numbers[0].size, step):
        rows = [number[start : start + step] for number in numbers]
        if sorts:
            rows = [row.astype(np.float64 if dtype == np.float32 else dtype) for row in _in_order(rows)]
        total = reduce(COMBINE[op], rows[1:], rows[0].copy()).astype(dtype, copy=False)
        use_one_pattern(total, zeros=adds)  # of zeros with different signs MIN and MAX take the same one in any order
        divide_by(divisor, total.view(arrays[0].dtype))
        for result in results:
            result[start : start + step] = total


def _in_order(rows: list[Array]) -> list[Array]:
    """Return rows with the values of each element in order; a NaN in an element may fill all its rows."""
    if len(rows) > _FEW_ROWS:
        return [*np.sort(rows, axis=0)]
    for turn in range(len(rows)):  # odd-even transposition
        for low in range(turn % 2, len(rows) - 1, 2):
            pair = rows[low : low + 2]
            rows[low : low + 2] = np.minimum(*pair), np.maximum(*pair)
    return rows


def reals(array: Array) -> Array:
    """Return a flat complex array as its real and imaginary parts; other arrays as they are."""
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def use_one_pattern(total: Array, *, zeros: bool) -> None:
    """Give NaN, and with `zeros` also zeros, bits that do not depend on the order: NumPy's NaN, and +0.0."""
    if total.dtype.kind == "f":
        if zeros:
            np.add(total, total.dtype.type(0), out=total)
        np.copyto(total, total.dtype.type(np.nan), where=np.isnan(total))
