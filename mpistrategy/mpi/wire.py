"""bfloat16 between nodes: half the bytes on the link, sums in float32.

Each node's contribution is rounded to bfloat16 once, the contributions are added up in float32, and the result is
rounded once; what comes out is the same on every rank.  With u = 2^-8, s_n the sum over the ranks of node n and S the
sum of the s_n, the result differs from S by no more than

    (2 u + u^2) (|s_1| + |s_2| + ...)

and float32's own rounding of the additions; for values below 2^-126 by 2^-133 for each node on top.  A magnitude of
3.4e38 or more, of a node's contribution or of the sum, becomes infinite.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpistrategy.arrays import Array
from mpistrategy.mpi.exchange import Link, Request, Steps, borders_of, everyone_else


@cache
def bfloat16() -> np.dtype[Any]:
    """Return the dtype; imports ml_dtypes."""
    import ml_dtypes  # an optional extra

    return np.dtype(ml_dtypes.bfloat16)


def travels(dtype: np.dtype[Any], op: str) -> bool:
    """Return whether a buffer of this dtype is rounded under this operation: float32 sums only."""
    return dtype == np.float32 and op == "SUM"


def rounded(values: Array) -> Array:
    """Round float32 `values` to what bfloat16 can say, in place, and return them."""
    values[...] = values.astype(bfloat16())
    return values


def halved(link: Link, piece: Array, tag: int) -> Steps:
    """Do what `exchange.exact` does for a float32 sum, with bfloat16 on the wire."""
    me = link.rank
    borders = borders_of(piece.size, link.size, piece.itemsize)
    sent = piece.astype(bfloat16())
    blocks = [sent[begin:end] for begin, end in borders]
    begin, end = borders[me]
    own, total = blocks[me], piece[begin:end]
    others = [rank for rank in everyone_else(link) if blocks[rank].size]
    parts: list[Array] = [own] * link.size
    messages: list[Request] = []
    if own.size:
        for rank in everyone_else(link):
            parts[rank] = np.empty_like(own)
            messages.append(link.irecv(parts[rank], rank, tag))
    messages += [link.isend(blocks[rank], rank, tag) for rank in others]
    yield messages
    if own.size:
        total[...] = parts[0]
        for part in parts[1:]:
            np.add(total, part.astype(np.float32), out=total)
        own[...] = total
        total[...] = own
    messages = [link.irecv(blocks[rank], rank, tag + 1) for rank in others]
    if own.size:
        messages += [link.isend(own, rank, tag + 1) for rank in everyone_else(link)]
    yield messages
    for rank in others:
        piece[slice(*borders[rank])] = blocks[rank]
