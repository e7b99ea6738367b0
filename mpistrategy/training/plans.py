"""What an optimizer keeps for its variables: a plan for each list of variables of a step.

A plan is found by one look-up.  Its variables have been checked.  After the first step it also holds prepared work: the
reduction of ordinary gradients, and the update of this rank's copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_cupy, is_on_device
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import Mirrored
from mpistrategy.errors import EmptyBatchError, OptionError, OptionTypeError
from mpistrategy.reduction.plan import ArraysPlan
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.training.checks import check_variable, checked_gradient
from mpistrategy.training.gpu_update import FusedUpdate, can_be_fused
from mpistrategy.training.kernels import ChangedMemory, FlatUpdate, Scratch
from mpistrategy.training.sliced import SlicedStep
from mpistrategy.variables.variable import Variable

#: How many plans an optimizer keeps.
_MOST_PLANS = 32
_PAIRS = "an iterable of (gradient, variable) pairs"


class StepPlan:
    """The plan of a step: its variables that have gradients, which have been checked.

    Args:
        pairs: the gradients and variables of the step; gradients that are None are left out.
        strategy: the strategy that keeps the variables.
        where: the public call.

    Attributes:
        variables: the variables with gradients, in the order of the pairs.
        strategy: as given.
        layouts: the dtypes and shapes of the variables.
        is_usual: whether the strategy reduces and updates as `StrategyExtended` does, so that it need not be asked.
        is_on_host, is_on_gpu: whether all its variables are there.
        slot_names: the names of the slots; None before they are made.
        key: values that the next attributes depend on, besides the variables; `Optimizer` compares it at each step.
        sliced: the sliced step of ordinary gradients; None where there is none.
        reduction: how ordinary gradients are reduced otherwise; None where the strategy is asked.
        reduces_nothing: whether ordinary gradients are their own reduction: of one replica.
        updates: how kernels update this rank's copies: the number of each variable, and its update.
        fused: the numbers of variables that are updated together, and the update of them.
        singles: the numbers of the variables that `Optimizer.update` updates one by one.
        sparse: the numbers, of `singles`, of variables of which only some rows change.
        changed: the memory of the variables and their slots.
        text: the variables, as ranks compare them.
    """

    def __init__(self, pairs: Sequence[Any], strategy: Strategy, where: str) -> None:
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise OptionTypeError.at(where, found=f"the element {pair!r}", expected=_PAIRS)
            var = pair[1]
            check_variable(var, strategy, where)
            if var.dtype.kind in "biu":
                raise OptionError.at(where, found=repr(var), expected="a Variable of a floating or complex dtype")
        # Numbered: two variables may have one shape, and their gradients must not be added to each other.
        numbered = [(number, var) for number, (gradient, var) in enumerate(pairs) if gradient is not None]
        if not numbered:
            raise EmptyBatchError.at(where, found="no gradients", expected="at least one (gradient, variable) pair")
        self.variables: tuple[Variable, ...] = tuple(var for _, var in numbered)
        self.strategy = strategy
        self.layouts: tuple[Any, ...] = tuple((var.dtype, var.shape) for var in self.variables)
        kind = type(strategy.extended)
        methods = kind.batch_reduce_to, kind.update
        self.is_usual: bool = methods == (StrategyExtended.batch_reduce_to, StrategyExtended.update)
        places = {is_on_device(var._storage) for var in self.variables}
        self.is_on_host: bool = True not in places
        self.is_on_gpu: bool = False not in places
        self.slot_names: Set[str] | None = None
        self.key: Any = None
        self.sliced: SlicedStep | None = None
        self.reduction: ArraysPlan | None = None
        self.reduces_nothing: bool = False
        self._all = [var for _, var in pairs]  # keeps the variables alive, whose ids find the plan
        self.text: str = ", ".join([f"{number}: {var._key}" for number, var in numbered])

    def use(self, slots: Sequence[Mapping[str, Variable]], scratch: Scratch, sparse: Set[int] = frozenset()) -> None:
        """Note how the variables are updated.

        Args:
            slots: the slots of each variable.
            scratch: temporary arrays for kernels.
            sparse: the numbers of the variables of which only some rows change.
        """
        memory = [{name: slot._storage for name, slot in beside.items()} for beside in slots]
        self.slot_names = memory[0].keys()
        arrays = [var._storage for var in self.variables]
        everything = [*arrays, *(slot for entry in memory for slot in entry.values())]
        self.changed: ChangedMemory = ChangedMemory(everything)
        self.updates: list[tuple[int, FlatUpdate]] = []
        self.fused: list[tuple[list[int], FusedUpdate]] = []
        self.singles: list[int] = []
        self.sparse: Set[int] = sparse
        are_apart = len({*map(id, arrays)}) == len(arrays)
        together: dict[Any, list[int]] = {}
        for number, array in enumerate(arrays):
            is_fused = are_apart and can_be_fused(array)
            # Complex dtypes are updated as a whole: the last bits of NumPy's products depend on the arrays' alignment.
            if number in sparse or array.dtype.kind != "f" or (is_on_device(array) and not is_fused):
                self.singles.append(number)
            elif is_fused:
                together.setdefault(array.dtype, []).append(number)
            else:
                self.updates.append((number, FlatUpdate(array, memory[number], scratch)))
        for numbers in together.values():
            fused = FusedUpdate([arrays[number] for number in numbers], [memory[number] for number in numbers])
            self.fused.append((numbers, fused))

    def ordinary(self, gradients: Sequence[Any], where: str) -> Sequence[Array] | None:
        """Return gradients as arrays of their variables' dtypes and place; None where they need another reduction.

        Raises:
            ShapeError, DTypeError, LeafError: for gradients that do not fit.
        """
        kinds = {*map(type, gradients)}
        are_cupys = self.is_on_gpu and len(kinds) == 1 and is_cupy(gradients[0])
        are_numpys = self.is_on_host and kinds == {np.ndarray}
        if (are_cupys or are_numpys) and self.layouts == tuple([(array.dtype, array.shape) for array in gradients]):
            return gradients
        arrays = [checked_gradient(*pair, where) for pair in zip(gradients, self.variables, strict=True)]
        if not self.is_on_host or any(isinstance(gradient, Mirrored) for gradient in gradients):
            return None
        pairs = zip(arrays, self.variables, strict=True)
        are_ordinary = all(type(array) is np.ndarray and array.dtype == var.dtype for array, var in pairs)
        return arrays if are_ordinary else None


def find_plan(
    plans: dict[tuple[int, ...], StepPlan], grads_and_vars: Any, strategy: Strategy, where: str
) -> tuple[Sequence[Any], StepPlan]:
    """Return the gradients that are not None, and the plan of their variables; make it, in place of the oldest."""
    if not isinstance(grads_and_vars, Iterable):
        raise OptionTypeError.at(where, found=f"{grads_and_vars!r}", expected=_PAIRS)
    pairs = list(grads_and_vars)
    try:  # the plan keeps all variables alive
        key = tuple([id(var) if gradient is not None else -id(var) for gradient, var in pairs])
    except (TypeError, ValueError):
        key = ()  # what are no pairs has no plan
    plan = plans.get(key)
    if plan is None or plan.strategy is not strategy:
        plan = StepPlan(pairs, strategy, where)
        while len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
    return [gradient for gradient, _ in pairs if gradient is not None], plan
