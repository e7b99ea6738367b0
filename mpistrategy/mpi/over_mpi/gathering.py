"""The ranks' blocks one after the other, in rank order: on one rank or on all of them.

One MPI collective for each piece of the result, and no memory besides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.buffers import as_bytes

#: Up to so much goes by MPI's Gather, which is quick, but may take half of it again on the ranks that pass it on.
_TREE_BYTES = 2**20


class _Piece(NamedTuple):
    """A piece of the result: where it begins and ends, how much each rank has in it, and from where in it on."""

    start: int
    stop: int
    counts: Array
    starts: Array


def gather(
    comm: MPI.Intracomm,
    block: Array,
    counts: Sequence[int],
    together: Array | None,
    root: int,
    most: int,
    meet: Callable[[], object] = lambda: None,
) -> None:
    """Write the ranks' blocks, of any dtype, into `together` on `root`; it is None elsewhere.

    Args:
        comm: the ranks.
        block: this rank's; may be its part of `together`.
        counts: how many elements each rank's block has.
        together: contiguous.
        root: who gets them.
        most: how many bytes one MPI call may carry.
        meet: is called before the first MPI call.
    """
    sizes, mine = _sizes(block, counts), as_bytes(block)
    result = None if together is None else as_bytes(together)
    first = int(sizes[: comm.rank].sum())
    if result is not None:
        _put(mine, result[first:][: mine.size])
    is_one_call = int(sizes.sum()) <= min(most, _TREE_BYTES) and _are_equal(sizes)
    pieces = [] if is_one_call else [*_pieces(sizes, most)]
    meet()
    if is_one_call:
        comm.Gather(mine if result is None else MPI.IN_PLACE, result, root)
    for piece in pieces:
        if result is None:
            comm.Gatherv(mine[max(0, piece.start - first) : max(0, piece.stop - first)], None, root)
        else:
            target = result[piece.start : piece.stop]
            comm.Gatherv(MPI.IN_PLACE, [target, piece.counts, piece.starts, MPI.BYTE], root)


def allgather(
    comm: MPI.Intracomm,
    block: Array | None,
    counts: Sequence[int],
    together: Array,
    most: int,
    meet: Callable[[], object] = lambda: None,
) -> None:
    """Write the ranks' blocks into `together` on every rank; see `gather`.  None: this rank's is in its place."""
    sizes, result = _sizes(together, counts), as_bytes(together)
    if block is not None:
        _put(as_bytes(block), result[int(sizes[: comm.rank].sum()) :][: block.nbytes])
    # For megabytes on a node MPICH's Allgatherv takes two to three times as long.
    is_one_call = result.size <= most and _are_equal(sizes)
    pieces = [] if is_one_call else [*_pieces(sizes, most)]
    meet()
    if is_one_call:
        comm.Allgather(MPI.IN_PLACE, result)
    for piece in pieces:
        target = result[piece.start : piece.stop]
        comm.Allgatherv(MPI.IN_PLACE, [target, piece.counts, piece.starts, MPI.BYTE])


def _sizes(block: Array, counts: Sequence[int]) -> Array:
    """Return how many bytes each rank's block has."""
    return np.asarray(counts, np.int64) * block.itemsize


def _are_equal(sizes: Array) -> bool:
    return bool((sizes == sizes[0]).all())


def _put(mine: Array, place: Array) -> None:
    """Copy this rank's block to where it belongs, unless it is there."""
    if mine.ctypes.data != place.ctypes.data:
        place[...] = mine


def _pieces(sizes: Array, most: int) -> Iterator[_Piece]:
    """Yield the result in pieces of at most `most` bytes; one at least."""
    ends = np.cumsum(sizes)
    total, begins = int(ends[-1]), ends - sizes
    for start in range(0, max(total, 1), most):
        stop = min(start + most, total)
        first, last = np.clip(begins, start, stop), np.clip(ends, start, stop)
        yield _Piece(start, stop, last - first, first - start)
