"""Whether all ranks get the same bits of a sum by MPI, which MPI does not promise: what is tried, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array

#: A few elements, and so many that every MPI takes the algorithm of its large messages.
COUNTS = (5, 2**15)
_EXPONENTS = 20


def values_to_try(rank: int, counts: Sequence[int] = COUNTS, dtype: Any = np.float32) -> list[Array]:
    """Return this rank's arrays, of so many elements, for sums that depend on the order of the additions."""
    random = np.random.default_rng(rank)
    return [
        (random.standard_normal(count) * np.exp2(random.integers(-_EXPONENTS, _EXPONENTS, count))).astype(dtype)
        for count in counts
    ]


def digest_of(sums: Iterable[Array]) -> int:
    """Return a digest of arrays, below 2**62."""
    found = hashlib.blake2b(digest_size=8)
    for each in sums:
        found.update(each.data)
    return int.from_bytes(found.digest(), "little") >> 2
