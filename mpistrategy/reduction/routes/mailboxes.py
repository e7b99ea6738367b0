"""A small reduction in the ranks' cells: the data travel with the check of the call, in one exchange.

Each rank writes its arrays into its cell, next to the digest of its call.  When all digests are seen to be equal, all
data are there as well, and every rank adds them up in rank order: the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrategy.arrays.dtypes import COMBINE, Array, quiet_runner
from mpistrategy.mpi.shared_memory.mailboxes import Cells
from mpistrategy.reduction.layout.packing import DEFAULT_BYTES_PER_PACK, Layout, Pack, plan_layouts

_ALIGNMENT = 16  # enough for every dtype of NumPy


def fits(cells: Cells, layouts: Sequence[Layout]) -> bool:
    """Return whether arrays of these layouts go into a cell together: every rank reads all cells, so few bytes each."""
    return sum(_room(pack) for pack in _packs(layouts)) * max(2, cells.size) <= 2 * cells.payload_bytes


class CellProgram:
    """The reduction of arrays of certain layouts.

    Args:
        cells: the cells of all ranks.
        layouts: dtype and shape of each array.
        op: "SUM", "MIN", "MAX" or "PROD".
    """

    def __init__(self, cells: Cells, layouts: Sequence[Layout], op: str) -> None:
        self.cells = cells
        self.combine = COMBINE[op]
        self.quiet = quiet_runner()
        self.packs = _packs(layouts)
        self.count = len(layouts)
        me = cells.local_rank
        #: For each slot, the part of each rank's payload that belongs to each pack, in the dtype of the pack.
        self.parts = [[self._views(slot, pack) for pack in range(len(self.packs))] for slot in (0, 1)]
        self._places = [
            [place for pack, theirs in zip(self.packs, parts, strict=True) for place in pack.views(theirs[me])]
            for parts in self.parts
        ]

    def _views(self, slot: int, number: int) -> list[Array]:
        start = sum(_room(pack) for pack in self.packs[:number])
        pack = self.packs[number]
        stop = start + pack.size * pack.dtype.itemsize
        return [payload[start:stop].view(pack.dtype) for payload in self.cells.slots[slot].payloads]

    def write(self, arrays: Sequence[Any]) -> None:
        """Put this rank's arrays into its cell, before the call is agreed on."""
        for index, view in self._places[(self.cells.sequence + 1) & 1]:
            view[...] = arrays[index]

    def read(self) -> list[Array]:
        """Return the combination of all ranks' arrays, after the agreement: in new memory, in the dtype of the wire."""
        results: list[Any] = [None] * self.count
        parts = self.parts[self.cells.sequence & 1]
        for pack, theirs in zip(self.packs, parts, strict=True):
            total = self.total(theirs)
            for index, view in pack.views(total):
                results[index] = view.copy() if view.size == 1 else view  # a lone number must not keep a pack alive
        return results

    def total(self, parts: Sequence[Array]) -> Array:
        """Return the combination of the ranks' parts, in rank order."""
        combine, quiet = self.combine, self.quiet
        total: Array = quiet(combine, parts[0], parts[1])
        for part in parts[2:]:
            quiet(combine, total, part, out=total)
        return total


def _packs(layouts: Sequence[Layout]) -> tuple[Pack, ...]:
    return plan_layouts(layouts, range(len(layouts)), DEFAULT_BYTES_PER_PACK)


def _room(pack: Pack) -> int:
    return -(-pack.size * pack.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
