"""The plans of all-reduces: what is looked at once for a call site, an operation, options and a kind of value.

`Reducer` finds the plan of a call, or makes it.  A plan does the whole call: it packs the values, which is all that can
fail on one rank; the ranks agree on the call; the packs are summed, and the results unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import are_apart, check_device, is_cupy, own_result
from mpistrategy.arrays.nest import Leaves
from mpistrategy.arrays.values import Mirrored
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature, digest_of
from mpistrategy.mpi.contract.public_calls import is_arena
from mpistrategy.reduction.inputs import NUMBERS, arrays_of, as_leaf, direct, in_kind, writable
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.plan import Plan, Transfer
from mpistrategy.reduction.routes.base import CallPlan, Targets

_ndarray, _ARRAYS, _NUMBERS = np.ndarray, {np.ndarray}, NUMBERS.keys()
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")


class NestPlan(CallPlan):
    """The plan of arrays and numbers on the host, alone or in plain nests; `out` is like the one that it was made for.

    Args:
        otherwise: does the calls that need a closer look, such as those with an `out` of another kind.
        leaves: how to reach the arrays.
        transfer: what becomes of the arrays.
        signature: of the call.
        kinds: the types of the leaves.
        timeout: how long the call may wait for the other ranks, in seconds; None: as long as the strategy says.

    Attributes:
        sparingly: see `Call.agree`.
    """

    sparingly: bool = True

    def __init__(
        self,
        otherwise: CallPlan,
        leaves: Leaves,
        transfer: Transfer,
        signature: Signature,
        *,
        kinds: set[type],
        timeout: float | None,
    ) -> None:
        self.otherwise: CallPlan = otherwise
        self.leaves: Leaves = leaves
        self._transfer = transfer
        self._signature, self._digest, self._timeout = signature, digest_of(signature), timeout
        self._only_arrays = kinds == _ARRAYS
        #: Whether results need not be made arrays of another library.
        self._only_own = kinds <= _ARRAYS | _NUMBERS

    def _arrays_of(self, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """Return leaves as arrays of the plan's layouts; None for those that need a closer look."""
        if self._only_arrays:
            return leaves
        return arrays_of(leaves, None if self._only_own else self._transfer.layouts)

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        leaves = self.leaves.take(value)
        arrays = self._arrays_of(leaves)
        if arrays is None:
            return self.otherwise.run(call, value, out, weight)
        if out is None:
            results = self._sent(call, arrays, None, weight)
            return self.leaves.build(results if self._only_arrays else map(as_leaf, results, leaves))
        transfer = self._transfer
        targets = self.leaves.take(out)
        if not writable(targets):
            return self.otherwise.run(call, value, out, weight)
        written = direct(targets, arrays) if transfer.writes_targets else None
        results = self._sent(call, arrays, written, weight)
        for target, result in zip(targets, results, strict=True):
            if result is not target:
                target[...] = result
        return out

    def _sent(self, call: Call, arrays: Sequence[Array], targets: Targets, weight: Any = None) -> list[Array]:
        call.structure = self._signature.structure
        memory = self._transfer.bring(arrays, targets)
        if self._timeout is not None:
            call.timeout = self._timeout
        call.agree_on(self._signature, self._digest, sparingly=self.sparingly)
        return self._transfer.run(arrays, memory)


class DevicePlan(NestPlan):
    """The plan of nests of CuPy arrays; its transfer is a `GpuRoute`.

    Args:
        otherwise: does the calls with an `out` that is not the value, or with one array twice.
        leaves, route, signature, timeout: as `NestPlan`'s.
        gpu: the number of the GPU that this rank drives; None for a CPU.
    """

    #: MPI and NCCL get pointers to GPU memory only from ranks that are known to make the same call.
    sparingly = False

    def __init__(
        self,
        otherwise: CallPlan,
        leaves: Leaves,
        route: Any,
        signature: Signature,
        timeout: float | None,
        gpu: int | None,
    ) -> None:
        super().__init__(otherwise, leaves, route, signature, kinds=set(), timeout=timeout)
        #: Which arrays travel by themselves: those are reduced where they are, if they are their own result.
        self._lone = {pack.members[0].index for pack in route.packs if len(pack.members) == 1}
        self._gpu = gpu

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        leaves = self.leaves.take(value)
        targets: list[Any] | None = None
        if out is not None:
            repeats = len({each.data.ptr for each in leaves}) < len(leaves)
            meet = len(self._lone) > 1 and not are_apart([leaves[index] for index in self._lone])
            if out is not value or repeats or meet:
                return self.otherwise.run(call, value, out, weight)
            targets = [None] * len(leaves)
            for index in self._lone:
                targets[index] = own_result(leaves[index], leaves[index])
        check_device(leaves, self._gpu, call.where)
        results = self._sent(call, leaves, targets)
        if out is None:
            return self.leaves.build(results)
        copied = [(result, each) for result, each in zip(results, leaves, strict=True) if result is not each]
        if copied:
            from mpistrategy.reduction.routes.gpu_copy import move  # here: on CPUs nothing reads it

            with leaves[0].device:
                move(*zip(*copied, strict=True))
        return out


class ArraysPlan:
    """The plan of arrays whose calls are compared by words that change: a variable's name, the number of a step.

    Args:
        plan: of the arrays.
        signature: what is compared, without the words of a call.
        timeout: how long the call may wait for the other ranks, in seconds; None: as long as the strategy says.

    Attributes:
        plan: as given.
    """

    def __init__(self, plan: Plan, signature: Signature, timeout: float | None) -> None:
        self.plan: Plan = plan
        self._signature, self._digest, self._timeout = signature, digest_of(signature), timeout
        #: The words of the latest call, which `_signature` has.
        self._words: tuple[Any, ...] = ()

    def run(self, call: Call, arrays: Sequence[Array]) -> list[Array]:
        """Return the results on every rank; inside `call`."""
        memory = self.plan.bring(arrays)
        self.agree(call)
        return self.plan.run(arrays, memory)

    def agree(self, call: Call) -> None:
        """Compare the call with those of the other ranks."""
        if self._timeout is not None:
            call.timeout = self._timeout
        words = call.name, call.where, call.place, call.step, call.structure
        if words != self._words:
            name, where, place, step, structure = words
            self._signature = self._signature._replace(
                name=name, call=where, place=place, step=step, structure=structure
            )
            self._words, self._digest = words, digest_of(self._signature)
        call.agree_on(self._signature, self._digest, sparingly=True)


class PlacedPlan(NestPlan):
    """The plan of values whose results are `Mirrored`, on some ranks; the `out` of its calls are the destinations."""

    #: Where the results live.
    destination: Destination
    is_here: bool

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return a `Mirrored`, or a nest of them; see `CallPlan.run`."""
        leaves, text = self.leaves.take(value), self.destination.text
        arrays = self._arrays_of(leaves)
        if arrays is None:
            return self.otherwise.run(call, value, out, weight)
        results = self._sent(call, arrays, None)
        if not self.is_here:
            return self.leaves.build([Mirrored((), text) for _ in leaves])
        if not self._only_own:
            results = [*map(in_kind, results, leaves)]
        return self.leaves.build([Mirrored((result,), text) for result in results])


def kind_of(value: Any) -> Any:
    """Return what tells the kinds of values apart for which there are plans: structure, types, dtypes and shapes.

    Raises:
        Exception: of many types, for values that no plan is for, such as a list that holds itself.
    """
    kind = type(value)
    if kind is _ndarray:
        return value.dtype, value.shape
    if kind in _NUMBERS:
        return kind
    if kind is dict:
        return kind, tuple(value), _kinds_of(value.values())
    if kind is list or kind is tuple:
        return kind, _kinds_of(value)
    if is_arena(value):
        return kind, value._number
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple):  # a record may have a field of that name, and a key keeps no values
        return kind
    return kind, getattr(value, "dtype", None), shape


def _kinds_of(values: Any) -> tuple[Any, ...]:
    kinds = {*map(type, values)}
    if kinds == _ARRAYS:
        return (*map(_dtype_of, values), *map(_shape_of, values))
    if kinds <= _NUMBERS:
        return (*map(type, values),)
    if len(kinds) == 1 and all(is_cupy(each) for each in [*values][:1]):
        return (*kinds, *map(_dtype_of, values), *map(_shape_of, values))
    return (*map(kind_of, values),)
