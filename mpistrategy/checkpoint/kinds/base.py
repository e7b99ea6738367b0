"""`Kind`: how one kind of object is saved and restored; and what a kind uses of `State` and `Fit`.

To keep something new in checkpoints, write one Kind and enter it in the table in `mpistrategy.checkpoint.kinds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.storage.manifest import Item, Manifest
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

#: Copies of an item before the ranks have compared them: kept once if they are equal, else one for each rank.
UNDECIDED = "?"

#: Returns the value of an object after restoring: the object, changed in place, or another one.
Restore = Callable[[], Any]


class Entries(Protocol):
    """What kinds use of `mpistrategy.checkpoint.state.State`, the table of what is saved, by path."""

    strategy: Strategy
    where: str
    items: dict[str, Item]
    live: dict[str, Any]
    variables: dict[str, Variable]

    def add(self, path: str, value: Any) -> None: ...
    def add_last(self, add: Callable[[], None]) -> None: ...
    def add_array(self, path: str, kind: str, copies: str, array: Array) -> None: ...
    def add_value(self, path: str, kind: str, copies: str, value: Any, more: Any = None) -> None: ...
    def path_of(self, var: Variable) -> str | None: ...


class Fitting(Protocol):
    """What kinds use of `mpistrategy.checkpoint.fitting.Fit`, a checkpoint beside the objects."""

    manifest: Manifest
    strategy: Strategy
    rank: int
    same_ranks: bool
    problems: list[str]
    fetched: dict[str, Callable[[], Variable] | None]
    shared: set[str]
    prepare: list[Callable[[], None]]
    staged: dict[str, Array]

    @property
    def here(self) -> Entries: ...
    def restore_of(self, path: str, value: Any, *, fresh: bool = False) -> Restore: ...
    def problem(self, path: str, text: str) -> Restore: ...
    def missing(self, path: str, value: Any) -> Restore: ...
    def expect(self, holds: bool, path: str, item: Item, value: Any) -> bool: ...
    def has_layout(self, item: Item, array: Array) -> bool: ...
    def knows_own(self, path: str, item: Item) -> bool: ...
    def own_value(self, path: str, item: Item) -> Any: ...
    def of_its_own(self, item: Item) -> str: ...
    def is_replaceable(self, path: str, value: Any) -> bool: ...
    def is_lasting(self, path: str) -> bool: ...


class Kind(ABC):
    """One kind of object in checkpoints.

    Attributes:
        name: the kind of its items in the manifest.
        types: its classes; subclasses count unless `is_exact`.
        is_exact: whether only these very classes are meant.
        is_replaceable: whether a restore may make a new object; else the object must be there and is changed in place.
    """

    name: ClassVar[str]
    types: ClassVar[tuple[type, ...]] = ()
    is_exact: ClassVar[bool] = False
    is_replaceable: ClassVar[bool] = False

    def owns(self, value: Any) -> bool:
        """Return whether an object is of this kind."""
        return type(value) in self.types if self.is_exact else isinstance(value, self.types)

    @abstractmethod
    def add(self, entries: Entries, path: str, value: Any) -> None:
        """Enter an object into the table; raise for one that cannot be saved."""

    @abstractmethod
    def restore(self, fit: Fitting, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """Note what does not fit and which arrays are needed; return what restores the object.  Changes nothing.

        Args:
            fit: where problems and arrays are noted.
            path: where the object is.
            item: what the checkpoint has at `path`.
            value: the object; `ABSENT` if there is none.
            fresh: make new arrays; do not write into those that are here.
        """

    def identity(self, value: Any, number: str) -> str:
        """Return words for the object, equal on all ranks for the same object and different for another; "" for none.

        Args:
            value: the object.
            number: its number among those of its class that this program made, if they are counted: "1 of 2".
        """
        return f"{type(value).__name__} {number}" if number else ""

    def variables(self, value: Any) -> Iterable[Variable]:
        """Return the variables that belong to an object."""
        return members_of(value) or ()


def members_of(value: Any) -> tuple[Variable, ...] | None:
    """Return the variables of an object with an attribute `variables`, such as a metric; None for other objects."""
    members = getattr(value, "variables", None)
    if isinstance(members, (list, tuple)) and members and all(isinstance(member, Variable) for member in members):
        return tuple(members)
    return None
