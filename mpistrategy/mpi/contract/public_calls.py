"""The methods that observers and planned faults can stand around: `collective` marks them.

A marked method stays as it was written and costs nothing.  `intercept` replaces the methods of some kinds on their
classes, and puts them back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import ArenaLike, IndexedSlices, Mirrored, contribution

#: The kind of what runs the step function on every replica.
STEP = "step"
#: The kind of what writes a rank's part of a checkpoint; observers are told of it as a span of this name.
WRITING = "write a checkpoint"

Given = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PublicCall:
    """A marked method.

    Attributes:
        function: the method, as it was written.
        kind: of `mpistrategy.mpi.faults.plans.KINDS`; STEP or WRITING.
        own: returns what a rank gets from a call that it does not make, given the arguments by name.
        memory: returns the array that a result was written to, given the arguments by name; None where it is returned.
    """

    function: Callable[..., Any]
    kind: str
    own: Callable[[Given], Any]
    memory: Callable[[Given], Array] | None

    def owner(self) -> Any:
        """Return the class that has the method."""
        return getattr(sys.modules[self.function.__module__], self.function.__qualname__.partition(".")[0])


#: Is given a marked method and its arguments, and returns the result of the call.
Hook = Callable[[PublicCall, tuple[Any, ...], Given], Any]

marked: list[PublicCall] = []
_hooks: dict[str, Hook] = {}


def collective(
    kind: str, own: Callable[[Given], Any] = lambda given: None, memory: Callable[[Given], Array] | None = None
) -> Callable[[F], F]:
    """Mark a public method that all ranks call together; see `PublicCall`.  Returns the method itself."""

    def mark(function: F) -> F:
        call = PublicCall(function, kind, own, memory)
        marked.append(call)
        # The class of a module that is loaded later does not exist yet.
        return function if kind not in _hooks else _through(_hooks[kind], call)  # type: ignore[return-value]

    return mark


def intercept(kinds: Collection[str], hook: Hook | None) -> None:
    """Call `hook` in place of all methods of these kinds; None puts the methods back."""
    for kind in kinds:
        if hook is None:
            _hooks.pop(kind, None)
        else:
            _hooks[kind] = hook
    for call in marked:
        if call.kind in kinds:
            method = call.function if hook is None else _through(hook, call)
            setattr(call.owner(), call.function.__name__, method)


def _through(hook: Hook, call: PublicCall) -> Callable[..., Any]:
    @functools.wraps(call.function)
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        return hook(call, args, kwargs)

    return intercepted


def own_value(name: str) -> Callable[[Given], Any]:
    """Return a function for `own` that returns this rank's argument `name`, in the form of a result."""
    return lambda given: _own(given[name])


def own_mirrored(name: str, of: str = "value") -> Callable[[Given], Any]:
    """Do `own_value` for a method that returns Mirrored; ``of="pairs"`` for lists of (value, destinations)."""

    def own(given: Given) -> Any:
        if of == "pairs":
            return [Mirrored((_own(value),)) for value, _ in given[name]]
        return Mirrored((_own(given[name]),))

    return own


def is_arena(value: Any) -> bool:
    """Return whether `value` is a `mpistrategy.Arena`."""
    return isinstance(value, ArenaLike)


def _own(value: Any) -> Any:
    return value.values if is_arena(value) else nest.map_structure(_own_leaf, value)


def _own_leaf(leaf: Any) -> Any:
    mine = contribution(leaf)
    if isinstance(mine, IndexedSlices):
        return mine
    return np.array(mine) if isinstance(mine, np.ndarray) else np.asarray(mine)[()]
