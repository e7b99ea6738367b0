"""How buffers in GPU memory travel: the base class of a path, and what several paths need.

A path works on CuPy's current stream: after the work that is on the stream, and before the work that is put on it
later.  Nothing waits for the whole device.

Libraries whose MIN and MAX of floats may lose a NaN get integers instead.  The bits of a float become a signed integer
of the same order: -0.0 is less than +0.0, and a NaN is the greatest number for MAX and the least for MIN.  Converted
back, the result has the bits of `mpistrategy.arrays.dtypes.Extreme`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from mpistrategy.arrays.convert import DeviceArray
from mpistrategy.mpi.interface.ranks import Freed, Ranks
from mpistrategy.objects.shown import ranks_in_words

PathName = Literal["alone", "mpi", "staged", "nccl"]
#: The paths that need nothing of the host once their work is on the stream.
ON_THE_STREAM: tuple[PathName, ...] = ("alone", "nccl")


class DevicePath(Freed):
    """One transport for buffers in GPU memory: flat, contiguous, on the current device, equal in size on all ranks.

    Every rank makes the same call, after all have agreed on it.  The methods here are for one rank alone:
    nothing moves.

    Attributes:
        name: the word for users.
        reason: why it was chosen, in words.
    """

    name: PathName = "alone"
    reason: str = ""

    def check(self) -> None:
        """Raise where the path cannot be used any more, or not on the current device; before the ranks agree."""

    def reduce(
        self,
        ranks: Ranks,
        buffer: DeviceArray,
        op: str,
        root: int | None = None,
        wire: str | None = None,
    ) -> None:
        """Replace `buffer` (of `communication_memory`) by its combination: on `root`, or for None on every rank.

        With a root it is undefined elsewhere.  Where the host takes part, sums of float32 on every rank travel between
        nodes as `wire`: see `mpistrategy.options.CommunicationOptions`.
        """

    def bcast(self, ranks: Ranks, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` on every rank by `root`'s buffer; any dtype."""

    def allgather(self, ranks: Ranks, block: DeviceArray, counts: Sequence[int], target: DeviceArray) -> None:
        """Write the ranks' blocks one after the other, in rank order, into `target` on every rank; any dtype.

        Rank r's block has ``counts[r]`` elements.  The own block may be its part of `target`.
        """
        place = target[own_part(ranks, counts)]
        if place.data.ptr != block.data.ptr:
            place[...] = block

    def free(self) -> None:
        """Free the path's resources, where all ranks are known to do so."""


#: Stands for the path before the ranks have chosen one.
UNCHOSEN = DevicePath()


def chosen_path(communicator: Ranks) -> DevicePath:
    """Return the path of a communicator, which `mpistrategy.mpi.gpu.transports.choice` makes; else `UNCHOSEN`."""
    path: DevicePath = communicator.made.get(DevicePath, UNCHOSEN)
    return path


def communication_memory(cupy: Any, size: int, dtype: np.dtype[Any]) -> DeviceArray:
    """Return an array with undefined values in memory of cudaMalloc, on the current device.

    MPI libraries are slow with managed memory and with CUDA's asynchronous pools, and some fail.  So this memory comes
    from CuPy's default pool, whichever pool the program has chosen; the program shares the default pool.
    """
    # CuPy takes less time for a type than for a dtype, and for arguments by position.
    return cupy.ndarray((size,), dtype.type, cupy.get_default_memory_pool().malloc(max(1, size * dtype.itemsize)))


def own_part(ranks: Ranks, counts: Sequence[int]) -> slice:
    """Return where this rank's block is among all ranks' blocks, of so many elements each."""
    first = sum(counts[: ranks.rank])
    return slice(first, first + counts[ranks.rank])


def first_error(ranks: Ranks, work: Callable[[], str | None]) -> str:
    """Do the work of this rank, which raises or returns an error, or neither.  A barrier.

    Returns the error of the first rank that has one, and all ranks with errors; else "".
    """
    try:
        own_error = work() or ""
    except Exception as error:  # CUDA's, NCCL's or ours
        own_error = f"{type(error).__name__}: {error}"
    errors = ranks.allgather_text(own_error)
    failed_ranks = [rank for rank, error in enumerate(errors) if error]
    return f"{errors[failed_ranks[0]]} ({ranks_in_words(failed_ranks)})" if failed_ranks else ""


# ------------------------------------------------------------------------------------- MIN and MAX of floats


#: By the size of a float: the integers, and the bits of infinity and of NaN.
_BITS: dict[int, tuple[np.dtype[Any], int, int]] = {
    4: (np.dtype(np.int32), 0x7F800000, 0x7FC00000),
    8: (np.dtype(np.int64), 0x7FF0000000000000, 0x7FF8000000000000),
}
#: `most` is the greatest integer: all bits but the sign.
_TO_KEYS = "keys = (bits & most) > infinity ? nan : bits < 0 ? bits ^ most : bits"
_TO_FLOATS = "const T ordered = keys < 0 ? keys ^ most : keys; bits = (ordered & most) > infinity ? nan : ordered"


@contextmanager
def in_order(cupy: Any, buffer: DeviceArray, op: str) -> Iterator[DeviceArray]:
    """Yield the array to combine for a contiguous buffer: its keys, which become floats again, or the buffer itself."""
    if op not in ("MIN", "MAX") or buffer.dtype.kind != "f" or buffer.itemsize not in _BITS:
        yield buffer
        return
    dtype, infinity, nan = _BITS[buffer.itemsize]
    keys, limits = buffer.view(dtype), np.iinfo(dtype)
    to_keys, to_floats = kernels_for(cupy)
    to_keys(keys, limits.max, infinity, limits.min if op == "MIN" else limits.max, keys)
    yield keys
    to_floats(keys, limits.max, infinity, nan, keys)


@lru_cache(maxsize=1)
def kernels_for(cupy: Any) -> tuple[Any, Any]:
    """Return the kernels; to be called before the ranks agree, since it may fail.

    They are compiled for all floats here; for arrays of 2 GiB and more CuPy compiles them at the first such array.
    """
    to_keys = cupy.ElementwiseKernel("T bits, T most, T infinity, T nan", "T keys", _TO_KEYS, "keys_of_floats")
    to_floats = cupy.ElementwiseKernel("T keys, T most, T infinity, T nan", "T bits", _TO_FLOATS, "floats_of_keys")
    for dtype, *_ in _BITS.values():
        number = cupy.zeros(1, dtype)
        to_floats(to_keys(number, 1, 0, 0), 1, 0, 0)
    return to_keys, to_floats
