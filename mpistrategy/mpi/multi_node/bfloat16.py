"""bfloat16 between nodes: half the bytes on the link, sums in float32.

Each node's contribution is rounded to bfloat16 once, the contributions are added up in float32, and the sum is rounded
once; all ranks get the same result.  With u = 2^-8, s_n the sum over the ranks of node n and S the sum of the s_n, the
result differs from S by no more than

    (2 u + u^2) (|s_1| + |s_2| + ...)

plus float32's own rounding of the additions.  For values below 2^-126 each rounding errs by up to 2^-134 instead.
A magnitude of about 3.39e38 or more, of a node's contribution or of the sum, becomes infinite.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import OptionError


@cache
def bfloat16() -> np.dtype[Any]:
    """Return the dtype of ml_dtypes.

    Raises:
        OptionError: where ml_dtypes is not installed.
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
    """Round float32 `values` to bfloat16 in place, and return them."""
    values[...] = values.astype(bfloat16())
    return values
