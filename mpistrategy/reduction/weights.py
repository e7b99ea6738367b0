"""Means of values that count differently: sum(w x) / sum(w).

A replica with weight 0 contributes nothing, whatever its values are (the mean of no rows is NaN, say).  The values are
multiplied by the weights times one power of two, so that the sum of the weights is less than 1 and not less than 1/2.
Weights may thus be larger or smaller than any number of the values' dtype, and no sum overflows whose mean does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
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
    exact = float(dtype.type(factor).real) == factor
    meeting = dtype if exact else np.result_type(dtype, np.float64)
    if type(array) is np.ndarray:  # rounded as it is written: no array of the wide dtype is made
        room: Array = np.empty(array.shape, dtype)
        np.multiply(array, meeting.type(factor), out=room, dtype=meeting)
        return room
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

    On a node small arrays lie in the mailboxes, beside the weight and the check of the call, and each rank multiplies
    the arrays of all ranks.  Else the ranks learn the weights with the check, and then add up the products.

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
        """Do what must be done before the ranks agree on the call."""
        rows = zip(arrays[1:], self._dtypes, self.results, strict=True)
        rooms = [
            None if result == dtype or is_on_device(array) else np.empty(array.shape, result)
            for array, dtype, result in rows
        ]
        if self._in_mailboxes is None:
            return rooms, self._weights.bring(arrays[0])
        self._in_mailboxes.put(arrays)
        return rooms, None

    @quietly
    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the means; NaN where all weights are 0."""
        rooms, numbers = memory
        if self._in_mailboxes is None:
            weights = self._weights.numbers_of_ranks(numbers).ravel().tolist()
            factors, total = normalized(weights)
            sums = self._summed_products(arrays[1:], weights[self._ranks.rank], factors[self._ranks.rank])
        else:
            arrays_by_rank = self._in_mailboxes.arrays_of_ranks()
            weights = [float(rank_arrays[0]) for rank_arrays in arrays_by_rank]
            factors, total = normalized(weights)
            products_by_rank = [
                self._products(rank_arrays[1:], *weight_and_factor)
                for rank_arrays, *weight_and_factor in zip(arrays_by_rank, weights, factors, strict=True)
            ]
            sums = [np.asarray(reduce(np.add, parts)) for parts in zip(*products_by_rank, strict=True)]
        rows = zip(sums, self.results, rooms, strict=True)
        return [_mean(array, total, dtype, room) for array, dtype, room in rows]

    def _products(self, arrays: Sequence[Array], weight: float, factor: float) -> list[Array]:
        return [product(array, dtype, weight, factor) for array, dtype in zip(arrays, self._dtypes, strict=True)]

    def _summed_products(self, arrays: Sequence[Array], weight: float, factor: float) -> list[Array]:
        def products_and_memory() -> tuple[list[Array], Any]:
            products = self._products(arrays, weight, factor)
            return products, self._sums.bring(products)

        return self._sums.run(*self._ranks.guard.on_all(products_and_memory))


def _mean(total: Array, weight: float, dtype: np.dtype[Any], room: Array | None) -> Array:
    """Return the quotient of a sum and the weights of all: on the host in its own memory, or in `room`."""
    if is_on_device(total):
        return rounded(divide(total, weight), dtype)
    out = total if room is None else room
    return np.true_divide(total, total.dtype.type(weight), out=out, casting="unsafe")  # type: ignore[no-any-return]


class WeightedPlan(NestPlan):
    """The plan of weighted means of nests of arrays and numbers on the host; its transfer is a `WeightedMeans`."""

    def _results(self, call: Call, arrays: Sequence[Array], targets: Targets, weight: Any = None) -> list[Array]:
        own_weight: Any = checked_weight(weight, ReduceOp.MEAN, call.where)
        return super()._results(call, [own_weight, *arrays], None)
