"""From a sum to the result: the division of MEAN, weights, and the one rounding of the 16-bit floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, divide_by, mean_dtype
from mpistrategy.options import ReduceOp


def finish(total: Array, dtype: np.dtype[Any], op: ReduceOp, count: int) -> Array:
    """Turn a sum in the wire dtype into the result: divide for MEAN, and round once to the result's dtype.

    Sums of integers wrap around, as NumPy's do.
    """
    if op is ReduceOp.MEAN:
        return rounded(divide(total, count), mean_dtype(dtype))
    return rounded(total, dtype)


def rounded(result: Array, dtype: np.dtype[Any]) -> Array:
    """Return `result` in `dtype`; no copy where it is that already."""
    with np.errstate(all="ignore"):
        return result.astype(dtype, copy=False)


def divide(total: Array, count: int | float) -> Array:
    """Return ``total / count`` in the dtype of a mean; in place where it is the same dtype."""
    target = mean_dtype(total.dtype)
    with np.errstate(all="ignore"):
        if target == total.dtype:
            divide_by(count, total)
            return total
        if is_on_device(total):
            quotient: Array = np.true_divide(total, count, dtype=np.float64).astype(target, copy=False)
            return quotient
        # Divided in float64 and rounded as it is written: no array of that dtype is made.
        return np.true_divide(total, np.float64(count), out=np.empty(total.shape, target))
