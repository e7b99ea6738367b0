"""The all-reduce that is made again and again with arrays of one size: what it takes is worked out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from mpistrategy.arrays.dtypes import Array

if TYPE_CHECKING:
    from mpistrategy.mpi.multi_node.two_level import AcrossNodes

#: Writes the combination of a source into a target.
Reduce: TypeAlias = "Callable[[Array, Array], object]"


class RepeatedAllReduce:
    """The all-reduce of arrays of one size.

    Args:
        prepare: returns how, on ranks that have agreed on the first call.  Collective.

    Attributes:
        reduce: ``reduce(source, target)`` does it.
    """

    def __init__(self, prepare: Callable[[], tuple[Reduce, AcrossNodes | None]]) -> None:
        self._prepare = prepare
        self._lanes: AcrossNodes | None = None
        self.reduce: Reduce = self._first

    def _first(self, source: Array, target: Array) -> None:
        self.reduce, self._lanes = self._prepare()
        self.reduce(source, target)

    def begin(self, source: Array) -> None:
        """Do what can be done before the ranks have agreed on the call; `reduce` with `source` follows, or `forget`."""
        if self._lanes is not None:
            self._lanes.write(source)

    def forget(self) -> None:
        """Forget what was begun."""
        if self._lanes is not None:
            self._lanes.forget()
