"""Restoring an optimizer: its slots are found by the variables that they stand beside, and made where they are missing.

A program restores before its first step, when most optimizers have no slots yet.  The checkpoint knows where each
variable that has slots stands in it; those here that stand at the same paths are given theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.checkpoint.state import slot_path
from mpistrategy.checkpoint.storage.manifest import Item
from mpistrategy.checkpoint.storage.plain_values import below, from_json
from mpistrategy.training.optimizer import Optimizer
from mpistrategy.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrategy.checkpoint.fitting import Fit


class OptimizerFit:
    """One optimizer beside what a checkpoint holds of it.

    Args:
        fit: where problems and arrays are noted.
        path: where it stands.
        item: what the checkpoint says of it.
        optimizer: the one here.
    """

    def __init__(self, fit: Fit, path: str, item: Item, optimizer: Optimizer) -> None:
        self._fit = fit
        self._path = path
        self._item = item
        self._optimizer = optimizer
        self._variables: list[Variable] = []

    def restore(self) -> Callable[[], Any]:
        """Note which arrays are needed; return what does the rest."""
        fit, optimizer, more = self._fit, self._optimizer, self._item.more
        here = (type(optimizer).__name__, sorted(optimizer.slot_values))
        there = (more["class"], sorted(more["slots"]))
        if here != there:
            return fit.problem(
                self._path, f"{there[0]} with slots {there[1]} in the checkpoint, {here[0]} {here[1]} here"
            )
        settings = self._settings()
        self._variables = [self._variable(number, path) for number, path in enumerate(more["variables"])]
        steps = fit.manifest.items.get(below(self._path, "iterations"))
        like = np.zeros((), np.int64) if optimizer.iterations is None else optimizer.iterations.local_view
        if steps is not None and not fit.has_layout(steps, like):
            fit.problem(below(self._path, "iterations"), f"no number of steps, but {steps.kind} {list(steps.shape)}")
        if fit.problems or settings is None:
            return lambda: optimizer
        if len({id(var) for var in self._variables}) < len(self._variables):
            raise ValueError("a variable that has slots twice")
        if steps is not None or self._variables:
            fit.prepare.append(self._build)
        if steps is not None:
            fit.fetched[below(self._path, "iterations")] = self._steps
        for number, var in enumerate(self._variables):
            for name in optimizer.slot_values:
                self._note_slot(slot_path(self._path, number, name), var, name)

        def finish() -> Any:
            optimizer.learning_rate, optimizer.skipped_steps = settings
            self._begin_anew(has_steps=steps is not None)
            return optimizer

        return finish

    def _settings(self) -> tuple[float, int] | None:
        path = below(self._path, "settings")
        found = from_json(self._fit.manifest.items[path].values[0])
        rate, skipped = found["learning_rate"], found["skipped_steps"]
        if not (type(rate) is float and 0 < rate < float("inf") and type(skipped) is int):
            self._fit.problem(path, f"{found!r:.80} in the checkpoint")
            return None
        return rate, skipped

    def _variable(self, number: int, path: str | None) -> Variable:
        """Return the variable that has the slots of this number."""
        slotted = self._optimizer.slotted()
        found = self._fit.state.live.get(path) if path is not None else None
        if path is None and number < len(slotted):
            found = slotted[number]
        if not isinstance(found, Variable):
            self._fit.problem(
                self._path,
                f"slots of variable number {number}, which is not in the checkpoint; put it there, or build(variables) "
                "before restoring",
            )
        return found  # type: ignore[return-value]  # a problem is the end of it

    def _note_slot(self, path: str, var: Variable, name: str) -> None:
        item = self._fit.manifest.items.get(path)
        if item is None or not self._fit.has_layout(item, var.local_view):
            self._fit.problem(path, f"no slot of shape {list(var.shape)} in the checkpoint, as {var.name!r} needs")
            return
        self._fit.fetched[path] = lambda: self._optimizer.slots_of(var)[name]

    def _steps(self) -> Variable:
        assert self._optimizer.iterations is not None
        return self._optimizer.iterations

    def _build(self) -> None:
        """Make what is missing.  Collective."""
        strategy = self._variables[0].strategy if self._variables else self._fit.strategy
        with strategy.scope():
            self._optimizer.build(self._variables)

    def _begin_anew(self, *, has_steps: bool) -> None:
        """Set back what the checkpoint, saved before it was made, has nothing of."""
        optimizer, restored = self._optimizer, {id(var) for var in self._variables}
        if not has_steps and optimizer.iterations is not None:
            store(optimizer.iterations, np.zeros((), optimizer.iterations.dtype))
        for var in optimizer.slotted():
            for name, slot in optimizer.slots_of(var).items():
                if id(var) not in restored:
                    store(slot, np.full(slot.shape, optimizer.slot_values[name], slot.dtype))


def store(var: Variable, array: Any) -> None:
    """Write into this rank's copy of a variable, whatever its policy says."""
    if var.strategy.extended.is_local:
        var.assign(array)
    else:
        var.strategy.extended.update(var, lambda copy: copy.assign(array))
