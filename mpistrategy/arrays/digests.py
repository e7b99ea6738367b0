"""Digests of arrays: ranks compare them in place of the arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.objects.shown import ranks_by, ranks_in_words

#: An x87 extended double uses 10 of its 12 or 16 bytes; the others are undefined.
_X87_BYTES, _X87_DIGITS = 10, 63


def digest(array: Array) -> int:
    """Return a 64-bit digest of a C-contiguous array, without padding bytes, which are undefined."""
    import hashlib  # here, since it loads OpenSSL: `import mpistrategy` stays quick

    hasher = hashlib.blake2b(digest_size=8)
    for piece in _pieces(array.reshape(-1)):
        hasher.update(piece.data)
    return int.from_bytes(hasher.digest(), "little")


def _pieces(array: Array) -> Iterator[Array]:
    """Yield the bytes of an array; a view of it where it is contiguous and without padding."""
    dtype = array.dtype
    if dtype.names is not None:
        for name in dtype.names:
            yield from _pieces(array[name])
        return
    piece = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if dtype.char in "gG" and np.finfo(dtype).nmant == _X87_DIGITS:
        width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        piece = np.ascontiguousarray(piece.reshape(-1, width)[:, :_X87_BYTES])
    yield piece


def outliers(digests: Sequence[object]) -> tuple[list[int], str]:
    """Return the ranks that differ from more than half of all ranks, else from rank 0; and a text that says so.

    Args:
        digests: the digests of all ranks, in rank order; not all equal.
    """
    groups = ranks_by(digests)
    most = max(groups.values(), key=len)
    usual = most if 2 * len(most) > len(digests) else groups[digests[0]]
    differing = [rank for rank in range(len(digests)) if rank not in usual]
    ways = f", in {len(groups) - 1} ways" if len(groups) > 2 else ""
    return (
        differing,
        f"{ranks_in_words(differing)} differ{'s' if len(differing) == 1 else ''} from {ranks_in_words(usual)}{ways}",
    )
