"""From a sum to the result: the division of MEAN, and the one rounding of the 16-bit floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, divide_by, mean_dtype, quietly
from mpistrategy.options import ReduceOp


def finish(total: Array, dtype: np.dtype[Any], op: ReduceOp, count: int, out: Array | None = None) -> Array:
    """Turn a sum in the wire dtype into the result: divide for MEAN, and round once to the result's dtype.

    Sums of integers wrap around, as NumPy's do.  On the host the result is written into `out`, if given: an array of
    the result's dtype and shape.
    """
    if op is ReduceOp.MEAN:
        return rounded(divide(total, count, out), mean_dtype(dtype), out)
    return rounded(total, dtype, out)


@quietly
def rounded(result: Array, dtype: np.dtype[Any], out: Array | None = None) -> Array:
    """Return `result` in `dtype`, in `out` if given; else no copy where it is that already."""
    if out is None:
        return result.astype(dtype, copy=False)
    if out is not result:
        np.copyto(out, result, casting="unsafe")
    return out


@quietly
def divide(total: Array, count: int | float, out: Array | None = None) -> Array:
    """Return ``total / count`` in the dtype of a mean: in place where it is the same dtype, else in `out` if given."""
    target = mean_dtype(total.dtype)
    if target == total.dtype:
        divide_by(count, total)
        return total
    if is_on_device(total):
        quotient: Array = np.true_divide(total, count, dtype=np.float64).astype(target, copy=False)
        return quotient
    # Divided in float64 and rounded as it is written: no array of that dtype is made.
    return np.true_divide(total, np.float64(count), out=np.empty(total.shape, target) if out is None else out)
