"""Slots: the variables that an optimizer keeps beside each of its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpistrategy.strategy.current import get_strategy
from mpistrategy.variables.variable import Variable


class Slots:
    """The slots of one optimizer.

    Args:
        owner: the name of the optimizer's class, for the slots' names.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        # With the variables themselves, so that their ids are nobody else's.
        self._slots: dict[int, tuple[Variable, dict[str, Variable]]] = {}

    def of(self, var: Variable) -> dict[str, Variable]:
        """Return the slots of `var` by name; empty before they are made."""
        known = self._slots.get(id(var))
        return dict(known[1]) if known is not None else {}

    def everything(self) -> tuple[list[Variable], list[Variable]]:
        """Return the variables that have been given slots (those of an optimizer without any, too), and all slots."""
        known = self._slots.values()
        return [var for var, _ in known], [slot for _, slots in known for slot in slots.values()]

    def make(self, variables: Sequence[Variable], values: Mapping[str, float]) -> None:
        """Make the slots that are missing, filled with `values`.  Collective; in the strategy's scope or a step."""
        missing = {id(var): var for var in variables if id(var) not in self._slots}
        made: dict[int, dict[str, Variable]] = {number: {} for number in missing}
        # Slot by slot, so that the slots of one name lie one after another, as their variables do.
        for name, value in values.items():
            for number, var in missing.items():
                made[number][name] = self._new(name, value, var)
        self._slots.update({number: (var, made[number]) for number, var in missing.items()})

    def _new(self, name: str, value: float, var: Variable) -> Variable:
        def create() -> Variable:
            filled = np.broadcast_to(np.asarray(value, var.dtype), var.shape)
            return Variable(filled, trainable=False, name=f"{var.name}/{self._owner}/{name}")

        strategy = get_strategy()
        if strategy.is_default:
            return create()
        with strategy.extended.colocate_vars_with(var):
            return create()
