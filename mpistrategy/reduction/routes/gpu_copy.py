"""Many arrays in GPU memory copied at once, each to a place of its own, and converted on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray, by_value, cupy_for
from mpistrategy.reduction.layout.packing import Pack
from mpistrategy.reduction.routes.copy_kernel import (
    ARRAYS,
    AS_IT_IS,
    BLOCK_BYTES,
    BLOCK_ELEMENTS,
    KINDS,
    MOVES,
    THREADS,
    kernel,
)

#: A longer array is several for the kernel, whose numbers have 32 bits.
LONGEST = 2**27
_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice

#: What the kernel does with an array, how many elements it has, and the sizes of one before and afterwards.
Move = tuple[int, int, int, int]


def move(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
    """Copy each source into its target, which has as many elements, on the current stream of the current device.

    One kernel does it for 162 arrays.  Targets that are not contiguous, and dtypes that do not travel as one another,
    are left to CuPy, one by one.
    """
    moves: list[Move] = []
    chosen: list[tuple[DeviceArray, DeviceArray]] = []
    for source, target in zip(sources, targets, strict=True):
        kind = kind_of(source.dtype, target.dtype)
        if kind is None or not target.flags.c_contiguous:
            target[...] = source.reshape(target.shape)
            continue
        chosen.append((source, target))
        moves.append((kind, source.size, source.dtype.itemsize, target.dtype.itemsize))
    pointers = np.fromiter((target.data.ptr for _, target in chosen), np.uint64, len(chosen))
    if not move_to([source for source, _ in chosen], moves, pointers):
        for source, target in chosen:
            target[...] = source.reshape(target.shape)


def fill(pack: Pack, arrays: Sequence[DeviceArray], bucket: DeviceArray) -> None:
    """Copy the arrays of a pack, which are of its dtype, into `bucket`, on the current stream of the current device."""
    chosen, itemsize = pack.chosen(arrays), pack.dtype.itemsize
    moves = [(AS_IT_IS, each.stop - each.start, itemsize, itemsize) for each in pack.slices]
    pointers = pack.starts * np.uint64(itemsize) + np.uint64(bucket.data.ptr)
    if not move_to(chosen, moves, pointers):
        for array, each in zip(chosen, pack.slices, strict=True):
            bucket[each] = array.ravel()


def move_to(sources: Sequence[DeviceArray], moves: Sequence[Move], pointers: Array) -> bool:
    """Copy each source to a contiguous place, as `moves` says; on the current stream of the current device.

    Args:
        sources: arrays on the current device.
        moves: for each what `kind_of` returned, its size, and the sizes of an element of it and of its target.
        pointers: for each where it goes; uint64.

    Returns:
        False, and nothing has been done, where the kernel cannot be compiled.
    """
    cupy = cupy_for("arrays in GPU memory")
    # Copies that somebody needs to read from here: CuPy's pools give their memory to work that comes later on the
    # stream, so that they can be forgotten once the kernel is on it.
    sources = [each if each.flags.c_contiguous else cupy.ascontiguousarray(each) for each in sources]
    if len(sources) == 1 and moves[0][0] == AS_IT_IS:
        _copy(cupy, sources[0], int(pointers[0]))
        return True
    function = kernel(cupy) if sources else None
    if function is None:
        return not sources
    from_where = np.fromiter((each.data.ptr for each in sources), np.uint64, len(sources))
    for launch in launches(tuple(moves)):
        argument = launch.argument(from_where, pointers)
        function((launch.blocks,), (THREADS,), (argument, np.int32(launch.count)))
    return True


def _copy(cupy: Any, source: DeviceArray, pointer: int) -> None:
    if source.size:
        stream = cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memcpyAsync(pointer, source.data.ptr, source.nbytes, _ON_DEVICE, stream.ptr)


def kind_of(source: np.dtype[Any], target: np.dtype[Any]) -> int | None:
    """Return what the kernel does to make the one dtype of the other; None where it knows no way."""
    return AS_IT_IS if source == target else KINDS.get((source.name, target.name))


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of the kernel: all but the addresses.

    Attributes:
        template: its argument without them.
        count: how many arrays it copies.
        blocks: how many blocks do it.
        arrays: which arrays these are.
        before_source, before_target: how many bytes of each array are left to the calls before.
    """

    template: Array
    count: int
    blocks: int
    arrays: Array
    before_source: Array
    before_target: Array

    def argument(self, sources: Array, targets: Array) -> Array:
        """Return the kernel's argument for all the arrays' addresses."""
        made = self.template.copy()  # ranks that are threads share the template
        made["source"][0, : self.count] = sources[self.arrays] + self.before_source
        made["target"][0, : self.count] = targets[self.arrays] + self.before_target
        return by_value(made)


@lru_cache(maxsize=256)
def launches(moves: tuple[Move, ...]) -> tuple[Launch, ...]:
    """Return the calls of the kernel that make these moves."""
    entries = list(_entries(moves))
    return tuple(_launch(entries[start : start + ARRAYS]) for start in range(0, len(entries), ARRAYS))


def _entries(moves: Sequence[Move]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (index, kind, size, bytes before it in the source, and in the target) for what the kernel sees as one."""
    for index, (kind, count, source_bytes, target_bytes) in enumerate(moves):
        if kind == AS_IT_IS:
            count, source_bytes, target_bytes = count * source_bytes, 1, 1
        for start in range(0, count, LONGEST):
            yield index, kind, min(LONGEST, count - start), start * source_bytes, start * target_bytes


def _launch(entries: Sequence[tuple[int, int, int, int, int]]) -> Launch:
    template = np.zeros(1, MOVES)
    index, kind, size, before_source, before_target = np.array(entries, np.int64).T
    blocks = -(-size // np.where(kind == AS_IT_IS, BLOCK_BYTES, BLOCK_ELEMENTS))
    count = len(entries)
    template["size"][0, :count] = size
    template["kind"][0, :count] = kind
    template["first"][0, :count] = np.cumsum(blocks) - blocks
    return Launch(
        template, count, int(blocks.sum()), index, before_source.astype(np.uint64), before_target.astype(np.uint64)
    )
