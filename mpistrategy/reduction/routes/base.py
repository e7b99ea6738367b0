"""Transfers: how a list of arrays moves in a call that all ranks make, and its description for `explain`.

A route is the transfer of arrays in the dtypes in which they are combined: one way for bytes to travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array, is_buffer
from mpistrategy.reduction.layout.packing import Layout, Pack

#: For each array memory that a result in its own dtype may be written to, contiguous and sharing none with another
#: array; or None.
Targets: TypeAlias = "Sequence[Array | None] | None"
#: How a pack travels, and the copies on this rank; in words.
Way: TypeAlias = "tuple[str, tuple[str, ...]]"


class Description(NamedTuple):
    """The description of a buffer for `Strategy.explain`.

    Attributes:
        dtype: the dtype in which it travels.
        nbytes: its length.
        arrays: how many arrays are in it.
        way: how it travels, and the copies.
    """

    dtype: np.dtype[Any]
    nbytes: int
    arrays: int
    way: Way


class Transfer(ABC):
    """The work on arrays of certain layouts before the ranks agree on a call, and after the agreement.

    Attributes:
        packs: the buffers that travel: several arrays in one, or one array by itself.
        layouts: dtype and shape of each array.
        results: the dtype of each result.
        writes_targets: whether results may be written to their targets at once.
        sparingly: whether `run` needs no barrier before it; see `Call.agree`.
        least_in_place: from how many bytes on results may be written over the arrays.
    """

    packs: tuple[Pack, ...] = ()
    layouts: tuple[Layout, ...] = ()
    results: Sequence[np.dtype[Any]] = ()
    writes_targets: bool = False
    sparingly: bool = True
    least_in_place: int = 0

    @abstractmethod
    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Do all that can fail, before the ranks agree on the call: copy, and take memory for the results.

        Returns:
            The memory, for `run`.  Results may be written to `targets`, which keep their values until then.
        """

    @abstractmethod
    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the results, after the agreement."""

    def carried_out(self, arrays: Sequence[Array], agree: Callable[[], object], targets: Targets = None) -> list[Array]:
        """Take memory, let the ranks agree on the call, and return the results."""
        memory = self.bring(arrays, targets)
        agree()
        return self.run(arrays, memory)

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack of these arrays travels."""
        raise NotImplementedError(type(self).__name__)

    def describe(self, arrays: Sequence[Array]) -> list[Description]:
        """Return the descriptions of these arrays for `Strategy.explain`."""
        packs = [pack for pack in self.packs if pack.size]
        return [Description(pack.dtype, pack.nbytes, len(pack.members), self.way(pack, arrays)) for pack in packs]


def copies_of(pack: Pack, arrays: Sequence[Array]) -> tuple[str, ...]:
    """Return the copies that are made before a pack of these arrays travels, and afterwards."""
    if any(array.dtype != pack.dtype for array in pack.arrays_in(arrays)):
        return (f"all into {pack.dtype.name} and the results back",)
    if len(pack.members) > 1:
        return ("all into the pack",)
    array = arrays[pack.members[0].index]
    return () if array.dtype == pack.dtype and is_buffer(array) else ("all in order",)
