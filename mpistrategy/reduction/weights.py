"""Means of values that count differently: the ranks learn all weights, and then add up what they count for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, mean_dtype, wire_dtype
from mpistrategy.arrays.nest import Leaves
from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature, digest_of
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import divide, rounded
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.plan import NumbersOfRanks, Plan, Transfer
from mpistrategy.reduction.plans import NestPlan
from mpistrategy.reduction.routes.base import CallPlan, Targets

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
        numbers = weights.tolist()
        _, exponent = math.frexp(max(numbers))
        total = math.fsum(math.ldexp(weight, -exponent) for weight in numbers)
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


def weights_of_ranks(
    numbers: NumbersOfRanks, call: Call, weight: float, signature: Signature, digest: int | None = None
) -> Array:
    """Return each rank's weight, in rank order, as float64; the values come next."""
    memory = numbers.bring(weight)
    call.agree_on(signature, digest, sparingly=True)
    found = numbers.found(memory)[:, 0]
    call.expect_more()
    return found


class Products(Transfer):
    """The sums of arrays times weights.

    Args:
        plan: of the products.
        layouts: of the arrays.
    """

    def __init__(self, plan: Plan, layouts: tuple[Layout, ...]) -> None:
        self._plan = plan
        self.layouts: tuple[Layout, ...] = layouts
        self.results: list[np.dtype[Any]] = [mean_dtype(dtype) for dtype, _ in layouts]

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Do what must be done with the products before the ranks agree on the call."""
        return self._plan.bring(arrays)

    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the sums of the products."""
        return self._plan.run(arrays, memory)


class WeightedPlan(NestPlan):
    """The plan of weighted means of nests of arrays and numbers on the host: see `NestPlan`.

    Args:
        otherwise, leaves, transfer, signature, kinds, timeout: as there; `transfer` is a `Products`.
        communicator: the ranks.
    """

    def __init__(
        self,
        otherwise: CallPlan,
        communicator: Communicator,
        leaves: Leaves,
        transfer: Products,
        signature: Signature,
        *,
        kinds: set[type],
        timeout: float | None,
    ) -> None:
        super().__init__(otherwise, communicator.guard, leaves, transfer, signature, kinds=kinds, timeout=timeout)
        self._weights = NumbersOfRanks(communicator, 1)
        self._first = signature._replace(collective=EXCHANGE, op="", values=(), destination="", options="")
        self._first_digest = digest_of(self._first)

    def _sent(self, call: Call, arrays: Sequence[Array], targets: Targets, weight: Any = None) -> list[Array]:
        call.structure = self._signature.structure
        mean = WeightedMean(weight, ReduceOp.MEAN, call.where)
        weights = weights_of_ranks(self._weights, call, mean.weight, self._first, self._first_digest)
        parts = mean.contributions(arrays, weights)
        return mean.finish(super()._sent(call, parts, None), arrays)
