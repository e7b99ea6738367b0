"""Whether a nest of arrays still holds the arrays that it was made of, found out without a step of Python for each."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array


class UnchangedNest:
    """A nest that is handed out, and into which somebody may put other arrays.

    Python compares containers element by element, and takes an element for equal to itself without a closer look.  So
    two nests with the same arrays are equal at once, and with others the arrays themselves are asked.  Those with more
    or less than one element refuse to say whether they are equal; of the others it is asked whether they are the same.

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
        self._may_be_equal = any(leaf.size == 1 for leaf in leaves)
        self._where = nest.leaves_of(self.value)

    def is_unchanged(self) -> bool:
        """Return whether nobody has put other arrays into it."""
        if self._structure is nest.LEAF:
            return True
        try:
            if not self._may_be_equal and self.value == self._twin:
                return True
            if self._where is not None and self.value == self._twin:
                return all(map(is_, self._where.take(self.value), self._leaves))
        except (ValueError, Warning):
            pass  # two arrays were compared by their values
        return self.is_like(self.value)

    def is_like(self, other: Any) -> bool:
        """Return whether `other` has the same structure and holds the same arrays; walks through it."""
        leaves, structure = nest.flatten(other)
        if structure.text != self._structure.text:
            return False
        return all(one is leaf for one, leaf in zip(leaves, self._leaves, strict=True))
