"""What a plan of a call is, and what a route is.

A route is one way in which the arrays of a list travel, are combined over the ranks, and come back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from mpistrategy.arrays.dtypes import Array, is_buffer
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.reduction.layout.packing import Pack

#: For each array memory that a result in its own dtype may be written to, contiguous and sharing none with another
#: array; or None.
Targets: TypeAlias = "Sequence[Array | None] | None"

#: How much of the packs is copied, and where to, in words.
Copies: TypeAlias = "tuple[str, ...]"


class CallPlan(ABC):
    """How one kind of value is reduced at one call site."""

    @abstractmethod
    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction of a value; inside `call`.

        Args:
            call: the public call, entered by the caller.
            value: of the kind that the plan was made for.
            out: where the result goes, or the destinations; None for new memory on every rank.
            weight: of this rank's values, where the plan is one of weighted means.
        """


class Route(Protocol):
    """The route of arrays of certain dtypes and shapes.

    Attributes:
        packs: the buffers that travel: several arrays in one, or one array by itself.
    """

    packs: tuple[Pack, ...]

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Do what must be done before the ranks agree on the call: that may fail.  Return the memory for the results.

        They may be written to `targets`, which hold what they held until `run`.
        """

    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the combinations after the agreement, in the dtypes of the wire; floats divided, for MEAN."""

    def describe(self, ranks: Ranks, arrays: Sequence[Array]) -> list[Description]:
        """Return what `run` would do with these arrays, for `Strategy.explain`."""


@dataclass(frozen=True)
class Description:
    """What happens to a pack.

    Attributes:
        pack: the pack.
        way: how it travels, and where it is combined.
        copies: what is copied on this rank, and where to.
        in_arena: how many arrays of an arena are in it, which is a bucket; 0 for other packs.
    """

    pack: Pack
    way: str
    copies: Copies
    in_arena: int = 0

    @property
    def arrays(self) -> int:
        """How many arrays are in it."""
        return self.in_arena or len(self.pack.members)


def copies_of(pack: Pack, arrays: Sequence[Array]) -> Copies:
    """Return what is copied of arrays before a pack of them travels, and after it."""
    if any(each.dtype != pack.dtype for each in pack.chosen(arrays)):
        return (f"all into {pack.dtype.name} and the results back",)
    if len(pack.members) > 1:
        return ("all into the pack",)
    array = arrays[pack.members[0].index]
    return () if array.dtype == pack.dtype and is_buffer(array) else ("all in order",)
