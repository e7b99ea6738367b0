"""bfloat16 between nodes: half the bytes on the link, sums in float32.

Each node's contribution is rounded to bfloat16 once, the contributions are added up in float32, and the sum is rounded
once; what comes out is the same on every rank.  With u = 2^-8, s_n the sum over the ranks of node n and S the sum of
the s_n, the result differs from S by no more than

    (2 u + u^2) (|s_1| + |s_2| + ...)

and float32's own rounding of the additions; what is below 2^-126 by 2^-134 for each node, and once more, instead.
A magnitude of about 3.39e38 or more, of a node's contribution or of the sum, becomes infinite.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import OptionError
from mpistrategy.mpi.multi_node.pairwise import Link, Space, Steps, blocks_of, reduce_pairwise


@cache
def bfloat16() -> np.dtype[Any]:
    """Return the dtype, of ml_dtypes.

    Raises:
        OptionError: where that is not installed.
    """
    try:
        import ml_dtypes  # an optional extra, and only this wire needs it
    except ImportError as error:
        raise OptionError.at(
            "CommunicationOptions",
            found='wire="bfloat16" without the package ml_dtypes',
            expected="ml_dtypes on every rank",
            fix="Install it: pip install 'mpistrategy[bfloat16]'.",
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def travels(dtype: np.dtype[Any], op: str) -> bool:
    """Return whether a buffer of this dtype is rounded under this operation: float32 sums only."""
    return dtype == np.float32 and op == "SUM"


def rounded(values: Array) -> Array:
    """Round float32 `values` to what bfloat16 can say, in place, and return them."""
    values[...] = values.astype(bfloat16())
    return values


def halved(link: Link, source: Array, target: Array, tag: int, space: Space) -> Steps:
    """Do what `pairwise.exact` does for a float32 sum, with bfloat16 on the wire."""
    sent = space.take(source.size, bfloat16())
    sent[...] = source
    blocks = blocks_of(sent, link.size)

    def add_up(parts: list[Array]) -> None:
        own = blocks[link.rank]
        total, part = space.take(own.size, source.dtype), space.take(own.size, source.dtype)
        total[...] = parts[0]
        for one in parts[1:]:
            part[...] = one
            total += part
        own[...] = total

    yield from reduce_pairwise(link, blocks, blocks, add_up, tag, space)
    target[...] = sent
