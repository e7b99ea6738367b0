"""Plans: made once for a call site, an operation, options and a kind of value, and run many times.

A plan does the whole call: it packs the values, which is all that can fail on one rank; the ranks agree on the call;
the packs are summed, and the results unpacked.  `Reducer` finds the plan of a call, or makes it.

Weighted means are sum(w x) / sum(w).  A replica with weight 0 contributes nothing, whatever its values are (the mean of
no rows is NaN, say).  The values are multiplied by the weights times one power of two, so that the sum of the weights
is less than 1 and not less than 1/2.  Weights may thus be larger or smaller than any number of the values' dtype, and
no sum overflows whose mean does not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.dtypes import Array, host_wire_dtype, quietly, sum_dtype_of_mean, wire_dtype
from mpistrategy.arrays.nest import Structure
from mpistrategy.arrays.values import is_arena
from mpistrategy.errors import OptionError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature, digest_of
from mpistrategy.mpi.contract.guard import ALWAYS
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.settings import checked_number
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.gpu import GpuRoute
from mpistrategy.reduction.inputs import NUMBERS, Destination, arrays_of, in_kind, writable, write
from mpistrategy.reduction.transfer import (
    CommunicatorRoute,
    FirstMessageRoute,
    Layout,
    MailboxRoute,
    Pack,
    Targets,
    Transfer,
    Way,
    dtypes_of_results,
    finish,
    fits_mailbox,
    fits_message,
    flat_layouts,
    packs_of,
)

_ndarray, _ARRAYS, _NUMBERS = np.ndarray, {np.ndarray}, NUMBERS.keys()


# ------------------------------------------------------------------------------------------------- lists of arrays


def plan_of(ranks: Ranks, layouts: tuple[Layout, ...], op: ReduceOp, route: Transfer) -> Transfer:
    """Return the reduction of arrays of certain layouts on the host by a route: the route, if its sums are the results.

    Args:
        ranks: the ranks that take part.
        layouts: dtype and shape of each array.
        op: how they are combined.
        route: how they travel, as `summed` says.
    """
    results = dtypes_of_results(layouts, op)
    left = [
        None if host_wire_dtype(dtype) == dtype == result else op if dtype.kind in "iu" else ReduceOp.SUM
        for (dtype, _), result in zip(layouts, results, strict=True)
    ]
    return Finished(route, layouts, results, left, ranks.size) if any(left) else route


class Finished(Transfer):
    """The reduction of arrays of which some sums are not yet the results.

    Args:
        route: how they travel.
        layouts: dtype and shape of each array.
        results: the dtype of each result.
        left: for each array the operation that is left to do: a division of integers, a rounding (SUM), or None.
        size: how many ranks take part.
    """

    def __init__(
        self,
        route: Transfer,
        layouts: tuple[Layout, ...],
        results: list[np.dtype[Any]],
        left: list[ReduceOp | None],
        size: int,
    ) -> None:
        self._route, self._layouts, self._results, self._left, self._size = route, layouts, results, left, size
        self.least_in_place: int = route.least_in_place
        self.writes_targets: bool = route.writes_targets

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Take memory for the results, and prepare the route before the ranks agree on the call."""
        rows = zip(targets or [None] * len(arrays), self._layouts, self._results, self._left, strict=True)
        rooms = [
            None if op is None else target if target is not None and target.dtype == dtype else np.empty(shape, dtype)
            for target, (_, shape), dtype, op in rows
        ]
        return rooms, self._route.bring(arrays, targets)

    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the combinations of all ranks' arrays."""
        rows = zip(self._left, memory[0], self._route.run(arrays, memory[1]), self._layouts, strict=True)
        return [
            total if op is None else finish(total, dtype, op, self._size, room) for op, room, total, (dtype, _) in rows
        ]

    def describe(self, arrays: Sequence[Array]) -> list[tuple[Pack, Way]]:
        """Return the packs of the route, and how they travel."""
        return self._route.describe(arrays)


def summed(layouts: tuple[Layout, ...], op: ReduceOp) -> tuple[Layout, ...]:
    """Return the layouts in which arrays are summed: integers of a MEAN have 64 bits."""
    return tuple((sum_dtype_of_mean(dtype), shape) for dtype, shape in layouts) if op is ReduceOp.MEAN else layouts


def usual_route(
    ranks: Ranks, layouts: tuple[Layout, ...], op: ReduceOp, bytes_per_pack: float, wire: str | None
) -> Transfer:
    """Return the fastest route to every rank."""
    boxes = ranks.mailboxes
    # Every rank combines all mailboxes.  MIN and MAX, which order zeros and NaN, take longer than the messages sooner.
    readers = ranks.size if op._on_the_wire in ("SUM", "PROD") else 2 * ranks.size
    if boxes is not None and fits_mailbox(boxes, flat_layouts(packs_of(layouts)), readers):
        return MailboxRoute(boxes, layouts, op)
    message = ranks.first_message if ranks.guard.level == ALWAYS else None
    if message is not None and wire is None and fits_message(message, layouts, op):
        return FirstMessageRoute(ranks, message, layouts, op)
    return CommunicatorRoute(
        ranks, packs_of(layouts, bytes_per_pack, alone_bytes=ranks.thresholds.pack_bytes), op, wire=wire
    )


class NumbersOfRanks:
    """So many numbers of each rank, as float64.

    Args:
        ranks: the ranks that take part.
        count: how many numbers each rank has.
    """

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._rank, layouts = ranks.rank, ((np.dtype(np.float64), (ranks.size, count)),)
        self._route = usual_route(ranks, layouts, ReduceOp.SUM, 0, None)
        self._numbers: Array = np.zeros(layouts[0][1])

    def bring(self, numbers: Any) -> Any:
        """Give this rank's numbers, before the ranks agree on the call; return memory for the numbers of all ranks."""
        self._numbers[self._rank] = numbers
        return self._route.bring((self._numbers,))

    def numbers_of_ranks(self, memory: Any) -> Array:
        """Return the numbers of all ranks, a row for each rank, after the agreement."""
        return self._route.run((self._numbers,), memory)[0]


# ------------------------------------------------------------------------------------------------- calls


class CallPlan(ABC):
    """How one kind of value is reduced at one call site."""

    @abstractmethod
    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction of a value; inside `call`.

        Args:
            call: the public call, entered by the caller.
            value: of the kind that the plan was made for.
            out: where the result goes, or the destinations; None for new memory on every rank.
            weight: of this rank's values, for plans of weighted means.
        """


def carry_out(
    call: Call,
    transfer: Transfer,
    arrays: Sequence[Array],
    signature: Signature,
    digest: int | None = None,
    timeout_seconds: float | None = None,
    targets: Targets = None,
) -> list[Array]:
    """Take memory, let the ranks agree on the call, and return the results of a transfer.

    Args:
        call: the public call.
        transfer: moves the arrays.
        arrays: this rank's.
        signature: what the ranks compare before the data move.
        digest: of the signature; None where it is not known.
        timeout_seconds: how long the call may wait for the other ranks; None: the strategy's timeout.
        targets: memory for results; see `Transfer.bring`.
    """
    call.structure = signature.structure
    call.wait_as(timeout_seconds)
    memory = transfer.bring(arrays, targets)
    while call.guard.compare(signature, digest, patiently=call.is_patient, sparingly=transfer.sparingly):
        transfer.answer()
        memory = transfer.bring(arrays, targets)
    return transfer.run(arrays, memory)


class ArraysPlan:
    """The plan of arrays whose calls are compared by words that change: a variable's name, the number of a step.

    Args:
        plan: the plan of the arrays.
        signature: the compared fields, without the words of a call.
        timeout_seconds: see `carry_out`.

    Attributes:
        plan: the argument.
    """

    def __init__(self, plan: Transfer, signature: Signature, timeout_seconds: float | None) -> None:
        self.plan: Transfer = plan
        self._signature, self._timeout_seconds = signature, timeout_seconds
        #: The words of the latest call, which `_signature` has, and the digest of that.
        self._words: tuple[Any, ...] = ()
        self._digest: int | None = None

    def run(self, call: Call, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return the results on every rank; inside `call`."""
        words = call.name, call.where, call.place, call.step, call.structure
        if words != self._words:
            self._signature = self._signature._replace(
                name=call.name, call=call.where, place=call.place, step=call.step, structure=call.structure
            )
            self._words, self._digest = words, digest_of(self._signature)  # not before: a signal's handler may raise
        return carry_out(call, self.plan, arrays, self._signature, self._digest, self._timeout_seconds, targets)


class NestPlan(CallPlan):
    """The plan of arrays and numbers on the host, or of CuPy arrays, in plain nests; `out` is of the first call's kind.

    With a destination the results are `Mirrored`, and `out` says where they go.

    Args:
        otherwise: makes the other calls, such as calls with an `out` of another kind.
        leaves: how to reach the arrays.
        transfer: the transfer of the arrays.
        signature, timeout_seconds: see `carry_out`.
        kinds: the types of the leaves.
        layouts: dtype and shape of each array.
        destination: the ranks on which the results live; None for plain results on every rank.
    """

    def __init__(
        self,
        otherwise: CallPlan,
        leaves: Structure,
        transfer: Transfer,
        signature: Signature,
        timeout_seconds: float | None,
        kinds: set[type],
        layouts: tuple[Layout, ...],
        destination: Destination | None = None,
    ) -> None:
        #: The signature, its digest, and the timeout.
        self._compared = signature, digest_of(signature), timeout_seconds
        self.otherwise: CallPlan = otherwise
        self.leaves: Structure = leaves
        self.transfer: Transfer = transfer
        self.destination: Destination | None = destination
        self._is_on_gpu = isinstance(transfer, GpuRoute)
        self._only_arrays = kinds == _ARRAYS or self._is_on_gpu
        #: Of arrays of other libraries, which are looked at in each call.
        self._layouts = None if kinds <= _ARRAYS | _NUMBERS else layouts

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        leaves, destination = self.leaves.take(value), self.destination
        targets = None if out is None or destination is not None else self.leaves.take(out)
        arrays = leaves if self._only_arrays else arrays_of(leaves, self._layouts)
        fits = targets is None or (out is value if self._is_on_gpu else writable(targets))
        if arrays is None or not fits:
            return self.otherwise.run(call, value, out, weight)
        transfer = self.transfer
        if weight is not None:
            transfer.weight = checked_weight(weight, ReduceOp.MEAN, call.where)
        if targets is not None:
            direct_targets = transfer.direct(arrays, targets) if transfer.writes_targets else None
            write(carry_out(call, transfer, arrays, *self._compared, direct_targets), targets)
            return out
        results = carry_out(call, transfer, arrays, *self._compared)
        in_kinds: Any = results if self._only_arrays else [*map(in_kind, results, leaves)]
        if destination is not None:
            in_kinds = destination.mirrored(in_kinds)
        return self.leaves.pack(in_kinds)


def kind_of(value: Any) -> Any:
    """Return a key that tells kinds of values with plans apart: structure, types, dtypes and shapes.

    Raises:
        Exception: of many types, for values without a plan, such as a list that holds itself.
    """
    kind = type(value)
    if kind is _ndarray:
        return value.dtype, value.shape
    if kind in _NUMBERS:
        return kind
    if kind is dict:
        return kind, tuple(value), tuple([kind_of(item) for item in value.values()])
    if kind is list or kind is tuple:
        return kind, tuple([kind_of(item) for item in value])
    if is_arena(value):
        return kind, value._number
    shape = getattr(value, "shape", None)
    # A record may have a field of that name, and a key keeps no values.
    return (kind, getattr(value, "dtype", None), shape) if isinstance(shape, tuple) else kind


# ------------------------------------------------------------------------------------------------- weighted means

#: The operation, as the ranks compare it.
WEIGHTED = "weighted MEAN"


def checked_weight(weight: Any, op: ReduceOp, where: str) -> float:
    """Return this rank's weight; usually its number of rows.

    Raises:
        OptionError: for another operation than MEAN, and for a weight that is negative or not finite.
        OptionTypeError: for a weight that is not a number.
    """
    if op is not ReduceOp.MEAN:
        raise OptionError.at(where, found=f"weight= with {op.name}", expected="weight= with MEAN")
    if type(weight) in (int, float) and 0 <= weight < 2**63:  # larger ones, and other numbers, take longer
        return float(weight)
    number = host_array(weight)[()] if hasattr(weight, "dtype") else weight
    return checked_number(where, "weight", number, "a finite number that is not negative")


@lru_cache(maxsize=16)
def normalized(weights: tuple[float, ...]) -> tuple[list[float], float]:
    """Return the ranks' weights times one power of two, and their sum, which is less than 1 and not less than 1/2."""
    _, exponent = math.frexp(max(weights))
    total = math.fsum([math.ldexp(weight, -exponent) for weight in weights])
    _, shift = math.frexp(total)
    return [math.ldexp(weight, -exponent - shift) for weight in weights], math.ldexp(total, -shift)


@quietly
def product(array: Array, weight: float, factor: float) -> Array:
    """Return this rank's summand: its values times its normalized weight, `factor`.

    For integers it is of float64, which no wire= rounds.
    """
    dtype = np.dtype(np.float64) if array.dtype.kind in "iu" else wire_dtype(array.dtype)
    if weight == 0:
        return np.zeros_like(array, dtype)
    # A factor with more digits than the dtype has, unlike most numbers of rows, meets the values in float64.
    is_exact = float(dtype.type(factor).real) == factor
    meeting = dtype if is_exact else np.result_type(dtype, np.float64)
    products: Array = np.multiply(array, meeting.type(factor), dtype=meeting)
    return products.astype(dtype, copy=False)
