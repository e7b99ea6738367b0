"""The sliced step: which variables can take it, where their memory is, and how gradients get into shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory
from mpistrategy.options import ReduceOp, VariableSynchronization
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.training.kernels import Kernel, Scratch
from mpistrategy.training.sliced.update import MemoryRange, Run, SlicedUpdate
from mpistrategy.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrategy.reduction.arena import Arena

Slots = Mapping[str, Variable]

#: Dtypes that are added without conversion, and whose sums do not depend on the alignment of the arrays.
_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
#: How many arenas an optimizer makes by itself: the second is for variables that had no gradients at first.
_MOST_ARENAS = 2


class GradientArena:
    """The gradients of some variables, in memory that the ranks of the node share where they can.

    Attributes:
        arena: the memory; its values are like the variables, in their order.
        variables: the variables.
    """

    def __init__(self, arena: Arena[Any], variables: tuple[Variable, ...]) -> None:
        self.arena = arena
        self.variables = variables
        self._number = {id(var): number for number, var in enumerate(variables)}
        self._memory = [tuple(array.view(np.uint8) for array in bucket.arrays) for bucket in arena._buckets]

    def covers(self, variables: Sequence[Variable]) -> bool:
        """Return whether there is memory for the gradients of all of `variables`."""
        return all(id(var) in self._number for var in variables)

    def range_of(self, var: Variable) -> MemoryRange:
        """Return where the gradient of `var` is."""
        bucket, place = self.arena._places[self._number[id(var)]]
        return MemoryRange(self._memory[bucket], place.start * var.dtype.itemsize)

    def value_of(self, var: Variable) -> Array:
        """Return the array for the gradient of `var`."""
        return self.arena._leaves[self._number[id(var)]]

    def overlaps(self, array: Array) -> bool:
        """Return whether `array`, which does not own its memory, may share it with the arena."""
        return any(np.may_share_memory(array, bucket.mine) for bucket in self.arena._buckets)


class SlicedStep:
    """A prepared step in which each rank updates its share of all copies.

    Args:
        gradients: the shared memory for their gradients.
        variables: the variables.
        update: this rank's share.
    """

    def __init__(self, gradients: GradientArena, variables: Sequence[Variable], update: SlicedUpdate) -> None:
        self._update = update
        self._gradients = gradients
        self._values = [gradients.value_of(var) for var in variables]
        #: For each variable, the parts of its gradient that must be in shared memory.
        self._shared_parts = [
            _gaps(parts, value.size) for parts, value in zip(update.own_parts, self._values, strict=True)
        ]

    def run(self, gradients: Sequence[Array], kernel: Kernel, op: ReduceOp, call: Call) -> None:
        """Make the step on all ranks."""
        elsewhere = self._collect(gradients)
        # Shapes and dtypes are those of the variables, and which variables they are is in call.structure.
        call.agree("update", op=op.value, options="each rank its share")
        self._update.run(kernel, op, elsewhere)

    def _collect(self, gradients: Sequence[Array]) -> list[Array | None]:
        """Copy the parts of the gradients that other ranks read to shared memory.

        Returns:
            Where the other parts are; see `SlicedUpdate.run`.
        """
        moved: list[tuple[int, Array]] = []
        for number, (value, gradient) in enumerate(zip(self._values, gradients, strict=True)):
            if gradient is value:
                continue
            if gradient.base is not None and self._gradients.overlaps(gradient):
                if _address(gradient) == _address(value) and gradient.flags.c_contiguous:
                    continue
                gradient = gradient.copy()  # it is in the memory of another gradient, which may be overwritten first
            moved.append((number, gradient))
        elsewhere: list[Array | None] = [None] * len(self._values)
        own_parts = self._update.own_parts
        for number, gradient in moved:
            value = self._values[number]
            if not own_parts[number] or not gradient.flags.c_contiguous or self._update.changes(gradient):
                value[...] = gradient
                continue
            source, target = gradient.reshape(-1), value.reshape(-1)
            for part in self._shared_parts[number]:
                target[part] = source[part]
            elsewhere[number] = source
        return elsewhere


class SlicedSteps:
    """The gradient arenas and sliced steps of one optimizer."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._arenas: list[GradientArena] = []
        self._made = 0
        self._failures: SharedMemory | None = None
        self._steps: WeakKeyDictionary[Any, SlicedStep | None] = WeakKeyDictionary()
        #: How many arenas have been made: a step that was prepared before one of them is prepared again.
        self.arenas_made: int = 0

    def arena(self, strategy: Strategy, variables: tuple[Variable, ...]) -> GradientArena:
        """Return the arena of exactly these variables.  Collective when there is none yet."""
        for known in self._arenas:
            if [*map(id, known.variables)] == [*map(id, variables)]:
                return known
        made = GradientArena(strategy.arena(list(variables)), variables)
        self._arenas.append(made)
        self._steps.clear()
        self.arenas_made += 1
        return made

    def step(
        self,
        plan: object,
        variables: tuple[Variable, ...],
        slots_of: Callable[[Variable], Slots],
        kernel: Kernel,
        strategy: Strategy,
        call: Call,
    ) -> SlicedStep | None:
        """Return the sliced step of a plan, or None where one cannot be made: the same on all ranks.

        Collective for a plan that is new, or when an arena has been made since.
        """
        if plan not in self._steps:
            call.agree("prepare an update")
            slots = [slots_of(var) for var in variables]
            self._steps[plan] = self._new_step(strategy, variables, slots, kernel)
            call.expect_more()
        return self._steps[plan]

    def _new_step(
        self, strategy: Strategy, variables: tuple[Variable, ...], slots: Sequence[Slots], kernel: Kernel
    ) -> SlicedStep | None:
        communicator = strategy.extended.communicator
        one_node = communicator.size > 1 and communicator.nodes == 1
        if not one_node or len({*map(id, variables)}) < len(variables):
            return None
        if not all(map(_lives_in_shared_memory, [*variables, *(slot for beside in slots for slot in beside.values())])):
            return None
        gradients = next((known for known in reversed(self._arenas) if known.covers(variables)), None)
        if gradients is None and self._made < _MOST_ARENAS:
            self._made += 1
            gradients = self.arena(strategy, variables)
            if not gradients.arena.is_shared:
                self._arenas.remove(gradients)  # of no use here: its memory is freed
        if self._failures is None:
            self._failures = communicator.shared(ALIGNMENT)
        if gradients is None or not (gradients.arena.is_shared and self._failures.is_shared):
            return None
        runs = [
            Run(
                var.dtype,
                var.local_view.nbytes,
                _range_of(var),
                gradients.range_of(var),
                {name: _range_of(slot) for name, slot in beside.items()},
            )
            for var, beside in zip(variables, slots, strict=True)
        ]
        one_of_each_dtype = {run.dtype: run for run in runs}.values()
        merged = all(_leaves_zeros_alone(kernel, run, self._scratch) for run in one_of_each_dtype)
        update = SlicedUpdate(runs, communicator, self._failures, self._scratch, merged)
        return SlicedStep(gradients, variables, update)


def _lives_in_shared_memory(var: Variable) -> bool:
    kept_equal = var.synchronization is VariableSynchronization.ON_WRITE
    return kept_equal and var.dtype in _DTYPES and var._memory_slot is not None


def _range_of(var: Variable) -> MemoryRange:
    assert var._memory_slot is not None
    return MemoryRange(var._memory_slot.slab.segments, var._memory_slot.offset)


def _leaves_zeros_alone(kernel: Kernel, run: Run, scratch: Scratch) -> bool:
    """Return whether a step leaves zeros unchanged: padding between variables may then be part of it."""
    zeros = {name: np.zeros(1, run.dtype) for name in ("parameter", *run.slots)}
    parameter = zeros.pop("parameter")
    with np.errstate(all="ignore"):
        kernel(parameter, np.zeros(1, run.dtype), zeros, scratch.of(run.dtype, 1)[:-1])
    return not parameter.any() and not any(slot.any() for slot in zeros.values())


def _gaps(parts: Sequence[slice], size: int) -> list[slice]:
    """Return the slices of `size` elements that are not in `parts`, which are in order."""
    starts, stops = [0, *(part.stop for part in parts)], [*(part.start for part in parts), size]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
