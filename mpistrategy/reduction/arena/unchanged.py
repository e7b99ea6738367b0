"""Checks that a nest still holds the arrays that it was made of, without a step of Python for each array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array


class UnchangedNest:
    """A nest that is given to the program, which may put other arrays into it.

    Python compares containers element by element; an element that is the same object counts as equal without a call of
    its `==`.  So two nests of the same arrays are equal at once.  For another array NumPy's `==` is called; its result
    has no truth value unless there is one element.  Arrays of one element are therefore compared one by one, with `is`.

    Args:
        structure: the nest's.
        leaves: its arrays.

    Attributes:
        value: the nest.
    """

    def __init__(self, structure: nest.Structure, leaves: Sequence[Array]) -> None:
        self._structure = structure
        self._leaves = list(leaves)
        self.value: Any = structure.pack(self._leaves)
        self._twin = structure.pack(self._leaves)
        self._single = [(path, leaf) for path, leaf in _paths(self.value) if getattr(leaf, "size", 0) == 1]
        self._is_plain = len(self._single) == sum(leaf.size == 1 for leaf in leaves)

    def is_unchanged(self) -> bool:
        """Return whether it still holds its arrays."""
        if self._structure is nest.LEAF:
            return True
        try:
            if self._is_plain and self.value == self._twin:
                return all(reduce(getitem, path, self.value) is leaf for path, leaf in self._single)
        except (ValueError, Warning):
            pass  # two arrays were compared by their values
        return self.is_like(self.value)

    def is_like(self, other: Any) -> bool:
        """Return whether `other` has the same structure and holds the same arrays; walks through it."""
        leaves, structure = nest.flatten(other)
        if structure.text != self._structure.text:
            return False
        return all(one is leaf for one, leaf in zip(leaves, self._leaves, strict=True))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what lists, tuples and dicts hold, with the keys that lead there."""
    if not isinstance(value, (dict, list, tuple)):
        yield path, value
        return
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _paths(child, (*path, key))
