"""The settings of an optimizer: checked whenever they are set, by the constructor or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.errors import OptionTypeError
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.settings import Setting, checked_number, one_of
from mpistrategy.options import ReduceOp, VariableAggregation
from mpistrategy.variables.variable import Variable


class LearningRate(Setting[float]):
    """A positive number, or a function of the number of steps made so far; see `mpistrategy.schedules`.

    With a function, the attribute is the number that it returned for the latest step; for step 0 before the first.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        refuse_in_jax_trace(f"{type(instance).__name__}.learning_rate")
        return instance.__dict__["learning_rate"]

    def __set__(self, instance: Any, value: Any) -> None:
        if callable(value):
            counter = instance.__dict__.get("iterations")
            follow(instance, value, 0 if counter is None else int(counter.local_view))
        else:
            super().__set__(instance, value)
        instance.__dict__["schedule"] = value if callable(value) else None


def follow(optimizer: object, schedule: Callable[[int], float], step: int) -> None:
    """Set the learning rate to a schedule's value after so many steps: a number from 0 on, as float or array."""
    value: Any = schedule(step)
    if getattr(value, "shape", None) == ():
        value = np.asarray(value)[()]  # an array of one number, of any library
    where, name = type(optimizer).__name__, f"learning_rate({step})"
    rate = checked_number(where, name, value, "a number from 0 on from the schedule")
    optimizer.__dict__["learning_rate"] = rate


def checked_counter(where: str, name: str, value: Any) -> Variable:
    """Return `value`; raise OptionTypeError unless it is a variable of one number."""
    if not (isinstance(value, Variable) and value.dtype.kind in "iuf" and value.shape == ()):
        raise OptionTypeError.at(where, found=f"{name}={value!r}", expected="a variable of one number, or None")
    return value


def sum_or_mean(where: str, name: str, value: Any) -> ReduceOp:
    """Return SUM or MEAN for the operation, its name, or a VariableAggregation; raise OptionError for another one."""
    word = value.name if isinstance(value, (ReduceOp, VariableAggregation)) else value
    return ReduceOp[one_of(where, name, word, ("sum", "mean")).upper()]
