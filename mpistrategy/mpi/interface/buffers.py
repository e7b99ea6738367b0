"""Buffers in pieces that MPI can count, and what a communicator keeps: memory for results, and what is made once.

One MPI call gets at most 2^30 elements; dtypes that MPI does not know travel as bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Hashable, Iterator
from math import prod
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from mpistrategy.arrays.dtypes import Array

T = TypeVar("T")

#: Open MPI 5.0 refuses counts of 2^31 and more; MPICH takes them.  A power of two keeps every piece aligned.
MAX_COUNT = 2**30


def pieces(buffer: Array, max_count: int = MAX_COUNT) -> Iterator[Array]:
    """Yield `buffer`, which must be contiguous, as flat views of at most `max_count` elements; nothing when empty."""
    flat = buffer.reshape(-1)
    for start in range(0, flat.size, max_count):
        yield flat[start : start + max_count]


class Once:
    """What is made once for a communicator, by whoever needs it first, and kept for all.

    Attributes:
        made: what there is so far, by key.
    """

    def __init__(self) -> None:
        self.made: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what belongs to `key`; call `make` for it the first time."""
        if key not in self.made:
            self.made[key] = make()
        found: T = self.made[key]
        return found

    def free(self) -> None:
        """Call the `free()` of all that have one, the last made first, where all ranks are known to do so."""
        while self.made:
            _, made = self.made.popitem()
            if hasattr(type(made), "free"):
                made.free()


#: Smaller results are new memory each time.
LEAST_POOLED = 64 * 2**10


class Pool:
    """Memory for results that is used again when nobody holds it: new pages cost more than a reduction.

    A result is a view of a block.  In NumPy a view of a view refers to the block itself, so a block is free if only the
    pool refers to it.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[list[Any]]] = {}
        self._bytes = 0
        self._taken = 0
        self._tidy_at = _KEPT_FOR

    def take(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return an array whose values are undefined."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LEAST_POOLED:
            return np.empty(shape, dtype)
        self._taken += 1
        entries = self._blocks.setdefault(nbytes, [])
        for entry in entries:
            if sys.getrefcount(entry[0]) == _FREE:
                entry[1] = self._taken
                return np.ndarray(shape, dtype, entry[0])
        if self._taken > self._tidy_at or self._bytes > _MOST_FREE_BYTES:
            self._tidy()
        block = _new_block(nbytes)
        self._bytes += nbytes
        self._blocks.setdefault(nbytes, []).append([block, self._taken])
        return np.ndarray(shape, dtype, block)

    def forget(self, nbytes: int) -> None:
        """Drop the free blocks of this size: such results are kept elsewhere from now on."""
        entries = self._blocks.pop(nbytes, [])
        kept = [entry for entry in entries if sys.getrefcount(entry[0]) != _FREE]
        self._bytes -= nbytes * (len(entries) - len(kept))
        if kept:
            self._blocks[nbytes] = kept

    def clear(self) -> None:
        """Drop all blocks; those in use stay alive with their views."""
        self._blocks.clear()
        self._bytes = 0

    def _tidy(self) -> None:
        """Drop blocks that were not used for long, and the oldest if too much memory is free."""
        long_ago, self._tidy_at = self._taken - _KEPT_FOR, self._taken + _KEPT_FOR
        latest_first = sorted((e for same in self._blocks.values() for e in same), key=itemgetter(1), reverse=True)
        self._blocks.clear()
        self._bytes = free = 0
        for entry in latest_first:
            nbytes = entry[0].nbytes
            is_free = sys.getrefcount(entry[0]) == _FREE
            free += nbytes * is_free
            if entry[1] > long_ago and not (is_free and free > _MOST_FREE_BYTES):
                self._blocks.setdefault(nbytes, []).append(entry)
                self._bytes += nbytes


_HUGE_PAGE = 2**21


def _new_block(nbytes: int) -> Array:
    """Return new memory that is no view of another array; of huge pages where it fills any.

    What a process has freed before is often of small pages.  8 nodes of one rank, wall time over a bare Allreduce, with
    such memory and with huge pages: 4 MiB 1.15 and 0.85, 16 MiB 1.4 and 1.0.
    """
    huge = nbytes // _HUGE_PAGE * _HUGE_PAGE
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages, or no memory: NumPy says so
            memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE
            memory.madvise(mmap.MADV_HUGEPAGE, start, huge)
            return np.frombuffer(memoryview(memory)[start : start + nbytes], np.uint8)
    return np.empty(nbytes, np.uint8)


#: How many bytes may stay free when a new size is wanted: arrays of ever new sizes must not pile up.
_MOST_FREE_BYTES = 2**28
_KEPT_FOR = 4096  # results since a block was last used


def _count_of_free_block() -> int:
    entry = [np.empty(0, np.uint8), 0]
    return sys.getrefcount(entry[0])


_FREE = _count_of_free_block()


def as_bytes(buffer: Array) -> Array:
    """Return a flat uint8 view of a contiguous buffer of any dtype."""
    return buffer.reshape(-1).view(np.uint8)
