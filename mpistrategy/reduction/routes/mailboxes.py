"""A small reduction in the ranks' mailboxes: the data travel with the check of the call, in one exchange.

Each rank writes its arrays into its mailbox, next to the digest of its call.  When all digests are equal, all data are
there, too, and every rank adds them up in rank order: the same bits everywhere.

Each function ``..._in_mailboxes`` returns a ``run(value, out)`` for one kind of value; it returns MISFIT, before
anything is written, for a `value` or an `out` of another kind.  It is short: a message between two cores takes
0.5 us.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array, mean_dtype, quiet_runner
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.signature import Signature
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import finish
from mpistrategy.reduction.layout.leaves import Leaves
from mpistrategy.reduction.layout.packing import DEFAULT_BYTES_PER_PACK, Layout, Pack, plan_layouts

#: Returned for a value that the plan was not made for; nothing has been sent then.
MISFIT: Any = object()

Agreed = tuple[Guard, int, Signature]

_ALIGNMENT = 16  # enough for every dtype of NumPy


def fits(mailboxes: Mailboxes, layouts: Sequence[Layout]) -> bool:
    """Return whether these arrays go into a mailbox together: every rank reads all mailboxes, so few bytes each."""
    return sum(_room(pack) for pack in _packs(layouts)) * max(2, mailboxes.size) <= 2 * mailboxes.payload_bytes


class MailboxReduction:
    """The reduction of arrays of certain layouts.

    Args:
        mailboxes: the mailboxes of all ranks.
        layouts: dtype and shape of each array.
        op: "SUM", "MIN", "MAX" or "PROD".
    """

    def __init__(self, mailboxes: Mailboxes, layouts: Sequence[Layout], op: str) -> None:
        self.mailboxes = mailboxes
        self.combine = COMBINE[op]
        self.quiet = quiet_runner()
        self.packs = _packs(layouts)
        self.count = len(layouts)
        me = mailboxes.local_rank
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
        return [payload[start:stop].view(pack.dtype) for payload in self.mailboxes.slots[slot].payloads]

    def write(self, arrays: Sequence[Any]) -> None:
        """Put this rank's arrays into its mailbox, before the call is agreed on."""
        for index, view in self._places[(self.mailboxes.sequence + 1) & 1]:
            view[...] = arrays[index]

    def read(self) -> list[Array]:
        """Return the combination of all ranks' arrays, after the agreement: in new memory, in the dtype of the wire."""
        results: list[Any] = [None] * self.count
        parts = self.parts[self.mailboxes.sequence & 1]
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


def _meet(mailboxes: Mailboxes, sequence: int, peers: Sequence[memoryview], agreed: Agreed) -> None:
    """Wait for the peers and compare, after this rank has shown its own digest and number."""
    guard, digest, signature = agreed
    for peer in peers:
        if peer[0] != sequence:
            mailboxes.waiting.until(peer, sequence)
        if peer[1] != digest:
            guard.resolve(signature)
            return


def array_in_mailboxes(program: MailboxReduction, op: ReduceOp, agreed: Agreed) -> Callable[[Any, Any], Any]:
    """Return the all-reduce of one array."""
    mailboxes, pack, digest = program.mailboxes, program.packs[0], agreed[1]
    shape = pack.members[0].shape
    dtype = pack.dtype
    slots = []
    for slot, (parts,) in zip(mailboxes.slots, program.parts, strict=True):
        shaped = [part.reshape(shape) for part in parts]
        slots.append((slot.mine, slot.peers, shaped[mailboxes.local_rank], shaped[0], shaped[1], shaped[2:]))
    combine, quiet = program.combine, program.quiet
    divisor = dtype.type(mailboxes.size) if op is ReduceOp.MEAN else None
    integers = dtype.kind in "iu"
    result_dtype = mean_dtype(dtype) if op is ReduceOp.MEAN else dtype
    divide, empty, lonely = np.true_divide, np.empty, shape == ()

    def run(value: Array, out: Array | None) -> Any:
        if out is None:
            total = empty(shape, dtype) if lonely else None
        elif type(out) is np.ndarray and out.dtype == result_dtype and out.shape == shape and out.flags.writeable:
            total = out if result_dtype == dtype else empty(shape, dtype)
        else:
            return MISFIT
        sequence = mailboxes.sequence + 1
        mine, peers, place, first, second, others = slots[sequence & 1]
        mine[1] = digest  # first: its cache line, which the peers look at, is written by the next line anyway
        place[...] = value
        mailboxes.sequence = sequence
        mine[0] = sequence
        for peer in peers:
            if peer[0] != sequence or peer[1] != digest:
                _meet(mailboxes, sequence, peers, agreed)
                break
        total = quiet(combine, first, second) if total is None else quiet(combine, first, second, out=total)
        for other in others:
            quiet(combine, total, other, out=total)
        if divisor is not None:
            if integers:
                total = finish(total, dtype, op, mailboxes.size)
            else:
                quiet(divide, total, divisor, total)
        if out is not None and total is not out:
            out[...] = total
            return out
        return total

    return run


def _slots_of_one(
    program: MailboxReduction,
) -> list[tuple[memoryview, tuple[memoryview, ...], Any, Any, Any, list[Any]]]:
    """Return for each slot its mailboxes, and where one number of this rank, of ranks 0 and 1, and of the others is."""
    slots = []
    for slot, (parts,) in zip(program.mailboxes.slots, program.parts, strict=True):
        numbers = [part.data for part in parts]
        slots.append(
            (slot.mine, slot.peers, numbers[program.mailboxes.local_rank], numbers[0], numbers[1], numbers[2:])
        )
    return slots


def lone_element_in_mailboxes(program: MailboxReduction, op: ReduceOp, agreed: Agreed) -> Callable[[Any, Any], Any]:
    """Return the sum or the mean of an array of one float; that of a loss is made in every step.

    Python adds float32 as float64, and what is rounded to float32 after each sum is what NumPy gives.
    """
    mailboxes, pack, digest = program.mailboxes, program.packs[0], agreed[1]
    dtype, shape = pack.dtype, pack.members[0].shape
    slots = _slots_of_one(program)
    divisor = float(mailboxes.size) if op is ReduceOp.MEAN else None
    empty, at = np.empty, (0,) * len(shape)
    rounded: Any = np.empty(1, dtype).data  # memory warns of no overflow

    def run(value: Array, out: Array | None) -> Any:
        if out is None:
            result = empty(shape, dtype)
        elif type(out) is np.ndarray and out.dtype == dtype and out.shape == shape and out.flags.writeable:
            result = out
        else:
            return MISFIT
        sequence = mailboxes.sequence + 1
        mine, peers, place, first, second, others = slots[sequence & 1]
        mine[1] = digest
        place[0] = value.item()
        mailboxes.sequence = sequence
        mine[0] = sequence
        for peer in peers:
            if peer[0] != sequence or peer[1] != digest:
                _meet(mailboxes, sequence, peers, agreed)
                break
        rounded[0] = first[0] + second[0]
        for other in others:
            rounded[0] += other[0]
        if divisor is not None:
            rounded[0] /= divisor
        result[at] = rounded[0]
        return result

    return run


def number_in_mailboxes(program: MailboxReduction, op: ReduceOp, agreed: Agreed) -> Callable[[Any, Any], Any]:
    """Return the sum or the mean of one Python float; Python's own arithmetic gives the same bits."""
    mailboxes, digest, slots = program.mailboxes, agreed[1], _slots_of_one(program)
    divisor = float(mailboxes.size) if op is ReduceOp.MEAN else None
    result = np.float64

    def run(value: Any, out: Any) -> Any:
        if out is not None:
            return MISFIT
        sequence = mailboxes.sequence + 1
        mine, peers, place, first, second, others = slots[sequence & 1]
        place[0] = value
        mailboxes.sequence = sequence
        mine[1] = digest
        mine[0] = sequence
        for peer in peers:
            if peer[0] != sequence or peer[1] != digest:
                _meet(mailboxes, sequence, peers, agreed)
                break
        total = first[0] + second[0]
        for other in others:
            total += other[0]
        return result(total if divisor is None else total / divisor)

    return run


def numbers_in_mailboxes(
    program: MailboxReduction, op: ReduceOp, agreed: Agreed, where: Leaves
) -> Callable[[Any, Any], Any]:
    """Return the all-reduce of a few numbers of one Python or NumPy type."""
    mailboxes, pack, digest = program.mailboxes, program.packs[0], agreed[1]
    dtype, count = pack.dtype, pack.size
    write = struct.Struct(f"{count}{dtype.char if dtype.char != 'l' else 'q'}").pack_into
    slots = []
    for slot, (parts,) in zip(mailboxes.slots, program.parts, strict=True):
        slots.append((slot.mine, slot.peers, parts[mailboxes.local_rank].data.cast("B"), parts))
    build, mean, quiet, total_of = where.build, op is ReduceOp.MEAN, program.quiet, program.total
    divide, divisor = np.true_divide, None if dtype.kind in "iu" else dtype.type(mailboxes.size)
    # A run is only called with dictionaries whose keys come in the same order.
    take: Callable[[Any], Any] = dict.values if where.in_order else where.take

    def run(value: Any, out: Any) -> Any:
        if out is not None:
            return MISFIT
        sequence = mailboxes.sequence + 1
        mine, peers, place, parts = slots[sequence & 1]
        try:
            write(place, 0, *take(value))
        except (struct.error, OverflowError):  # an int that has no such dtype
            return MISFIT
        mailboxes.sequence = sequence
        mine[1] = digest
        mine[0] = sequence
        for peer in peers:
            if peer[0] != sequence or peer[1] != digest:
                _meet(mailboxes, sequence, peers, agreed)
                break
        total = total_of(parts)
        if mean and divisor is None:
            total = finish(total, dtype, op, mailboxes.size)
        elif mean:
            quiet(divide, total, divisor, total)
        return build(total.flat)  # whose elements are made in half the time of the array's own

    return run
