"""In which order a program has made its objects: what ranks can compare of those that have no number that all share."""

from __future__ import annotations

import itertools
from typing import Any, Self

_numbers = itertools.count()


class Created:
    """Base of what is made by each rank for itself, and stands for the same thing on all of them.

    Attributes:
        creation_order: greater for what was made later in this process, in a tuple: it is no setting of the object.
            Ranks may have made other things in between, so that only the order among some objects means anything.
    """

    creation_order: tuple[int]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made.creation_order = (next(_numbers),)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A copy is made when it is made: the number is not copied."""
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name != "creation_order"}
