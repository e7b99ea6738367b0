"""The interface of objects whose state checkpoints keep: they return their state, and load a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

#: Returns the object at a path of a checkpoint; None if there is none.
ObjectAt: TypeAlias = Callable[[str], Any]
#: Returns the path at which a checkpoint has a variable; None if it has not.
PathOf: TypeAlias = Callable[[Any], str | None]


class Leaf(NamedTuple):
    """A value in a state, and how the ranks' copies of it belong together.

    Attributes:
        value: an array, a variable, a random generator or a plain value.
        copies: "own": each rank has its own copy, even if all are equal; "SUM": their total counts; "": equal copies
            are saved once, else each rank has its own copy.
        first: for a variable: the number that fills it after the restore of a checkpoint without the variable.
    """

    value: Any
    copies: str = ""
    first: float | None = None


class Kept:
    """Base of the objects whose state checkpoints keep.

    Attributes:
        _kept_as: the name of such an object in a checkpoint.
    """

    _kept_as: ClassVar[str] = ""

    def _state(self, path_of: PathOf) -> dict[Any, Any] | None:
        """Return the state: a nest of `Leaf`, arrays, variables, generators and plain values; None if there is none."""
        raise NotImplementedError

    def _check(self, saved: Mapping[Any, Any], at: ObjectAt) -> str:
        """Return why a state does not fit, or ""; change nothing.

        Args:
            saved: as `_state`; it may have been forged.  For arrays and variables there are arrays of zeros.
            at: finds the other objects of the checkpoint.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: for a state that `_state` does not return.
        """
        return ""

    def _prepare(self, saved: Mapping[Any, Any], at: ObjectAt, strategy: Any) -> None:
        """Make the variables of a state that has been checked, in a strategy of the checkpoint.  Collective."""

    def _load(self, saved: Mapping[Any, Any]) -> None:
        """Take over a state that has been checked.  Its variables and generators have been written."""


def is_stateful(value: Any) -> bool:
    """Return whether an object saves and loads its state by its own methods."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
