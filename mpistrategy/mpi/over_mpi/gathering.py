"""The ranks' blocks one after the other, in rank order: on one rank or on all of them.

One MPI collective for each piece of the result, and no memory besides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.buffers import as_bytes

#: Up to so much goes by MPI's Gather, which is quick, but may take half of it again on the ranks that pass it on.
_TREE_BYTES = 2**20


#: A piece of the result: where it begins and ends, how much each rank has in it, and from where in it on.
_Piece: TypeAlias = tuple[int, int, Array, Array]


def gather(
    comm: MPI.Intracomm,
    block: Array | None,
    counts: Sequence[int],
    together: Array | None,
    root: int | None,
    most: int,
    meet: Callable[[], object] = lambda: None,
) -> None:
    """Write the ranks' blocks, of any dtype, into `together`, which is None on ranks that get none.

    Args:
        comm: the ranks.
        block: this rank's; may be its part of `together`, which None stands for.
        counts: how many elements each rank's block has.
        together: contiguous.
        root: who gets them; None means all ranks.
        most: how many bytes one MPI call may carry.
        meet: is called before the first MPI call.
    """
    array = together if block is None else block
    assert array is not None
    sizes, mine = np.asarray(counts, np.int64) * array.itemsize, as_bytes(array)
    result, first = None if together is None else as_bytes(together), int(sizes[: comm.rank].sum())
    if result is not None and block is not None:
        place = result[first:][: mine.size]
        if mine.ctypes.data != place.ctypes.data:
            place[...] = mine
    # For megabytes on a node MPICH's Allgatherv takes two to three times as long.
    most_at_once = most if root is None else min(most, _TREE_BYTES)
    is_one_call = int(sizes.sum()) <= most_at_once and bool((sizes == sizes[0]).all())
    pieces = [] if is_one_call else [*_pieces(sizes, most)]
    meet()
    if is_one_call and root is None:
        comm.Allgather(MPI.IN_PLACE, result)
    elif is_one_call:
        comm.Gather(mine if result is None else MPI.IN_PLACE, result, root or 0)
    for start, stop, parts, places in pieces:
        if result is None:
            comm.Gatherv(mine[max(0, start - first) : max(0, stop - first)], None, root or 0)
        elif root is None:
            comm.Allgatherv(MPI.IN_PLACE, [result[start:stop], parts, places, MPI.BYTE])
        else:
            comm.Gatherv(MPI.IN_PLACE, [result[start:stop], parts, places, MPI.BYTE], root)


def _pieces(sizes: Array, most: int) -> Iterator[_Piece]:
    """Yield the result in pieces of at most `most` bytes; one at least."""
    ends = np.cumsum(sizes)
    total, begins = int(ends[-1]), ends - sizes
    for start in range(0, max(total, 1), most):
        stop = min(start + most, total)
        first, last = np.clip(begins, start, stop), np.clip(ends, start, stop)
        yield start, stop, last - first, first - start
