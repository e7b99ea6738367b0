"""The combination of the ranks' arrays element by element in an order that the values themselves give.

The values of an element are sorted, and added from the least to the greatest.  Who brought which does not matter
then, nor who brings zeros: they are added exactly, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array, divide_by
from mpistrategy.mpi.shared_memory.node_sum import piece_elements


def sorting_memory(ranks: int, dtype: np.dtype[Any], op: str, count: int) -> tuple[Array, Array]:
    """Return what `combine_ordered` needs for `count` elements of so many arrays of a real dtype; empty where nothing.

    That is rows for values in order, and one for their sum.
    """
    # Two values are combined alike either way, and MIN, MAX and integers in any order.
    sorts = ranks > 2 and dtype.kind == "f" and op in ("SUM", "PROD")
    length = min(_step(ranks, dtype), max(0, count)) if sorts else 0
    return np.empty((ranks + 2 if sorts else 0, length), dtype), np.empty(length, summing_dtype(dtype))


def _step(ranks: int, dtype: np.dtype[Any]) -> int:
    return piece_elements(ranks, dtype.itemsize) & ~1  # no complex number is cut in two


def combine_ordered(
    arrays: Sequence[Array],
    targets: Sequence[Array],
    op: str,
    divisor: int,
    memory: tuple[Array, Array] | None = None,
) -> None:
    """Do what `node_sum.in_rank_order` does, with the same bits whatever the order of `arrays`.

    Args:
        arrays: flat, one of each rank, in a dtype of the wire.
        targets: flat, of the same size and dtype; may be the arrays themselves.
        op: "SUM", "MIN", "MAX" or "PROD"; no PROD of complex numbers.
        divisor: the result is divided by it; floating and complex dtypes only.
        memory: that of `sorting_memory`; None takes it now.
    """
    dtype = arrays[0].dtype
    arrays = [reals(array) for array in arrays]  # the real and the imaginary parts are numbers of their own
    numbers = [reals(target) for target in targets]
    kind, adds = numbers[0].dtype, op in ("SUM", "PROD")
    step = _step(len(arrays), kind)
    rows, wide = memory or sorting_memory(len(arrays), kind, op, arrays[0].size)
    sorts = len(rows) > 0
    combine: Any = partial(COMBINE[op], dtype=wide.dtype) if sorts else COMBINE[op]
    for start in range(0, arrays[0].size, step):
        stop = start + step
        chunks, total = [array[start:stop] for array in arrays], numbers[0][start:stop]
        result = total
        if sorts:
            chunks = _in_order(chunks, [row[: total.size] for row in rows])
            result = total if kind == wide.dtype else wide[: total.size]
        if len(chunks) == 1:
            np.copyto(total, chunks[0])
        else:
            combine(chunks[0], chunks[1], out=result)
        for chunk in chunks[2:]:
            combine(result, chunk, out=result)
        if result is not total:
            np.copyto(total, result, casting="same_kind")
        use_one_pattern(total, zeros=adds)  # of zeros with different signs MIN and MAX take the same one in any order
        divide_by(divisor, total.view(dtype))
        for number in numbers[1:]:
            number[start:stop] = total


def reals(array: Array) -> Array:
    """Return a flat complex array as the real numbers of which it consists; others as they are."""
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def use_one_pattern(total: Array, *, zeros: bool = True) -> None:
    """Give NaN, and with `zeros` zeros, the bits that do not tell of the order: NumPy's NaN, and +0.0."""
    if total.dtype.kind != "f" or total.size == 0:
        return
    if zeros:
        np.add(total, total.dtype.type(0), out=total)
    if np.isnan(np.maximum.reduce(total)):
        np.copyto(total, total.dtype.type(np.nan), where=np.isnan(total))


def sum_of_rows(rows: Array) -> Array:
    """Return the sums along the middle one of three axes, in the order of the values; for rows of equal indices.

    The bits are those of `combine_ordered`; of complex numbers those of their parts.
    """
    dtype = rows.dtype
    if dtype.kind in "iu":
        return np.asarray(rows.sum(axis=1, dtype=dtype))
    numbers = np.sort(rows.view(rows.real.dtype) if dtype.kind == "c" else rows, axis=1)
    last = np.add.accumulate(numbers, axis=1, dtype=summing_dtype(numbers.dtype))[:, -1]
    total = np.ascontiguousarray(last.astype(numbers.dtype))
    use_one_pattern(total.reshape(-1))
    return total.view(dtype)


def summing_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which sorted values are added: float64 for float32."""
    return np.dtype(np.float64) if dtype == np.float32 else dtype


@lru_cache(maxsize=64)
def sorting_network(count: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of places to be compared, and exchanged, one after another to sort `count` values.

    Batcher's odd-even merge sort (Knuth, The Art of Computer Programming 3, 5.3.4).
    """
    pairs, run = list[tuple[int, int]](), 1
    while run < count:
        step = run
        while step:
            first = (
                at + i for at in range(step % run, count - step, 2 * step) for i in range(min(step, count - at - step))
            )
            pairs += [(low, low + step) for low in first if low // (2 * run) == (low + step) // (2 * run)]
            step //= 2
        run *= 2
    return tuple(pairs)


def _in_order(chunks: list[Array], free: list[Array]) -> list[Array]:
    """Return chunks with the values of each element in order; they are read where they are, and written to `free`."""
    owned = [False] * len(chunks)
    for low, high in sorting_network(len(chunks)):
        less, greater = free.pop(), free.pop()
        np.minimum(chunks[low], chunks[high], out=less)
        np.maximum(chunks[low], chunks[high], out=greater)
        for place, row in ((low, less), (high, greater)):
            if owned[place]:
                free.append(chunks[place])
            chunks[place], owned[place] = row, True
    return chunks
