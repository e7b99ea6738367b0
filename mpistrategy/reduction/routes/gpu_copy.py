"""Many arrays in GPU memory copied at once, each to a place of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray, by_value, cupy_for
from mpistrategy.reduction.layout.packing import Pack
from mpistrategy.reduction.routes.copy_kernel import ARRAYS, BLOCK_BYTES, MOVES, THREADS, kernel

#: A longer array is several for the kernel, whose numbers have 32 bits.
LONGEST = 2**27
_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice


def move(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
    """Copy each source into its target, which has as many elements, on the current stream of the current device.

    One kernel does it for 170 arrays.  Targets that are not contiguous, or of another dtype, are left to CuPy, one by
    one.
    """
    pairs = list(zip(sources, targets, strict=True))
    alike = [source.dtype == target.dtype and target.flags.c_contiguous for source, target in pairs]
    if not all(alike):
        for (source, target), is_plain in zip(pairs, alike, strict=True):
            if not is_plain:
                target[...] = source.reshape(target.shape)
        pairs = [pair for pair, is_plain in zip(pairs, alike, strict=True) if is_plain]
    places = np.array([target.data.ptr for _, target in pairs], np.uint64)
    _copy([source for source, _ in pairs], places)


def fill(pack: Pack, arrays: Sequence[DeviceArray], bucket: DeviceArray) -> None:
    """Copy the arrays of a pack, which are of its dtype, into `bucket`, on the current stream of the current device."""
    _copy(pack.chosen(arrays), pack.starts * np.uint64(pack.dtype.itemsize) + np.uint64(bucket.data.ptr))


def _copy(sources: Sequence[DeviceArray], places: Array) -> None:
    """Copy each source to a contiguous place, on the current stream of the current device.

    Args:
        sources: arrays on the current device.
        places: the address where each goes; uint64.
    """
    cupy = cupy_for("arrays in GPU memory")
    # Copies that somebody needs to read from here: CuPy's pools give their memory to work that comes later on the
    # stream, so that they can be forgotten once the kernel is on it.
    sources = [each if each.flags.c_contiguous else cupy.ascontiguousarray(each) for each in sources]
    if len(sources) == 1:
        (source,) = sources
        if source.size:
            stream = cupy.cuda.get_current_stream()
            cupy.cuda.runtime.memcpyAsync(int(places[0]), source.data.ptr, source.nbytes, _ON_DEVICE, stream.ptr)
        return
    from_where = np.array([each.data.ptr for each in sources], np.uint64)
    for launch in launches(tuple([each.nbytes for each in sources])):
        argument = launch.argument(from_where, places)
        kernel(cupy)((launch.blocks,), (THREADS,), (argument, np.int32(launch.count)))


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of the kernel: all but the addresses.

    Attributes:
        template: its argument without them.
        count: how many arrays it copies.
        blocks: how many blocks do it.
        arrays: which arrays these are.
        before: how many bytes of each array are left to the calls before.
    """

    template: Array
    count: int
    blocks: int
    arrays: Array
    before: Array

    def argument(self, sources: Array, targets: Array) -> Array:
        """Return the kernel's argument for all the arrays' addresses."""
        made = self.template.copy()  # ranks that are threads share the template
        made["source"][0, : self.count] = sources[self.arrays] + self.before
        made["target"][0, : self.count] = targets[self.arrays] + self.before
        return by_value(made)


@lru_cache(maxsize=256)
def launches(sizes: tuple[int, ...]) -> tuple[Launch, ...]:
    """Return the calls of the kernel that copy arrays of so many bytes."""
    entries = list(_entries(sizes))
    return tuple(_launch(entries[start : start + ARRAYS]) for start in range(0, len(entries), ARRAYS))


def _entries(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index, bytes, bytes before them) for what the kernel sees as one array."""
    for index, nbytes in enumerate(sizes):
        for start in range(0, nbytes, LONGEST):
            yield index, min(LONGEST, nbytes - start), start


def _launch(entries: Sequence[tuple[int, int, int]]) -> Launch:
    template = np.zeros(1, MOVES)
    index, size, before = np.array(entries, np.int64).T
    blocks = -(-size // BLOCK_BYTES)
    count = len(entries)
    template["size"][0, :count] = size
    template["first"][0, :count] = np.cumsum(blocks) - blocks
    return Launch(template, count, int(blocks.sum()), index, before.astype(np.uint64))
