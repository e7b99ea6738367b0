"""Many arrays in GPU memory copied at once, each to a place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray, by_value, cupy_for
from mpistrategy.reduction.layout.packing import Pack
from mpistrategy.reduction.routes.copy_kernel import ARRAYS, BLOCK_BYTES, MOVES, THREADS, kernel

#: Longer arrays are copied one by one: the kernel's numbers have 32 bits, and one launch more is nothing then.
LONGEST = 2**27
_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice


def move(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
    """Copy each source into its target, which has as many elements, on the current stream of the current device.

    One kernel does it for 170 arrays.  Targets that are not contiguous, or of another dtype, are left to CuPy, one by
    one.
    """
    plain = []
    for source, target in zip(sources, targets, strict=True):
        if source.dtype == target.dtype and target.flags.c_contiguous:
            plain.append((source, target.data.ptr))
        else:
            target[...] = source.reshape(target.shape)
    _copy([source for source, _ in plain], [place for _, place in plain])


def fill(pack: Pack, arrays: Sequence[DeviceArray], bucket: DeviceArray) -> None:
    """Copy the arrays of a pack, which are of its dtype, into `bucket`, on the current stream of the current device."""
    places = pack.starts * np.uint64(pack.dtype.itemsize) + np.uint64(bucket.data.ptr)
    _copy(pack.chosen(arrays), places.tolist())


def _copy(sources: Sequence[DeviceArray], places: Sequence[int]) -> None:
    """Copy each source, which is on the current device, to a contiguous place, on its current stream."""
    cupy, one_by_one = cupy_for("arrays in GPU memory"), len(sources) == 1
    # Copies that somebody needs to read from here: CuPy's pools give their memory to work that comes later on the
    # stream, so that they can be forgotten once the kernel is on it.
    sources = [each if each.flags.c_contiguous else cupy.ascontiguousarray(each) for each in sources]
    moves = []
    for source, place in zip(sources, places, strict=True):
        nbytes = source.nbytes
        if nbytes and (one_by_one or nbytes > LONGEST):
            cupy.cuda.runtime.memcpyAsync(
                place, source.data.ptr, nbytes, _ON_DEVICE, cupy.cuda.get_current_stream().ptr
            )
        elif nbytes:
            moves.append((source.data.ptr, place, nbytes))
    for start in range(0, len(moves), ARRAYS):
        argument, blocks, count = launch(moves[start : start + ARRAYS])
        kernel(cupy)((blocks,), (THREADS,), (by_value(argument), np.int32(count)))


def launch(moves: Sequence[tuple[int, int, int]]) -> tuple[Array, int, int]:
    """Return the kernel's argument, how many blocks it takes, and how many copies these are.

    Args:
        moves: from where, to where, and how many bytes; at most `ARRAYS`.
    """
    from_where, to_where, sizes = zip(*moves, strict=True)
    template, blocks = _template(sizes)
    argument, count = template.copy(), len(moves)  # ranks that are threads share the template
    argument["source"][0, :count] = from_where
    argument["target"][0, :count] = to_where
    return argument, blocks, count


@lru_cache(maxsize=256)
def _template(sizes: tuple[int, ...]) -> tuple[Array, int]:
    """Return the kernel's argument for arrays of so many bytes, without addresses; and how many blocks it takes."""
    template = np.zeros(1, MOVES)
    blocks = -(-np.array(sizes, np.int64) // BLOCK_BYTES)
    template["size"][0, : len(sizes)] = sizes
    template["first"][0, : len(sizes)] = np.cumsum(blocks) - blocks
    return template, int(blocks.sum())
