"""Sums that show whether MPI's Allreduce gives all ranks the same bits, since MPI does not promise it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array

#: A few elements, and so many that every MPI takes the algorithm of its large messages.
COUNTS = (5, 2**15)
_EXPONENTS = 20


def digest_of_sums(
    allreduce: Callable[[Array], None], rank: int, counts: Sequence[int] = COUNTS, dtype: Any = np.float32
) -> int:
    """Return a digest, below 2**62, of sums over the ranks that depend on the order of the additions.

    Args:
        allreduce: replaces an array by its sum over the ranks.  Collective.
        rank: this rank's number.
        counts: how many elements the arrays have.
        dtype: of the arrays.
    """
    import hashlib  # here, since it loads OpenSSL and would slow `import mpistrategy`

    found = hashlib.blake2b(digest_size=8)
    random = np.random.default_rng(rank)
    for count in counts:
        values = random.standard_normal(count) * np.exp2(random.integers(-_EXPONENTS, _EXPONENTS, count))
        summed = values.astype(dtype)
        allreduce(summed)
        found.update(summed.tobytes())
    return int.from_bytes(found.digest(), "little") >> 2
