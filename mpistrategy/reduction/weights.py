"""Means of values that count differently: the ranks learn all weights, and then add up what they count for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, mean_dtype, wire_dtype
from mpistrategy.arrays.nest import Leaves
from mpistrategy.errors import MpiStrategyError, OptionError, OptionTypeError
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.contract.error_messages import BEFORE
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.inputs import Weighted, arrays_of, as_leaf, direct_targets
from mpistrategy.reduction.layout.finish import divide, rounded
from mpistrategy.reduction.layout.packing import Layout, layouts_of
from mpistrategy.reduction.plan import Plan, plan_of, usual_route
from mpistrategy.reduction.routes.mailboxes import MISFIT, Run

#: What the ranks compare before they exchange their weights.
EXCHANGE = "exchange the weights of a mean"


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
        OptionTypeError: for a weight that is not a number.
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
        self.weight: float = float(array)
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
        #: Memory for the means whose sums have another dtype.
        self._memory = [_room_for_mean(array) for array in arrays]
        with np.errstate(all="ignore"):
            return [*map(self._times_weight, arrays)]

    def _times_weight(self, array: Array) -> Array:
        dtype = dtype_of_products(array.dtype)
        if self.weight == 0:
            return np.zeros_like(array, dtype=dtype)
        factor = dtype.type(self._factor)
        # A factor with more digits than the dtype has, unlike most numbers of rows, meets the values in float64.
        meeting = dtype if float(factor.real) == self._factor else np.result_type(dtype, np.float64)
        product: Array
        if type(array) is np.ndarray:  # rounded as it is written: no array of the wide dtype is made
            product = np.multiply(array, meeting.type(self._factor), out=np.empty(array.shape, dtype), dtype=meeting)
        else:
            product = np.multiply(array, meeting.type(self._factor), dtype=meeting).astype(dtype, copy=False)
        return product

    def finish(self, totals: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        """Turn the sums of `contributions` into the means; NaN where all weights are 0."""
        with np.errstate(all="ignore"):
            return [
                rounded(divide(total, self._total), mean_dtype(array.dtype), room)
                for total, array, room in zip(totals, arrays, self._memory, strict=True)
            ]


def dtype_of_products(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values times weights are summed.  Integers': float64, which no wire= rounds."""
    return np.dtype(np.float64) if dtype.kind in "iu" else wire_dtype(dtype)


def _room_for_mean(array: Array) -> Array | None:
    """Return memory for the mean of an array on the host; None where it is written over the sum."""
    dtype = mean_dtype(array.dtype)
    return None if dtype == dtype_of_products(array.dtype) or is_on_device(array) else np.empty(array.shape, dtype)


def exchange_of_weights(communicator: Communicator) -> Callable[..., Array]:
    """Return ``exchange(weight, agree)``: each rank's weight, in rank order, as float64; `agree` compares the calls."""
    rank, size = communicator.rank, communicator.size
    plan = plan_of(communicator, ((np.dtype(np.float64), (size,)),), ReduceOp.SUM, 0, usual_route)

    def exchange(weight: float, agree: Callable[[], object]) -> Array:
        weights = np.zeros(size)
        weights[rank] = weight
        plan.bring((weights,))
        agree()
        return plan.run((weights,))[0]

    return exchange


def weighted_mean(
    communicator: Communicator,
    where: Leaves,
    op: ReduceOp,
    arrays: Sequence[Array],
    plan_and_signature: Callable[[ReduceOp, tuple[Layout, ...]], tuple[Plan, Signature]],
) -> Run | None:
    """Return a ``run(weighted, out)`` for `Weighted` nests of arrays like `arrays`; None for another op than MEAN.

    It returns MISFIT, before anything has been sent, for what the general call must look at.
    """
    if op is not ReduceOp.MEAN:
        return None
    guard, layouts, dtypes = communicator.guard, layouts_of(arrays), [mean_dtype(array.dtype) for array in arrays]
    plan, signature = plan_and_signature(
        ReduceOp.SUM, tuple((dtype_of_products(array.dtype), array.shape) for array in arrays)
    )
    exchange = exchange_of_weights(communicator)
    first = signature._replace(collective=EXCHANGE, op="", values=(), destination="", options="")
    digests = guard.digest(first), guard.digest(signature)

    def run(weighted: Weighted, out: Any) -> Any:
        leaves = where.take(weighted.value)
        arrays = arrays_of(leaves, layouts)
        try:
            mean = WeightedMean(weighted.weight, op, signature.call)
        except MpiStrategyError:
            return MISFIT
        if arrays is None or (
            out is not None and direct_targets(out, weighted.value, where, arrays, dtypes, False) is None
        ):
            return MISFIT
        everybodys = exchange(mean.weight, lambda: guard.compare_digest(digests[0], first))
        guard.stage = BEFORE  # the values come next
        parts = mean.contributions(arrays, everybodys)
        plan.bring(parts)
        guard.compare_digest(digests[1], signature)
        means = mean.finish(plan.run(parts), arrays)
        if out is None:
            return where.build([*map(as_leaf, means, leaves)])
        for target, result in zip(where.take(out), means, strict=True):
            target[...] = result
        return out

    run.__dict__["signature"] = signature
    return run
