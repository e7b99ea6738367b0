"""What a route is: one way in which the arrays of a list travel, are combined over the ranks, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from mpistrategy.arrays.dtypes import Array
from mpistrategy.reduction.layout.packing import Pack

#: For each array memory that a result in its own dtype may be written to, contiguous and sharing none with another
#: array; or None.
Targets: TypeAlias = "Sequence[Array | None] | None"


class Route(Protocol):
    """The route of arrays of certain dtypes and shapes.

    Attributes:
        packs: the buffers that travel: several arrays in one, or one array by itself.
    """

    packs: tuple[Pack, ...]

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> None:
        """Do what must be done before the ranks agree on the call, such as taking memory: that may fail."""

    def run(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return the combinations after the agreement, in the dtypes of the wire; floats divided, for MEAN."""

    def describe(self) -> Sequence[str]:
        """Return the name of the way that each of `packs` takes."""
