"""From a sum to the result: the division of MEAN, and the one rounding of the 16-bit floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays import Array, mean_dtype
from mpistrategy.options import ReduceOp


def finish(total: Array, dtype: np.dtype[Any], op: ReduceOp, count: int) -> Array:
    """Turn a sum in the wire dtype into the result: divide for MEAN, and round once to the result's dtype."""
    if op is ReduceOp.MEAN:
        dtype = mean_dtype(dtype)
        total = divide(total, count)
    if total.dtype == dtype:
        return total
    with np.errstate(over="ignore"):
        return total.astype(dtype)


def divide(total: Array, count: int | float) -> Array:
    """Return ``total / count`` in the dtype of a mean; in place where it is the same dtype."""
    target = mean_dtype(total.dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        if target == total.dtype:
            np.true_divide(total, total.dtype.type(count), out=total)
            return total
        return np.true_divide(total, count, dtype=np.float64).astype(target, copy=False)
