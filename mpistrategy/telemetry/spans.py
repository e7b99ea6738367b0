"""Those who are told what the program does: collectives, steps, and spans that the program names itself.

Nothing of this runs for collectives and steps while nobody listens: what tells of them is put in place when the first
listener comes, and taken away with the last.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, Protocol, Self

from mpistrategy.errors import OptionTypeError
from mpistrategy.mpi.contract import observers
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.strategy.extended import StrategyExtended

_STEP = "call_for_each_replica"


class Listener(Protocol):
    """Is told in the thread where things happen."""

    def entered(self, guard: Guard, call: Call) -> None:
        """A collective begins."""

    def left(self, guard: Guard, call: Call) -> None:
        """It has ended."""

    def begin(self, kind: str, name: str) -> Any:
        """A step or a span begins; returns what `end` is given."""

    def end(self, token: Any) -> None:
        """It has ended."""


class Switched(ABC):
    """What is on between `start` and `stop`, or in a with block."""

    @abstractmethod
    def start(self) -> None:
        """Switch it on."""

    @abstractmethod
    def stop(self) -> None:
        """Switch it off."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


_listeners: tuple[Listener, ...] = ()
_step: Callable[..., Any] = getattr(StrategyExtended, _STEP)


def listen(listener: Listener) -> None:
    """Tell `listener` of everything from now on."""
    global _listeners
    if not _listeners:
        setattr(StrategyExtended, _STEP, _told_of)
    _listeners = (*_listeners, listener)
    observers.watch(listener)


def ignore(listener: Listener) -> None:
    """Tell `listener` no more."""
    global _listeners
    observers.unwatch(listener)
    _listeners = tuple(each for each in _listeners if each is not listener)
    if not _listeners and vars(StrategyExtended)[_STEP] is _told_of:
        setattr(StrategyExtended, _STEP, _step)


@functools.wraps(_step)
def _told_of(extended: StrategyExtended, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Interval("step", getattr(fn, "__name__", type(fn).__name__)):
        return _step(extended, fn, *args, **kwargs)


class _Interval:
    """From its beginning to its end, told to those who listen at its beginning."""

    __slots__ = ("_kind", "_name", "_told")

    def __init__(self, kind: str, name: str) -> None:
        self._kind = kind
        self._name = name
        self._told: list[tuple[Listener, Any]] = []

    def __enter__(self) -> None:
        for listener in _listeners:
            self._told.append((listener, listener.begin(self._kind, self._name)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._told:  # the other way round, for those that keep a stack
            listener, token = self._told.pop()
            listener.end(token)


class Span(ContextDecorator):
    """A part of the program with a name; `span` makes it.

    Args:
        name: the name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._intervals: list[_Interval] = []

    def _recreate_cm(self) -> Self:
        return type(self)(self._name)  # a function may be called by several threads, and by itself

    def __enter__(self) -> Self:
        if _listeners:
            self._intervals.append(_Interval("span", self._name))
            self._intervals[-1].__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._intervals:
            self._intervals.pop().__exit__(kind, error, trace)


def span(name: str) -> Span:
    """Name a part of the program in traces, as a context manager or as a decorator of a function.

    While nobody records, entering and leaving it takes a fraction of a microsecond.  Rank-local, in any context.

    Args:
        name: what traces show.

    Raises:
        OptionTypeError: for a name that is no string.

    >>> import mpistrategy as ms
    >>> with ms.telemetry.span("load"):
    ...     total = sum(range(5))
    >>> @ms.telemetry.span("double")
    ... def double(x):
    ...     return 2 * x
    >>> double(total)
    20
    """
    if not isinstance(name, str):
        raise OptionTypeError.at("telemetry.span", found=f"{name!r}", expected="a string")
    return Span(name)
