"""The public methods that all ranks call together: `collective` marks them for planned faults.

A marked method looks whether there is a hook, and does nothing else while there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import ArenaBase, IndexedSlices, Mirrored, contribution

Given = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PublicCall:
    """A marked method.

    Attributes:
        function: the method, as it was written.
        kind: of `mpistrategy.mpi.faults.plans.KINDS`.
        own: returns what a rank gets from a call that it does not make, given the arguments by name.
        memory: returns the array that a result was written to, given the arguments by name; None where it is returned.
    """

    function: Callable[..., Any]
    kind: str
    own: Callable[[Given], Any]
    memory: Callable[[Given], Array] | None


#: What is called in place of the marked methods, with the method and its arguments; it returns the result.
hooks: list[Callable[[PublicCall, tuple[Any, ...], Given], Any]] = []


def collective(
    kind: str, own: Callable[[Given], Any] = lambda given: None, memory: Callable[[Given], Array] | None = None
) -> Callable[[F], F]:
    """Mark a public method that all ranks call together; see `PublicCall`."""

    def mark(function: F) -> F:
        call = PublicCall(function, kind, own, memory)

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            return hooks[0](call, args, kwargs) if hooks else function(*args, **kwargs)

        return marked  # type: ignore[return-value]

    return mark


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
    return isinstance(value, ArenaBase)


def _own(value: Any) -> Any:
    return value.values if is_arena(value) else nest.map_structure(_own_leaf, value)


def _own_leaf(leaf: Any) -> Any:
    mine = contribution(leaf)
    if isinstance(mine, IndexedSlices):
        return mine
    return np.array(mine) if isinstance(mine, np.ndarray) else np.asarray(mine)[()]
