"""The public methods that all ranks call together: `collective` declares them, once each.

What is declared serves planned faults, the check level, the calls outside steps, and the tables of the tests.  In a
process that was started with a plan of faults a declared method looks whether there is a hook; elsewhere it is the
method as it was written.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class PublicCall(NamedTuple):
    """A declared method.

    Attributes:
        function: the method, as it was written.
        name: its public name: ``ReplicaContext.all_reduce``.
        kind: its kind in plans of faults; methods that do the same have one kind.
        outside: for a method of the replica context, what to call outside a step.
        may_skip_check: whether its calls need not be compared at the check level "off": its data need no barrier.
    """

    function: Callable[..., Any]
    name: str
    kind: str
    outside: str = ""
    may_skip_check: bool = False


#: The environment variable that holds a plan of faults, and whether it did when this package was imported.
PLAN = "MPISTRATEGY_INJECT"
HAS_PLAN = bool(os.environ.get(PLAN))
#: What is called in place of the declared methods, with the method and its arguments; it returns the result.
hooks: list[Callable[[PublicCall, tuple[Any, ...], dict[str, Any]], Any]] = []
#: The declared methods of the modules that have been imported, by their names.
declared: dict[str, PublicCall] = {}


def all_declared() -> dict[str, PublicCall]:
    """Return all declared methods, by their names."""
    package = sys.modules["mpistrategy"]
    for name in package.__all__:  # its public names are imported when they are first used
        getattr(package, name)
    return declared


def collective(kind: str, *, outside: str = "", may_skip_check: bool = False) -> Callable[[F], F]:
    """Declare a public method that all ranks call together; see `PublicCall`."""

    def declare(function: F) -> F:
        call = PublicCall(function, function.__qualname__, kind, outside, may_skip_check)
        declared[call.name] = call
        if not HAS_PLAN:
            return function

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return hooks[0](call, args, kwargs) if hooks else function(*args, **kwargs)

        return called  # type: ignore[return-value]

    return declare
