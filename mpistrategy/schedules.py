"""Learning-rate schedules: functions of the number of steps made so far, as in Keras.

An optimizer takes any function of a step as its `learning_rate`; these are the usual schedules.  They have no state:
the step is the optimizer's, which checkpoints save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.objects.settings import Fixed, Settable, checked_count, checked_number

__all__ = [
    "Constant",
    "CosineDecay",
    "PiecewiseConstantDecay",
    "Warmup",
]


def __dir__() -> list[str]:
    return list(__all__)


#: Returns the learning rate, 0 or more, of the step after this many; the same on all ranks.
Schedule: TypeAlias = Callable[[int], float]


class Constant(Settable):
    """The same learning rate at every step; to begin a `Warmup` with, or in place of another schedule.

    Args:
        learning_rate: a number from 0 on.

    Raises:
        OptionError, OptionTypeError: for anything else.

    >>> Constant(0.1)(step=1000)
    0.1
    """

    learning_rate: Fixed[float] = Fixed()

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = checked_number("Constant", "learning_rate", learning_rate)

    def __call__(self, step: int) -> float:
        """Return the learning rate."""
        return self.learning_rate


class CosineDecay(Settable):
    """From `initial_learning_rate` to `alpha` times that, along half a cosine; constant afterwards.

    Args:
        initial_learning_rate: at the first step after the warm-up, or, with a `warmup_target`, where that begins.
        decay_steps: how many steps the decay takes.
        alpha: the last learning rate, as a part of the greatest.
        warmup_target: the learning rate at the end of the warm-up, where the decay begins; None: no warm-up.
        warmup_steps: how many steps the warm-up takes, in which the learning rate grows evenly.

    Raises:
        OptionError, OptionTypeError: for negative numbers, for decay_steps below 1, and for values that are no numbers.

    >>> schedule = CosineDecay(0.0, decay_steps=100, warmup_target=0.1, warmup_steps=10)
    >>> [round(schedule(step), 3) for step in (0, 5, 10, 60, 110, 1000)]
    [0.0, 0.05, 0.1, 0.05, 0.0, 0.0]
    """

    initial_learning_rate: Fixed[float] = Fixed()
    decay_steps: Fixed[int] = Fixed()
    alpha: Fixed[float] = Fixed()
    warmup_target: Fixed[float | None] = Fixed()
    warmup_steps: Fixed[int] = Fixed()

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        alpha: float = 0.0,
        *,
        warmup_target: float | None = None,
        warmup_steps: int = 0,
    ) -> None:
        kind = "CosineDecay"
        self.initial_learning_rate = checked_number(kind, "initial_learning_rate", initial_learning_rate)
        self.decay_steps = checked_count(kind, "decay_steps", decay_steps)
        self.alpha = checked_number(kind, "alpha", alpha)
        self.warmup_target = None if warmup_target is None else checked_number(kind, "warmup_target", warmup_target)
        self.warmup_steps = checked_count(kind, "warmup_steps", warmup_steps, least=0)

    def __call__(self, step: int) -> float:
        """Return the learning rate of the step after this many."""
        greatest = self.initial_learning_rate
        if self.warmup_target is not None:
            if step < self.warmup_steps:
                return greatest + (self.warmup_target - greatest) * step / self.warmup_steps
            greatest, step = self.warmup_target, step - self.warmup_steps
        part = min(step, self.decay_steps) / self.decay_steps
        return greatest * ((1 - self.alpha) * 0.5 * (1 + math.cos(math.pi * part)) + self.alpha)


class PiecewiseConstantDecay(Settable):
    """One learning rate up to each boundary, and another after the last.

    Args:
        boundaries: step numbers, growing; a boundary belongs to the piece before it.
        values: a learning rate for each piece: one more than boundaries.

    Raises:
        OptionError, OptionTypeError: for boundaries that do not grow, another number of values, and values that are no
            numbers from 0 on.

    >>> schedule = PiecewiseConstantDecay([100, 200], [0.1, 0.01, 0.001])
    >>> [schedule(step) for step in (0, 100, 101, 201)]
    [0.1, 0.1, 0.01, 0.001]
    """

    boundaries: Fixed[tuple[int, ...]] = Fixed()
    values: Fixed[tuple[float, ...]] = Fixed()

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]) -> None:
        kind = "PiecewiseConstantDecay"
        for name, numbers in (("boundaries", boundaries), ("values", values)):
            if not isinstance(numbers, (list, tuple)):
                raise OptionTypeError.at(kind, found=f"{name}={numbers!r}", expected="a list of numbers")
        self.boundaries = tuple(checked_count(kind, "boundaries", boundary, least=0) for boundary in boundaries)
        self.values = tuple(checked_number(kind, "values", value) for value in values)
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise OptionError.at(kind, found=f"boundaries={list(boundaries)}", expected="growing step numbers")
        if len(self.values) != len(self.boundaries) + 1:
            raise OptionError.at(
                kind,
                found=f"{len(self.values)} values for {len(self.boundaries)} boundaries",
                expected="one value more than boundaries",
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of the step after this many."""
        return self.values[sum(step > boundary for boundary in self.boundaries)]


class Warmup(Settable):
    """A learning rate that grows evenly up to another schedule's, over some steps, and follows that afterwards.

    Args:
        then: the schedule after the warm-up, which begins at its step 0; or a number.
        steps: how many steps the warm-up takes.
        start: the first learning rate.

    Raises:
        OptionError, OptionTypeError: for steps below 1, a negative start, and a schedule that is neither.

    >>> schedule = Warmup(PiecewiseConstantDecay([10], [0.1, 0.01]), steps=4)
    >>> [round(schedule(step), 3) for step in (0, 2, 4, 14, 15)]
    [0.0, 0.05, 0.1, 0.1, 0.01]
    """

    then: Fixed[Schedule] = Fixed()
    steps: Fixed[int] = Fixed()
    start: Fixed[float] = Fixed()

    def __init__(self, then: Schedule | float, steps: int, start: float = 0.0) -> None:
        self.then = then if callable(then) else Constant(checked_number("Warmup", "then", then))
        self.steps = checked_count("Warmup", "steps", steps)
        self.start = checked_number("Warmup", "start", start)

    def __call__(self, step: int) -> float:
        """Return the learning rate of the step after this many."""
        if step >= self.steps:
            return self.then(step - self.steps)
        return self.start + (self.then(0) - self.start) * step / self.steps
