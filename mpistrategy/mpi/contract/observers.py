"""The observers of this process: they are told of its collectives, its steps, and the spans that the program names.

Without an observer, collectives and steps run no code of this file.  Every route through a collective sets
`Guard.current`, a plain attribute; the first observer puts a descriptor of that name on the class, and stands around
the calls of step functions and the writing of checkpoints.  The last observer takes both away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from mpistrategy.mpi.contract import public_calls
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.contract.flight_recorder import NUMBER, WHAT
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.public_calls import STEP, WRITING, PublicCall

_ATTRIBUTE = "current"


class Observer(Protocol):
    """Its methods run in the thread that they tell of; a collective inside a collective is a part of it."""

    def entered(self, guard: Guard, call: Call) -> None:
        """A collective begins."""

    def left(self, guard: Guard, call: Call) -> None:
        """The collective has ended, with a result or an exception."""

    def begin(self, kind: str, name: str) -> Any:
        """A step or a span begins; returns the argument of `end`."""

    def end(self, token: Any) -> None:
        """The step or the span has ended."""


_observers: tuple[Observer, ...] = ()


def watch(observer: Observer) -> None:
    """Tell `observer` of everything from now on."""
    global _observers
    if not _observers:
        setattr(Guard, _ATTRIBUTE, _Current())
        public_calls.intercept((STEP, WRITING), _interval)
    _observers = (*_observers, observer)


def unwatch(observer: Observer) -> None:
    """Tell `observer` no more."""
    global _observers
    before, _observers = _observers, tuple(each for each in _observers if each is not observer)
    if before and not _observers:
        delattr(Guard, _ATTRIBUTE)
        public_calls.intercept((STEP, WRITING), None)


def is_watched() -> bool:
    """Return whether there is an observer."""
    return bool(_observers)


def described(guard: Guard, call: Call) -> tuple[int, Signature | None]:
    """Return the number of the collective that `guard` is in, or was in last, and what is known of it.

    The number is 0 in a strategy of one rank, which counts none.  The signature may come while the collective lasts.
    """
    entry = guard.record.last()
    return (entry[NUMBER] if entry is not None and entry[WHAT] is call else 0), call.signature


class Interval:
    """A step or a span, as a context: told to the observers that there are at its beginning.

    Args:
        kind: "step" or "span".
        name: the name.
    """

    __slots__ = ("_kind", "_name", "_told")

    def __init__(self, kind: str, name: str) -> None:
        self._kind = kind
        self._name = name
        self._told: list[tuple[Observer, Any]] = []

    def __enter__(self) -> None:
        for observer in _observers:
            self._told.append((observer, observer.begin(self._kind, self._name)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._told:  # the last one first, for observers that keep a stack
            observer, token = self._told.pop()
            observer.end(token)


def _interval(call: PublicCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if call.kind == WRITING:
        interval = Interval("span", WRITING)
    else:
        fn: Callable[..., Any] = args[1] if len(args) > 1 else kwargs["fn"]
        interval = Interval(STEP, getattr(fn, "__name__", type(fn).__name__))
    with interval:
        return call.function(*args, **kwargs)


class _Current:
    """`Guard.current` while there are observers; the value stays where the plain attribute has it."""

    def __get__(self, guard: Guard | None, kind: type) -> Any:
        return self if guard is None else guard.__dict__[_ATTRIBUTE]

    def __set__(self, guard: Guard, call: Call | None) -> None:
        own = guard.__dict__
        before = own.get(_ATTRIBUTE)
        own[_ATTRIBUTE] = call
        if before is None:
            if call is not None:
                _tell("entered", guard, call)
        elif call is None:
            _tell("left", guard, before)


def _tell(what: str, guard: Guard, call: Call) -> None:
    for observer in _observers:
        try:
            getattr(observer, what)(guard, call)
        except Exception as error:  # a mistake in an observer must not end the job
            unwatch(observer)
            sys.stderr.write(f"mpistrategy's {type(observer).__name__} has failed, and is off now: {error!r}\n")
