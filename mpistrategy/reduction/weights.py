"""Means of values that count differently: sum(w x) / sum(w).

A replica with weight 0 contributes nothing, whatever its values are (the mean of no rows is NaN, say).  The values are
multiplied by the weights times one power of two, so that the sum of the weights is less than 1 and not less than 1/2.
Weights may thus be larger or smaller than any number of the values' dtype, and no sum overflows whose mean does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, mean_dtype, quietly, wire_dtype
from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import divide, rounded
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.plan import NestPlan, NumbersOfRanks, Plan
from mpistrategy.reduction.routes.base import Targets, Transfer
from mpistrategy.reduction.routes.with_the_check import MailboxArrays, MailboxRoute

#: The operation, as the ranks compare it.
WEIGHTED = "weighted MEAN"
_WEIGHT: Layout = (np.dtype(np.float64), ())


def checked_weight(weight: Any, op: ReduceOp, where: str) -> float:
    """Return this rank's weight; usually its number of rows.

    Raises:
        OptionError: for another operation than MEAN, and for a weight that is negative or not finite.
        OptionTypeError: for a weight that is not a number.
    """
    if op is not ReduceOp.MEAN:
        raise OptionError.at(where, found=f"weight= with {op.name}", expected="weight= with MEAN")
    try:
        array = np.asarray(weight)
    except (TypeError, ValueError):  # a ragged list, say
        array = np.empty(1)
    if array.ndim != 0 or array.dtype.kind not in "iuf":
        raise OptionTypeError.at(where, found=f"weight={weight!r}", expected="a number")
    number = float(array)
    if not (math.isfinite(number) and number >= 0):
        raise OptionError.at(where, found=f"weight={weight!r}", expected="a finite number that is not negative")
    return number


def normalized(weights: Sequence[float]) -> tuple[list[float], float]:
    """Return the ranks' weights times one power of two, and their sum, which is less than 1 and not less than 1/2."""
    _, exponent = math.frexp(max(weights))
    total = math.fsum([math.ldexp(weight, -exponent) for weight in weights])
    _, shift = math.frexp(total)
    return [math.ldexp(weight, -exponent - shift) for weight in weights], math.ldexp(total, -shift)


def product(array: Array, dtype: np.dtype[Any], weight: float, factor: float) -> Array:
    """Return this rank's summand, in the `dtype_of_products`: its values times its normalized weight, `factor`."""
    if weight == 0:
        return np.zeros_like(array, dtype)
    # A factor with more digits than the dtype has, unlike most numbers of rows, meets the values in float64.
    is_exact = float(dtype.type(factor).real) == factor
    meeting = dtype if is_exact else np.result_type(dtype, np.float64)
    products: Array = np.multiply(array, meeting.type(factor), dtype=meeting)
    return products.astype(dtype, copy=False)


def dtype_of_products(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values times weights are summed.  For integers: float64, which no wire= rounds."""
    return np.dtype(np.float64) if dtype.kind in "iu" else wire_dtype(dtype)


def sums_of(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Return the layouts of the products, which are summed."""
    return tuple((dtype_of_products(dtype), shape) for dtype, shape in layouts)


class WeightedMeans(Transfer):
    """The weighted means of arrays; the first array of `bring` and `run` is this rank's weight.

    On a node small arrays lie in the mailboxes, beside the weight and the check of the call, and each rank adds up the
    arrays of all ranks in float64.  Else the ranks learn the weights with the check, and then add up the products.

    Args:
        ranks: the ranks that take part.
        layouts: dtype and shape of each array.
        sums: adds up the products.
    """

    def __init__(self, ranks: Ranks, layouts: tuple[Layout, ...], sums: Transfer) -> None:
        self._ranks, self._sums = ranks, sums
        self.layouts = layouts
        self.results: list[np.dtype[Any]] = [mean_dtype(dtype) for dtype, _ in layouts]
        self._dtypes = [dtype_of_products(dtype) for dtype, _ in layouts]
        self._weights = NumbersOfRanks(ranks, 1)
        self._in_mailboxes: MailboxArrays | None = None
        # Other routes keep the algorithm's own order of additions: the order of the values, say.
        boxes = ranks.mailboxes if isinstance(sums, Plan) and isinstance(sums.route, MailboxRoute) else None
        if boxes is not None and MailboxArrays.has_room(boxes, (_WEIGHT, *layouts), boxes.size):
            self._in_mailboxes = MailboxArrays(boxes, (_WEIGHT, *layouts))

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Give the weight, and small arrays, before the ranks agree on the call."""
        if self._in_mailboxes is None:
            return self._weights.bring(arrays[0])
        self._in_mailboxes.put(arrays)
        return None

    @quietly
    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the means; NaN where all weights are 0."""
        if self._in_mailboxes is not None:
            return self._means_here(self._in_mailboxes.arrays_of_ranks())
        me, weights = self._ranks.rank, self._weights.numbers_of_ranks(memory).ravel().tolist()
        factors, total = normalized(weights)
        work = partial(self._products_and_memory, arrays[1:], weights[me], factors[me])
        products, rooms, memory_of_sums = self._ranks.guard.on_all(work)
        sums = self._sums.run(products, memory_of_sums)
        return [*map(rounded, [divide(array, total) for array in sums], self.results, rooms)]

    def _means_here(self, arrays_of_ranks: list[list[Array]]) -> list[Array]:
        """Return the means of the arrays in the mailboxes."""
        weights = [float(arrays[0]) for arrays in arrays_of_ranks]
        factors, total = normalized(weights)
        if total == 0:
            return [np.full(shape, np.nan, dtype) for (_, shape), dtype in zip(self.layouts, self.results, strict=True)]
        rows = [
            (np.float64(factor), arrays)
            for factor, weight, arrays in zip(factors, weights, arrays_of_ranks, strict=True)
            if weight
        ]
        means = []
        for number, dtype in enumerate(self.results, 1):
            products = [arrays[number] * factor for factor, arrays in rows]
            means.append(np.asarray(reduce(np.add, products) / total, dtype))
        return means

    def _products_and_memory(self, arrays: Sequence[Array], weight: float, factor: float) -> tuple[Any, Any, Any]:
        """Return the products, memory for means of another dtype than their sums, and memory for the sums."""
        products = [product(array, dtype, weight, factor) for array, dtype in zip(arrays, self._dtypes, strict=True)]
        rooms = [
            None if array.dtype == dtype or is_on_device(array) else np.empty(array.shape, dtype)
            for array, dtype in zip(products, self.results, strict=True)
        ]
        return products, rooms, self._sums.bring(products)


class WeightedPlan(NestPlan):
    """The plan of weighted means of nests of arrays and numbers on the host; its transfer is a `WeightedMeans`."""

    def _results(self, call: Call, arrays: Sequence[Array], targets: Targets, weight: Any = None) -> list[Array]:
        own_weight: Any = checked_weight(weight, ReduceOp.MEAN, call.where)
        return super()._results(call, [own_weight, *arrays], None)
