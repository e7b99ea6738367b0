"""Who wants to know when this process enters and leaves collectives.

While nobody does, nothing of this runs: every route through a collective, those of plans included, sets
`Guard.current`, which is a plain attribute.  The first watcher puts a descriptor of this name on the class, the last
takes it away.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.flight_recorder import NUMBER, WHAT
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.signature import Signature

_ATTRIBUTE = "current"


class Watcher(Protocol):
    """Is told of collectives in the thread that makes them; calls inside a call are part of it."""

    def entered(self, guard: Guard, call: Call) -> None:
        """A collective begins."""

    def left(self, guard: Guard, call: Call) -> None:
        """The collective has ended, with a result or an exception."""


_watchers: tuple[Watcher, ...] = ()


def watch(watcher: Watcher) -> None:
    """Tell `watcher` of the collectives of all strategies of this process, from now on."""
    global _watchers
    _watchers = (*_watchers, watcher)
    setattr(Guard, _ATTRIBUTE, _Current())


def unwatch(watcher: Watcher) -> None:
    """Tell `watcher` no more."""
    global _watchers
    _watchers = tuple(each for each in _watchers if each is not watcher)
    if not _watchers and _ATTRIBUTE in vars(Guard):
        delattr(Guard, _ATTRIBUTE)


def described(guard: Guard, call: Call) -> tuple[int, Signature | None]:
    """Return the number of the collective that `guard` is in, or was in last, and what is known of it.

    The number is 0 in a strategy of one rank, which counts none.  What is known may come while it lasts.
    """
    entry = guard.record.last()
    if entry is None:
        return 0, call.signature
    if call.is_leaf:  # one of those that were worked out before
        return entry[NUMBER], getattr(entry[WHAT], "signature", None)
    return (entry[NUMBER] if entry[WHAT] is call else 0), call.signature


class _Current:
    """What `Guard.current` is while somebody watches; the value stays where the plain attribute has it."""

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
    for watcher in _watchers:
        try:
            getattr(watcher, what)(guard, call)
        except Exception as error:  # a mistake in a watcher must not end the job
            unwatch(watcher)
            sys.stderr.write(f"mpistrategy's {type(watcher).__name__} has failed, and is off now: {error!r}\n")
