"""Variables, gradient accumulators and optimizers.

A program restores before its first step, when most optimizers have no slots yet.  The checkpoint tells at which path
each variable with slots is; the variables here at the same paths are given slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from mpistrategy.arrays.convert import host_array, on_device_of, placed_as
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.state import UNDECIDED, Fit, Kind, Restore, State, has_state
from mpistrategy.checkpoint.storage.manifest import COMBINED, ONE, Item
from mpistrategy.checkpoint.storage.plain_values import ABSENT, below, to_json
from mpistrategy.checkpoint.storage.shards import dtype_of, dtype_text, is_numeric
from mpistrategy.errors import OptionError
from mpistrategy.gradients import GradientAccumulator
from mpistrategy.options import VariableAggregation, VariableSynchronization
from mpistrategy.training.optimizer import Optimizer
from mpistrategy.variables.variable import Variable

_SUM = COMBINED[0]


class OneVariable(Kind):
    """A Variable; restored in place."""

    name = "variable"
    types: ClassVar[tuple[type, ...]] = (Variable,)

    def add(self, entries: State, path: str, value: Variable) -> None:
        _add_variable(entries, path, value)

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if fresh:
            value = fit.here.live.get(path, ABSENT)
        fits = isinstance(value, Variable) and fit.has_layout(path, item, value.local_view)
        if not fit.knows_own(path, item) or not fit.expect(fits, path, item, value):
            return lambda: value
        if item.copies in COMBINED and _has_own_copies(value):
            return fit.problem(path, f"aggregation {item.copies} in the checkpoint, NONE here")
        fit.fetched[path] = lambda: value
        return lambda: value

    def variables(self, value: Variable) -> Iterable[Variable]:
        return (value,)


class Accumulator(Kind):
    """A gradient accumulator: the sums, and how many steps they are of.

    At the end of a group of steps the optimizer gets the total of all ranks' sums.  So the sums are saved as an ON_READ
    variable with aggregation SUM is: on another number of ranks, each rank gets a part of the total.
    """

    name = "accumulator"
    types: ClassVar[tuple[type, ...]] = (GradientAccumulator,)

    def add(self, entries: State, path: str, value: GradientAccumulator) -> None:
        count, dtypes = value._position
        names = [None if dtype is None else dtype_text(dtype, entries.where) for dtype in dtypes]
        entries.items[path] = Item(self.name, more={"steps": value.steps, "count": count, "dtypes": names})
        copies = ONE if entries.strategy.extended._is_local else _SUM
        for number, total in enumerate(value._partial_sums):
            if total is not None:
                entries.add_array(below(path, number), "array", copies, host_array(total))

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        if not fit.expect(isinstance(value, GradientAccumulator), path, item, value):
            return lambda: None
        steps, count = item.more["steps"], item.more["count"]
        dtypes = [None if text is None else dtype_of(text) for text in item.more["dtypes"]]
        if steps != value.steps:
            return fit.problem(path, f"steps={steps!r} in the checkpoint, steps={value.steps} here")
        places = [None if dtype is None else below(path, number) for number, dtype in enumerate(dtypes)]
        paths = [place for place in places if place is not None]
        items = [fit.manifest.items[each] for each in paths]
        if type(count) is not int or not 0 <= count < steps or bool(count) != bool(dtypes):
            raise ValueError(f"{count!r} steps of {steps}, and {len(items)} sums")
        if not all(each.is_array and each.copies in (ONE, _SUM) and is_numeric(dtype_of(each.dtype)) for each in items):
            raise ValueError("sums of another kind than numbers to be added")
        fit.fetched |= dict.fromkeys(paths)
        fit.shared.update(paths)

        def restore() -> Any:
            value._go_on_with(count, [None if each is None else fit.staged.pop(each) for each in places], dtypes)
            return value

        return restore


class AnyOptimizer(Kind):
    """An optimizer: settings, steps, and slots."""

    name = "optimizer"
    types: ClassVar[tuple[type, ...]] = (Optimizer,)

    def add(self, entries: State, path: str, value: Optimizer) -> None:
        entries.items[path] = Item(self.name)  # reserves its position in the table
        entries.add_last(lambda: self._add(entries, path, value))  # the variables may be entered after it

    def _add(self, entries: State, path: str, optimizer: Optimizer) -> None:
        slotted = optimizer._slots.by_id.values()
        more = {
            "class": type(optimizer).__name__,
            "variables": [entries.path_of(var) for var, _ in slotted],
            "slots": list(optimizer.slot_values),
        }
        entries.items[path] = Item(self.name, more=more)
        settings = {"learning_rate": float(optimizer.learning_rate), "skipped_steps": int(optimizer.skipped_steps)}
        entries.add_value(below(path, "settings"), "plain", UNDECIDED, to_json(settings))
        if optimizer.iterations is not None:
            _add_variable(entries, below(path, "iterations"), optimizer.iterations)
        for number, (_, slots) in enumerate(slotted):
            for name, slot in slots.items():
                _add_variable(entries, _slot_path(path, number, name), slot)
        if has_state(optimizer.schedule):
            entries.add(below(path, "schedule"), optimizer.schedule)

    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        here = fit.here.items.get(path)
        if not fit.expect(here is not None and here.kind == self.name, path, item, value):
            return lambda: None
        return _OptimizerFit(fit, path, item, value).restore()

    def variables(self, value: Optimizer) -> Iterable[Variable]:
        if value.iterations is not None:
            yield value.iterations
        for var, slots in value._slots.by_id.values():
            yield from (var, *slots.values())


class _OptimizerFit:
    """One optimizer and what a checkpoint has of it.

    Args:
        fit: where problems and arrays are noted.
        path: where the optimizer is.
        item: what the checkpoint has at `path`.
        optimizer: the one here.
    """

    def __init__(self, fit: Fit, path: str, item: Item, optimizer: Optimizer) -> None:
        self._fit = fit
        self._path = path
        self._item = item
        self._optimizer = optimizer
        self._variables: list[Variable] = []

    def restore(self) -> Restore:
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
        if steps is not None and not fit.has_layout(below(self._path, "iterations"), steps, like):
            fit.problem(below(self._path, "iterations"), f"no number of steps, but {steps.kind} {list(steps.shape)}")
        elif steps is not None:
            fit.knows_own(below(self._path, "iterations"), steps)
        if fit.problems or settings is None:
            return lambda: optimizer
        if len({id(var) for var in self._variables}) < len(self._variables):
            raise ValueError("a variable that has slots twice")
        if self._must_build(has_steps=steps is not None):
            fit.prepare.append(self._build)
        if steps is not None:
            fit.fetched[below(self._path, "iterations")] = self._steps
        for number, var in enumerate(self._variables):
            for name in optimizer.slot_values:
                self._note_slot(_slot_path(self._path, number, name), var, name)

        schedule, path = optimizer.schedule, below(self._path, "schedule")
        load = fit.restore_of(path, schedule) if has_state(schedule) or path in fit.manifest.items else None

        def finish() -> Any:
            vars(optimizer).update(settings)  # they were checked
            if load is not None:
                load()
            self._reset(has_steps=steps is not None)
            return optimizer

        return finish

    def _settings(self) -> dict[str, Any] | None:
        """Return the attributes to set; a schedule sets the learning rate."""
        path = below(self._path, "settings")
        found = self._fit.first_value(path, self._fit.manifest.items[path])
        rate, skipped = found["learning_rate"], found["skipped_steps"]
        least = 0 if self._optimizer.schedule is None else -1  # a schedule may end at 0
        if not (type(rate) is float and least < rate < float("inf") and type(skipped) is int):
            self._fit.problem(path, f"{found!r:.80} in the checkpoint")
            return None
        return {"skipped_steps": skipped} | ({"learning_rate": rate} if self._optimizer.schedule is None else {})

    def _variable(self, number: int, path: str | None) -> Variable:
        """Return the variable that has the slots of this number."""
        slotted = [*self._optimizer._slots.by_id.values()]
        found = self._fit.here.live.get(path) if path is not None else None
        if path is None and number < len(slotted):
            found = slotted[number][0]
        if not isinstance(found, Variable):
            self._fit.problem(
                self._path,
                f"slots of variable number {number}, which is not in the checkpoint; put it there, or build(variables) "
                "before restoring",
            )
        return found  # type: ignore[return-value]  # after a problem nothing is restored

    def _note_slot(self, path: str, var: Variable, name: str) -> None:
        item = self._fit.manifest.items.get(path)
        if item is not None and not self._fit.knows_own(path, item):
            return
        if item is None or not self._fit.has_layout(path, item, var.local_view):
            self._fit.problem(path, f"no slot of shape {list(var.shape)} in the checkpoint, as {var.name!r} needs")
            return
        self._fit.fetched[path] = lambda: self._optimizer._slots.by_id[id(var)][1][name]

    def _steps(self) -> Variable:
        assert self._optimizer.iterations is not None
        return self._optimizer.iterations

    def _must_build(self, *, has_steps: bool) -> bool:
        """Return whether a counter or slots that the checkpoint has are missing here; equal on all ranks."""
        has_more = any(id(var) not in self._optimizer._slots.by_id for var in self._variables)
        return has_more or (self._optimizer.iterations is None and (has_steps or bool(self._variables)))

    def _build(self) -> None:
        """Make the missing slots and the counter.  Collective."""
        strategy = self._variables[0].strategy if self._variables else self._fit.strategy
        with strategy.scope():
            self._optimizer.build(self._variables)

    def _reset(self, *, has_steps: bool) -> None:
        """Give their first values to a counter and to slots that the optimizer did not have when it was saved."""
        optimizer, restored = self._optimizer, {id(var) for var in self._variables}
        if not has_steps and optimizer.iterations is not None:
            store(optimizer.iterations, np.zeros((), optimizer.iterations.dtype))
        for number, (_, slots) in optimizer._slots.by_id.items():
            for name, slot in slots.items():
                if number not in restored:
                    store(slot, np.full(slot.shape, optimizer.slot_values[name], slot.dtype))


def _add_variable(entries: State, path: str, var: Variable) -> None:
    copies = _copies_of(entries, var)
    entries.variables[path] = var
    entries.add_array(path, OneVariable.name, copies, var.local_view)


def _copies_of(entries: State, var: Variable) -> str:
    shared = entries.strategy.extended
    if var.strategy is not entries.strategy and not var.strategy.extended._is_local:
        raise OptionError.at(
            entries.where,
            found=f"{var.name!r}, of another strategy than the rest",
            expected="objects of one strategy",
            fix="Make a Checkpoint for each strategy.",
        )
    if var.strategy is not entries.strategy and shared.communicator.size > 1:
        return UNDECIDED  # a local variable: every rank has its own
    if var.synchronization is not VariableSynchronization.ON_READ:
        return ONE
    if _has_own_copies(var):
        return UNDECIDED
    if var.aggregation is VariableAggregation.NONE:
        return ONE
    return var.aggregation.name


def _has_own_copies(var: Variable) -> bool:
    """Return whether nothing says how the copies of a variable on several ranks belong together."""
    is_shared = var.synchronization is VariableSynchronization.ON_READ and not var.strategy.extended._is_local
    return is_shared and var.aggregation is VariableAggregation.NONE


def store(var: Variable, array: Array) -> None:
    """Write an ndarray of its dtype and shape into this rank's copy of a variable, whatever its policy is."""
    storage = var._storage
    if type(storage) is np.ndarray:
        storage[...] = array
    else:
        with on_device_of(storage):
            storage[...] = placed_as(array, storage)


def _slot_path(path: str, number: int, name: str) -> str:
    return below(below(below(path, "slots"), number), name)
