"""Pieces that MPI can count: at most 2^30 elements a call, as bytes where MPI has no datatype."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpistrategy.arrays import Array

#: Open MPI 5.0 refuses counts of 2^31 and more; MPICH takes them.  A power of two keeps every piece aligned.
MAX_COUNT = 2**30


def pieces(buffer: Array, max_count: int = MAX_COUNT) -> Iterator[Array]:
    """Yield `buffer`, which must be contiguous, as flat views of at most `max_count` elements; nothing when empty."""
    flat = buffer.reshape(-1)
    for start in range(0, flat.size, max_count):
        yield flat[start : start + max_count]


def as_bytes(buffer: Array) -> Array:
    """Return a flat uint8 view of a contiguous buffer of any dtype."""
    return buffer.reshape(-1).view(np.uint8)
