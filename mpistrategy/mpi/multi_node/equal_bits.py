"""A check that MPI's Allreduce gives all ranks the same bits, since MPI does not promise it: once for each route."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrategy.arrays.dtypes import Array

#: A few elements, and so many that every MPI takes the algorithm of its large messages.
_COUNTS = (5, 2**15)
_EXPONENTS = 20


def digest_of_sums(allreduce: Callable[[Array], None], rank: int) -> int:
    """Return a digest, below 2**62, of sums over the ranks that depend on the order of the additions.

    Args:
        allreduce: replaces an array by its sum over the ranks.  Collective.
        rank: this rank's number.
    """
    import hashlib  # here, since it loads OpenSSL and would slow `import mpistrategy`

    found = hashlib.blake2b(digest_size=8)
    random = np.random.default_rng(rank)
    for count in _COUNTS:
        values = random.standard_normal(count) * np.exp2(random.integers(-_EXPONENTS, _EXPONENTS, count))
        single = values.astype(np.float32)
        allreduce(single)
        found.update(single.tobytes())
    return int.from_bytes(found.digest(), "little") >> 2
