"""The settings of an optimizer: checked whenever they are set, by the constructor or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from mpistrategy.errors import OptionError, OptionTypeError, ReduceOpError
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.nearest import did_you_mean, refuses
from mpistrategy.objects.other_names import OF_OPTIMIZERS
from mpistrategy.objects.settings import Setting, checked_number, not_negative, positive
from mpistrategy.options import NonFinite, ReduceOp
from mpistrategy.training.nonfinite import checked_policy
from mpistrategy.variables.variable import Variable

_HINTS = {name: f"{hint[0].upper()}{hint[1:]}." for name, hint in OF_OPTIMIZERS.items()}
_HINTS |= {"lr": "Write learning_rate.", "clipnorm": "Write global_clipnorm."}

P = ParamSpec("P")
T = TypeVar("T")


def refuses_others(constructor: Callable[P, T]) -> Callable[P, T]:
    """Let a constructor say what to write for keywords of other libraries."""
    return refuses(**_HINTS)(constructor)


class Momentum(Setting[float]):
    """A number from 0 to 1; with 0 there is no slot."""

    def __init__(self) -> None:
        super().__init__(
            lambda where, name, value: checked_number(
                where, name, value, "a number from 0 to 1", lambda number: 0 <= number <= 1
            )
        )

    def __set__(self, instance: Any, value: Any) -> None:
        super().__set__(instance, value)
        instance.slot_values = {"momentum": 0.0} if instance.momentum else {}


class LearningRate(Setting[float]):
    """A positive number, or a function of the number of steps made so far; see `mpistrategy.schedules`.

    With a function, the attribute is the number that it returned for the latest step; for step 0 before the first.
    """

    def __init__(self) -> None:
        super().__init__(
            lambda where, name, value: checked_number(where, name, value, "a positive number, or a schedule", positive)
        )

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
    """Set the learning rate to what a schedule says after so many steps: a number from 0 on, as float or array."""
    found: Any = schedule(step)
    if getattr(found, "shape", None) == ():
        found = np.asarray(found)[()]  # an array of one number, of any library
    where, name = type(optimizer).__name__, f"learning_rate({step})"
    rate = checked_number(where, name, found, "a number from 0 on from the schedule", not_negative)
    optimizer.__dict__["learning_rate"] = rate


class Misnamed:
    """An attribute of other libraries: setting it names ours.

    Args:
        right: the name to write.

    Attributes:
        right: as above.
    """

    def __init__(self, right: str) -> None:
        self.right: str = right
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}; write {self.right!r}")

    def __set__(self, instance: object, value: object) -> None:
        raise OptionError.at(
            f"{type(instance).__name__}.{self._name}",
            found=f"an attribute that optimizers do not have, set to {value!r}",
            expected=f"{self.right!r}",
            fix=f"Write optimizer.{self.right} = {value!r}.",
        )


def declared(kind: type) -> set[str]:
    """Return the settings of a class and its bases: what they annotate, or check when it is set."""
    names: set[str] = set()
    for base in kind.__mro__:
        names.update(vars(base).get("__annotations__", ()))
        names.update(name for name, attribute in vars(base).items() if isinstance(attribute, Setting))
    return {name for name in names if not name.startswith("_")}


def counter() -> Setting[Variable | None]:
    """Return a setting that is a variable of one number, or None."""

    def check(where: str, name: str, value: Any) -> Variable | None:
        if value is not None and not (isinstance(value, Variable) and value.dtype.kind in "iuf" and value.shape == ()):
            raise OptionTypeError.at(where, found=f"{name}={value!r}", expected="a variable of one number, or None")
        return value

    return Setting(check)


def policy() -> Setting[NonFinite | None]:
    """Return a setting that is one of `mpistrategy.training.nonfinite.POLICIES`."""
    return Setting(lambda where, name, value: checked_policy(where, value))


def sum_or_mean() -> Setting[ReduceOp]:
    """Return a setting that is SUM or MEAN."""

    def check(where: str, name: str, value: Any) -> ReduceOp:
        expected = '"SUM" or "MEAN"'
        try:
            op = ReduceOp._parse(value, where)
        except ReduceOpError as error:  # it does not know the argument's name
            fix = did_you_mean(value, ("SUM", "MEAN"))
            raise ReduceOpError.at(where, found=f"{name}={value!r}", expected=expected, fix=fix) from error
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise OptionError.at(where, found=f"{name}={value!r}", expected=expected)
        return op

    return Setting(check)
