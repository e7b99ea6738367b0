"""The route of small arrays on one node: the ranks' mailboxes, where the data travel with the check of the call.

Each rank writes its arrays into its mailbox, next to the digest of its call.  When all digests are equal, all data are
there, too, and every rank adds them up in rank order: the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array, Combine, division, host_wire_dtype, quietly
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.mpi.shared_memory.segments import aligned
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.packing import Layout, Pack
from mpistrategy.reduction.routes.base import Description, Targets, grouped

_ALIGNMENT = 16  # enough for every dtype of NumPy


def fits(mailboxes: Mailboxes, layouts: tuple[Layout, ...]) -> bool:
    """Return whether these arrays go into a mailbox together: every rank reads all mailboxes, so few bytes each."""
    return sum(map(_room, _packs(layouts))) * max(2, mailboxes.size) <= 2 * mailboxes.payload_bytes


class MailboxArrays:
    """Arrays of each rank that all ranks of the node see, as they are.

    Args:
        mailboxes: the ranks'.
        layouts: dtype and shape of each array; they fit: see `has_room`.
    """

    def __init__(self, mailboxes: Mailboxes, layouts: tuple[Layout, ...]) -> None:
        self._mailboxes, me = mailboxes, mailboxes.local_rank
        #: For each slot and rank, its arrays.
        self._seen = [[self._arrays(payload, layouts) for payload in slot.payloads] for slot in mailboxes.slots]
        self._mine = [arrays[me] for arrays in self._seen]

    @staticmethod
    def has_room(mailboxes: Mailboxes, layouts: tuple[Layout, ...], readers: int) -> bool:
        """Return whether the arrays fit, if each rank reads the mailboxes of so many."""
        if not all(dtype.itemsize for dtype, _ in layouts):
            return False
        nbytes = sum(aligned(prod(shape) * dtype.itemsize) for dtype, shape in layouts)
        return nbytes * max(2, readers) <= 2 * mailboxes.payload_bytes

    @staticmethod
    def _arrays(payload: Array, layouts: tuple[Layout, ...]) -> list[Array]:
        arrays, start = [], 0
        for dtype, shape in layouts:
            nbytes = prod(shape) * dtype.itemsize
            arrays.append(payload[start : start + nbytes].view(dtype).reshape(shape))
            start += aligned(nbytes)
        return arrays

    def put(self, arrays: Sequence[Array]) -> None:
        """Copy this rank's arrays to where the other ranks see them after the next agreement."""
        for place, array in zip(self._mine[(self._mailboxes.sequence + 1) & 1], arrays, strict=False):
            place[...] = array

    def seen(self) -> list[list[Array]]:
        """Return each rank's arrays, after the agreement and before the next one."""
        return self._seen[self._mailboxes.sequence & 1]


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
        #: For each slot, the part of each rank's payload that belongs to each pack, in the dtype of the pack.
        self._seen: list[list[list[Array]]] = [[*self._parts(slot.payloads)] for slot in mailboxes.slots]
        #: The same parts as the rows of one array, where `combine_rows` takes these; None on a node of few ranks.
        self._in_rows: list[list[Array | None]] = [[*self._rows(slot.rows)] for slot in mailboxes.slots]
        me = mailboxes.local_rank
        self._places = [
            [place for pack, theirs in zip(self.packs, parts, strict=True) for place in pack.views(theirs[me])]
            for parts in self._seen
        ]

    def _parts(self, payloads: Sequence[Array]) -> Iterator[list[Array]]:
        start = 0
        for pack in self.packs:
            yield [payload[start : start + pack.nbytes].view(pack.dtype) for payload in payloads]
            start += _room(pack)

    def _rows(self, rows: Array | None) -> Iterator[Array | None]:
        start = 0
        for pack in self.packs:
            is_seen = rows is not None and isinstance(self._combine, np.ufunc)
            yield rows[:, start : start + pack.nbytes].view(pack.dtype) if rows is not None and is_seen else None
            start += _room(pack)

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

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        way, copies = "in the ranks' mailboxes, with the check of the call", ((1.0, "all into this rank's mailbox"),)
        return [Description(alike, way, copies) for _, alike, _ in grouped(self.packs, [way] * len(self.packs), arrays)]


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


def _room(pack: Pack) -> int:
    return -(-pack.nbytes // _ALIGNMENT) * _ALIGNMENT
