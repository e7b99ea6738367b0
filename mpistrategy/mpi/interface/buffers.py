"""Buffers in pieces that MPI can count, and what is made once for a communicator.

One MPI call gets at most 2^30 elements; dtypes that MPI does not know travel as bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
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


class Freed(ABC):
    """What a communicator must free that has made it once."""

    @abstractmethod
    def free(self) -> None:
        """Free it, where all ranks are known to do so."""


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
        """Free all that is `Freed`, the last made first, where all ranks are known to do so."""
        while self.made:
            _, made = self.made.popitem()
            if isinstance(made, Freed):
                made.free()


def as_bytes(buffer: Array) -> Array:
    """Return a flat uint8 view of a contiguous buffer of any dtype."""
    return buffer.reshape(-1).view(np.uint8)


def put(buffer: Array, source: Array) -> None:
    """Copy an array into another one of as many elements, unless both are the same memory."""
    if source is not buffer and not (source.flags.c_contiguous and source.ctypes.data == buffer.ctypes.data):
        buffer[...] = source.reshape(buffer.shape)
