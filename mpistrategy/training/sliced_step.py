"""Which variables can take the sliced update, where their memory is, and how gradients come to lie beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from mpistrategy.arrays.convert import is_on_device, to_reducible
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import IndexedSlices, Mirrored, contribution
from mpistrategy.cross_device_ops import HierarchicalCopyAllReduce, MpiAllReduce, NcclAllReduce
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory
from mpistrategy.options import VariableSynchronization
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.training.checks import Target
from mpistrategy.training.kernels import Kernel, Scratch
from mpistrategy.training.sliced_update import Place, Run, SlicedUpdate
from mpistrategy.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrategy.reduction.arena.arena import Arena

Slots = Mapping[str, Variable]

#: Dtypes that are added in themselves, and whose sums do not depend on where the arrays lie.
_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
#: Algorithms that add in rank order on one node; what others do is their own business.
_IN_RANK_ORDER = (MpiAllReduce, HierarchicalCopyAllReduce, NcclAllReduce)
#: How many arenas an optimizer makes by itself: the second serves variables that had no gradients at first.
_MOST_ARENAS = 2


class GradientArena:
    """The gradients of some variables, in memory that the ranks of the node share where they can.

    Attributes:
        arena: the memory; its values are like the variables, in their order.
        variables: them.
    """

    def __init__(self, arena: Arena, variables: tuple[Variable, ...]) -> None:
        self.arena = arena
        self.variables = variables
        self._number = {id(var): number for number, var in enumerate(variables)}
        self._memory = [tuple(array.view(np.uint8) for array in bucket.arrays) for bucket in arena.buckets]

    def covers(self, variables: Sequence[Variable]) -> bool:
        """Return whether all of `variables` have their places here."""
        return all(id(var) in self._number for var in variables)

    def place_of(self, var: Variable) -> Place:
        """Return where the gradient of `var` is."""
        place = self.arena.places[self._number[id(var)]]
        return Place(self._memory[place.bucket], place.start * var.dtype.itemsize)

    def value_of(self, var: Variable) -> Array:
        """Return the array for the gradient of `var`."""
        return self.arena.leaves[self._number[id(var)]]

    def overlaps(self, array: Array) -> bool:
        """Return whether `array` may lie in this memory."""
        # What owns its memory lies in no other.
        return array.base is not None and any(np.may_share_memory(array, bucket.mine) for bucket in self.arena.buckets)


class SlicedStep:
    """What the variables of one target need to be updated in slices.

    Args:
        gradients: where their gradients are brought to.
        variables: them.
        update: the shares.
    """

    def __init__(self, gradients: GradientArena, variables: Sequence[Variable], update: SlicedUpdate) -> None:
        self.update = update
        self._gradients = gradients
        self._values = [gradients.value_of(var) for var in variables]
        #: For each variable, what other ranks look at of its gradient, or this one together with another's.
        self._seen = [_gaps(parts, value.size) for parts, value in zip(update.lonely, self._values, strict=True)]

    def collect(self, gradients: Sequence[Array]) -> list[Array | None]:
        """Bring the variables' gradients to their places, as far as other ranks look at them.

        Returns:
            Where the rest is; see `SlicedUpdate.run`.
        """
        moved: list[tuple[int, Array]] = []
        for number, (value, gradient) in enumerate(zip(self._values, gradients, strict=True)):
            if gradient is value:
                continue
            if self._gradients.overlaps(gradient):
                if _address(gradient) == _address(value) and gradient.flags.c_contiguous:
                    continue
                gradient = gradient.copy()  # it lies in another's place, which may be overwritten first
            moved.append((number, gradient))
        elsewhere: list[Array | None] = [None] * len(self._values)
        for number, gradient in moved:
            value = self._values[number]
            if not gradient.flags.c_contiguous or not self.update.lonely[number] or self.update.changes(gradient):
                np.copyto(value, gradient)
                continue
            source, target = gradient.reshape(-1), value.reshape(-1)
            for part in self._seen[number]:
                target[part] = source[part]
            elsewhere[number] = source
        return elsewhere


class SlicedSteps:
    """The arenas and the shares of one optimizer."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._arenas: list[GradientArena] = []
        self._made = 0
        self._failures: SharedMemory | None = None
        self._steps: WeakKeyDictionary[Target, SlicedStep | None] = WeakKeyDictionary()

    def arena(self, strategy: Strategy, variables: tuple[Variable, ...]) -> GradientArena:
        """Return the arena of exactly these variables.  Collective when there is none yet."""
        for known in self._arenas:
            if [*map(id, known.variables)] == [*map(id, variables)]:
                return known
        made = GradientArena(strategy.arena(list(variables)), variables)
        self._arenas.append(made)
        self._steps.clear()
        return made

    def step(
        self, strategy: Strategy, target: Target, slots_of: Callable[[Variable], Slots], kernel: Kernel, call: Call
    ) -> SlicedStep | None:
        """Return what a sliced step needs, or None where one cannot be made: the same on all ranks.

        Collective for a target that is new, or when an arena has been made since.
        """
        if target not in self._steps:
            call.agree("prepare an update")
            slots = [slots_of(var) for var in target.variables]
            self._steps[target] = self._new_step(strategy, target.variables, slots, kernel)
            call.expect_more()
        return self._steps[target]

    def _new_step(
        self, strategy: Strategy, variables: tuple[Variable, ...], slots: Sequence[Slots], kernel: Kernel
    ) -> SlicedStep | None:
        communicator = strategy.extended.communicator
        one_node = communicator.size > 1 and max(communicator.node_of) == 0
        if not one_node or len({*map(id, variables)}) < len(variables):
            return None
        if not all(map(_lives_in_shared_memory, [*variables, *(slot for beside in slots for slot in beside.values())])):
            return None
        gradients = next((known for known in reversed(self._arenas) if known.covers(variables)), None)
        if gradients is None and self._made < _MOST_ARENAS:
            self._made += 1
            gradients = self.arena(strategy, variables)
            if not gradients.arena.is_shared:
                self._arenas.remove(gradients)  # of no use here: its memory comes free
        if self._failures is None:
            self._failures = communicator.shared(ALIGNMENT)
        if gradients is None or not (gradients.arena.is_shared and self._failures.is_shared):
            return None
        runs = [
            Run(
                var.dtype,
                var.local_view.nbytes,
                _place_of(var),
                gradients.place_of(var),
                {name: _place_of(slot) for name, slot in beside.items()},
            )
            for var, beside in zip(variables, slots, strict=True)
        ]
        one_of_each_dtype = {run.dtype: run for run in runs}.values()
        merged = all(_leaves_zeros_alone(kernel, run, self._scratch) for run in one_of_each_dtype)
        update = SlicedUpdate(runs, communicator, self._failures, self._scratch, merged)
        return SlicedStep(gradients, variables, update)


def adds_in_rank_order(extended: StrategyExtended) -> bool:
    """Return whether a reduction by this strategy is our own, which one need not call to have its result."""
    kind = type(extended)
    own = kind.batch_reduce_to is StrategyExtended.batch_reduce_to and kind.update is StrategyExtended.update
    return own and type(extended.cross_device_ops) in _IN_RANK_ORDER


def _lives_in_shared_memory(var: Variable) -> bool:
    kept_equal = var.synchronization is VariableSynchronization.ON_WRITE
    return kept_equal and var.dtype in _DTYPES and var.block is not None


def _place_of(var: Variable) -> Place:
    assert var.block is not None
    return Place(var.block.slab.segments, var.block.offset)


def _leaves_zeros_alone(kernel: Kernel, run: Run, scratch: Scratch) -> bool:
    """Return whether a step makes zeros of zeros: then padding between variables may be part of it."""
    zeros = {name: np.zeros(1, run.dtype) for name in ("parameter", *run.slots)}
    parameter = zeros.pop("parameter")
    with np.errstate(all="ignore"):
        kernel(parameter, np.zeros(1, run.dtype), zeros, scratch.of(run.dtype, 1)[:-1])
    return not parameter.any() and not any(slot.any() for slot in zeros.values())


def dense_gradients(gradients: Sequence[Any], target: Target, where: str) -> list[Array] | None:
    """Return what this rank brings for each variable of `target`; None unless all are arrays of its dtype."""
    arrays = []
    for gradient, (_, dtype) in zip(gradients, target.layouts, strict=True):
        array = gradient
        if type(gradient) is not np.ndarray or gradient.dtype is not dtype:
            component = contribution(gradient)
            if isinstance(gradient, Mirrored) or isinstance(component, IndexedSlices) or is_on_device(component):
                return None
            array = to_reducible(component, where)
            if array.dtype != dtype:
                return None
        arrays.append(array)
    return arrays


def _gaps(parts: Sequence[slice], size: int) -> list[slice]:
    """Return what is not in `parts`, which are in order, of so many elements."""
    starts, stops = [0, *(part.stop for part in parts)], [*(part.start for part in parts), size]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
