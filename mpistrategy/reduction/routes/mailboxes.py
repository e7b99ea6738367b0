"""The route of small arrays on one node: the ranks' mailboxes, where the data travel with the check of the call.

Each rank writes its arrays into its mailbox, next to the digest of its call.  When all digests are equal, all data are
there, too, and every rank adds them up in rank order: the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array, Combine, division, host_wire_dtype, quietly
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.mpi.shared_memory.segments import aligned
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.packing import Layout, Pack
from mpistrategy.reduction.routes.base import Description, Targets


def fits(mailboxes: Mailboxes, layouts: tuple[Layout, ...]) -> bool:
    """Return whether these arrays go into a mailbox together: every rank reads all mailboxes, so few bytes each."""
    return MailboxArrays.has_room(mailboxes, _flat(_packs(layouts)), mailboxes.size)


class MailboxArrays:
    """Arrays of each rank that all ranks of the node see, as they are.

    Args:
        mailboxes: the ranks'.
        layouts: dtype and shape of each array; they fit: see `has_room`.
    """

    def __init__(self, mailboxes: Mailboxes, layouts: tuple[Layout, ...]) -> None:
        self._mailboxes = mailboxes
        #: For each slot and rank, its arrays; and for each slot this rank's.
        self.slots: list[list[list[Array]]] = [
            [_arrays_in(payload, layouts) for payload in slot.payloads] for slot in mailboxes.slots
        ]
        self.mine: list[list[Array]] = [arrays[mailboxes.local_rank] for arrays in self.slots]

    @staticmethod
    def has_room(mailboxes: Mailboxes, layouts: tuple[Layout, ...], readers: int) -> bool:
        """Return whether the arrays fit, if each rank reads the mailboxes of so many."""
        if not all(dtype.itemsize for dtype, _ in layouts):
            return False
        nbytes = sum(aligned(prod(shape) * dtype.itemsize) for dtype, shape in layouts)
        return nbytes * max(2, readers) <= 2 * mailboxes.payload_bytes

    def put(self, arrays: Sequence[Array]) -> None:
        """Copy this rank's arrays to where the other ranks see them after the next agreement."""
        for place, array in zip(self.mine[(self._mailboxes.sequence + 1) & 1], arrays, strict=False):
            place[...] = array

    def seen(self) -> list[list[Array]]:
        """Return each rank's arrays, after the agreement and before the next one."""
        return self.slots[self._mailboxes.sequence & 1]


def _arrays_in(memory: Array, layouts: tuple[Layout, ...]) -> list[Array]:
    """Return the arrays that lie one after another in the bytes of a payload, or of each row of `memory`."""
    arrays, start = [], 0
    for dtype, shape in layouts:
        nbytes = prod(shape) * dtype.itemsize
        arrays.append(memory[..., start : start + nbytes].view(dtype).reshape((*memory.shape[:-1], *shape)))
        start += aligned(nbytes)
    return arrays


class MailboxRoute:
    """See `mpistrategy.reduction.routes.base.Route`."""

    def __init__(self, mailboxes: Mailboxes, layouts: tuple[Layout, ...], op: ReduceOp) -> None:
        self._mailboxes = mailboxes
        self._combine: Combine = COMBINE[op._on_the_wire]
        self.packs: tuple[Pack, ...] = _packs(layouts)
        self._count = len(layouts)
        self._divisions = {
            pack.dtype: division(divisor, pack.dtype)
            for pack in self.packs
            if (divisor := op._divisor(pack.dtype, mailboxes.size)) != 1
        }
        layouts = _flat(self.packs)
        arrays = MailboxArrays(mailboxes, layouts)
        #: For each slot and pack, what the ranks have of it.
        self._seen = [list(zip(*theirs, strict=True)) for theirs in arrays.slots]
        #: The same as the rows of one array, where `combine_rows` takes these; None on a node of few ranks.
        self._in_rows: list[Sequence[Array | None]] = [
            [None] * len(layouts)
            if slot.rows is None or not isinstance(self._combine, np.ufunc)
            else _arrays_in(slot.rows, layouts)
            for slot in mailboxes.slots
        ]
        self._places = [
            [place for pack, mine in zip(self.packs, packs, strict=True) for place in pack.views(mine)]
            for packs in arrays.mine
        ]

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> list[Array]:
        """Put this rank's arrays into its mailbox; return memory for the results of each pack."""
        for index, view in self._places[(self._mailboxes.sequence + 1) & 1]:
            view[...] = arrays[index]
        return [np.empty(pack.size, pack.dtype) for pack in self.packs]

    @quietly
    def run(self, arrays: Sequence[Any], memory: list[Array]) -> list[Array]:
        """Return the combination of all ranks' arrays, in the memory that was taken."""
        results: list[Any] = [None] * self._count
        slot = self._mailboxes.sequence & 1
        for pack, theirs, rows, total in zip(self.packs, self._seen[slot], self._in_rows[slot], memory, strict=True):
            self._combine_into(total, theirs, rows)
            for index, view in pack.views(total):
                results[index] = view.copy() if view.size == 1 else view  # a lone number must not keep a pack alive
        return results

    def _combine_into(self, total: Array, parts: Sequence[Array], rows: Array | None) -> None:
        """Write the combination of the ranks' parts in rank order, divided, into `total`."""
        combine = self._combine
        if rows is not None:
            combine_rows(combine, rows, total)
        else:
            combine(parts[0], parts[1], out=total)
            for part in parts[2:]:
                combine(total, part, out=total)
        if total.dtype in self._divisions:
            divide, operand = self._divisions[total.dtype]
            divide(total, operand, total)

    def describe(self, ranks: Ranks, arrays: Sequence[Array]) -> list[Description]:
        way, copies = "in the ranks' mailboxes, with the check of the call", ("all into this rank's mailbox",)
        return [Description(pack, way, copies) for pack in self.packs if pack.size]


def combine_rows(combine: Any, rows: Array, total: Array) -> None:
    """Combine the rows of an array in their order.

    NumPy takes one row after the other where a row has several elements.  Of single ones it would add up pairs.
    """
    if total.size == 1:
        total[...] = combine.accumulate(rows[:, 0], dtype=rows.dtype)[-1]
    else:
        combine.reduce(rows, axis=0, dtype=rows.dtype, initial=None, out=total)


def _packs(layouts: tuple[Layout, ...]) -> tuple[Pack, ...]:
    return packing.plan(layouts, wire=host_wire_dtype)


def _flat(packs: Sequence[Pack]) -> tuple[Layout, ...]:
    return tuple((pack.dtype, (pack.size,)) for pack in packs)
