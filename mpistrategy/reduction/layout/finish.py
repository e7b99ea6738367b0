"""From a sum to the result: the division of MEAN, weights, and the one rounding of the 16-bit floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import any_array, is_on_device
from mpistrategy.arrays.dtypes import Array, divide_by, mean_dtype, wire_dtype
from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.options import ReduceOp


def divisor_of(dtype: np.dtype[Any], op: ReduceOp, count: int) -> int:
    """Return what a route divides sums of this dtype of the wire by: means of integers have another dtype."""
    return count if op is ReduceOp.MEAN and dtype.kind not in "iu" else 1


def finish(total: Array, dtype: np.dtype[Any], op: ReduceOp, count: int) -> Array:
    """Turn a sum in the wire dtype into the result: divide for MEAN, and round once to the result's dtype."""
    if op is ReduceOp.MEAN:
        return rounded(divide(wrapped(total, dtype), count), mean_dtype(dtype))
    return rounded(wrapped(total, dtype), dtype)


def wrapped(total: Array, dtype: np.dtype[Any]) -> Array:
    """Return an integer sum in its own dtype, wrapped around as NumPy does; other sums as they are."""
    return total.astype(dtype, copy=False) if dtype.kind in "iu" else total


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


class WeightedMean:
    """The mean of the replicas' values, each with a weight of its replica: sum(w x) / sum(w).

    A replica with weight 0 contributes nothing, whatever its values are (the mean of no rows is NaN, say).  What meets
    the values are the weights times one power of two, so that their sum is less than 1 and not less than 1/2: they may
    be larger and smaller than a number of the values' dtype, and no sum overflows whose mean does not.

    Args:
        weight: this rank's weight, a finite number that is not negative; usually its number of rows.
        op: must be MEAN.
        where: the public name to blame in the error.

    Raises:
        OptionError: for another op, and for a weight that is negative or not finite.
        OptionTypeError: for a weight that is no number.
    """

    def __init__(self, weight: Any, op: ReduceOp, where: str) -> None:
        if op is not ReduceOp.MEAN:
            raise OptionError.at(where, found=f"weight= with {op.name}", expected="weight= with MEAN")
        try:
            array = np.asarray(weight)
        except (TypeError, ValueError):  # a ragged list, say
            array = np.empty(1)
        if array.ndim != 0 or array.dtype.kind not in "iuf":
            raise OptionTypeError.at(where, found=f"weight={weight!r}", expected="a number")
        #: This rank's weight.
        self.weight = float(array)
        if not (np.isfinite(self.weight) and self.weight >= 0):
            raise OptionError.at(where, found=f"weight={weight!r}", expected="a finite number that is not negative")

    def contributions(self, arrays: Sequence[Array], weights: Array) -> list[Array]:
        """Return what this rank adds, to be summed: its values times its weight.

        Args:
            arrays: its values.
            weights: those of all ranks, as float64.
        """
        _, exponent = math.frexp(weights.max(initial=0))
        total = math.fsum(math.ldexp(weight, -exponent) for weight in weights)
        _, more = math.frexp(total)
        self._total, self._factor = math.ldexp(total, -more), math.ldexp(self.weight, -exponent - more)
        with np.errstate(all="ignore"):
            return [*map(self._times_weight, arrays)]

    def _times_weight(self, array: Array) -> Array:
        dtype = wire_dtype(mean_dtype(array.dtype))
        if self.weight == 0:
            return np.zeros_like(array, dtype=dtype)
        factor = dtype.type(self._factor)
        if float(factor.real) == self._factor:  # as of numbers of rows
            return any_array(np.multiply(array, factor, dtype=dtype))
        wide = np.result_type(dtype, np.float64)
        product: Array
        if is_on_device(array):
            product = np.multiply(array, wide.type(self._factor), dtype=wide).astype(dtype)
        else:  # rounded as it is written: no array of the wide dtype is made
            product = np.multiply(array, wide.type(self._factor), out=np.empty(array.shape, dtype), dtype=wide)
        return product

    def finish(self, totals: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        """Turn the sums of `contributions` into the means; NaN where all weights are 0."""
        with np.errstate(all="ignore"):
            return [
                divide(total, self._total).astype(mean_dtype(array.dtype), copy=False)
                for total, array in zip(totals, arrays, strict=True)
            ]
