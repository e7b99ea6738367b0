"""The public methods that all ranks call together: `collective` marks them for planned faults.

A marked method looks whether there is a hook, and does nothing else while there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from mpistrategy.arrays.values import ArenaBase

F = TypeVar("F", bound=Callable[..., Any])


class PublicCall(NamedTuple):
    """A marked method.

    Attributes:
        function: the method, as it was written.
        kind: of `mpistrategy.mpi.faults.plans.KINDS`.
    """

    function: Callable[..., Any]
    kind: str


#: What is called in place of the marked methods, with the method and its arguments; it returns the result.
hooks: list[Callable[[PublicCall, tuple[Any, ...], dict[str, Any]], Any]] = []


def collective(kind: str) -> Callable[[F], F]:
    """Mark a public method that all ranks call together; see `PublicCall`."""

    def mark(function: F) -> F:
        call = PublicCall(function, kind)

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            return hooks[0](call, args, kwargs) if hooks else function(*args, **kwargs)

        return marked  # type: ignore[return-value]

    return mark


def is_arena(value: Any) -> bool:
    """Return whether `value` is a `mpistrategy.Arena`."""
    return isinstance(value, ArenaBase)
