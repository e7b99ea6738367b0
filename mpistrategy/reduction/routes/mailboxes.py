"""The route of small arrays on one node: the ranks' mailboxes, where the data travel with the check of the call.

Each rank writes its arrays into its mailbox, next to the digest of its call.  When all digests are equal, all data are
there, too, and every rank adds them up in rank order: the same bits everywhere.

`repeated_in_mailboxes` returns what does all of this for one kind of value, in as few steps of Python as possible: a
message between two cores takes 0.5 us.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array, Combine, division, host_wire_dtype, mean_dtype, quiet_runner
from mpistrategy.arrays.nest import Leaves
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes, sum_of_arrays_of_one, sum_of_numbers
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.finish import finish
from mpistrategy.reduction.layout.packing import Layout, Pack
from mpistrategy.reduction.routes.base import Description, Targets, grouped, nbytes_of

#: Returned for a value that the plan was not made for; nothing has been sent then.
MISFIT: Any = object()

Run = Callable[[Any, Any], Any]

#: Numbers whose results are NumPy scalars, by the dtype in which they travel.
NUMBERS: dict[type, np.dtype[Any]] = {
    float: np.dtype(np.float64),
    int: np.dtype(np.int64),
    **{kind: np.dtype(kind) for kind in (np.float64, np.float32, np.int64, np.int32)},
}


_ALIGNMENT = 16  # enough for every dtype of NumPy


def fits(mailboxes: Mailboxes, layouts: tuple[Layout, ...]) -> bool:
    """Return whether these arrays go into a mailbox together: every rank reads all mailboxes, so few bytes each."""
    return sum(map(_room, _packs(layouts))) * max(2, mailboxes.size) <= 2 * mailboxes.payload_bytes


class MailboxRoute:
    """See `mpistrategy.reduction.routes.base.Route`."""

    def __init__(self, mailboxes: Mailboxes, layouts: tuple[Layout, ...], op: ReduceOp) -> None:
        self.mailboxes: Mailboxes = mailboxes
        self.op: ReduceOp = op
        self.combine: Combine = COMBINE[op._on_the_wire]
        self.quiet: Callable[..., Any] = quiet_runner()
        self.packs: tuple[Pack, ...] = _packs(layouts)
        self._count = len(layouts)
        self._divisions = {
            pack.dtype: division(divisor, pack.dtype)
            for pack in self.packs
            if (divisor := op._divisor(pack.dtype, mailboxes.size)) != 1
        }
        #: For each slot, the part of each rank's payload that belongs to each pack, in the dtype of the pack.
        self.parts: list[list[list[Array]]] = [[*self._parts(slot.payloads)] for slot in mailboxes.slots]
        #: The same parts as the rows of one array, where `add_rows` adds these up; None on a node of few ranks.
        self.rows: list[list[Array | None]] = [[*self._rows(slot.rows)] for slot in mailboxes.slots]
        me = mailboxes.local_rank
        #: Memory for the results of each pack, between `bring` and `run`.
        self._totals: list[Array] = []
        self._places = [
            [place for pack, theirs in zip(self.packs, parts, strict=True) for place in pack.views(theirs[me])]
            for parts in self.parts
        ]

    def _parts(self, payloads: Sequence[Array]) -> Iterator[list[Array]]:
        start = 0
        for pack in self.packs:
            yield [payload[start : start + pack.nbytes].view(pack.dtype) for payload in payloads]
            start += _room(pack)

    def _rows(self, rows: Array | None) -> Iterator[Array | None]:
        start = 0
        for pack in self.packs:
            fits = rows is not None and pack.size > 1 and isinstance(self.combine, np.ufunc)
            yield rows[:, start : start + pack.nbytes].view(pack.dtype) if rows is not None and fits else None
            start += _room(pack)

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> None:
        """Take memory for the results, and put this rank's arrays into its mailbox."""
        self._totals = [np.empty(pack.size, pack.dtype) for pack in self.packs]
        for index, view in self._places[(self.mailboxes.sequence + 1) & 1]:
            view[...] = arrays[index]

    def run(self, arrays: Sequence[Any], targets: Targets = None) -> list[Array]:
        """Return the combination of all ranks' arrays, in the memory that was taken."""
        results: list[Any] = [None] * self._count
        slot = self.mailboxes.sequence & 1
        totals, self._totals = self._totals, []
        for pack, theirs, rows, total in zip(self.packs, self.parts[slot], self.rows[slot], totals, strict=True):
            self._combine_into(total, theirs, rows)
            for index, view in pack.views(total):
                results[index] = view.copy() if view.size == 1 else view  # a lone number must not keep a pack alive
        return results

    def _combine_into(self, total: Array, parts: Sequence[Array], rows: Array | None) -> None:
        """Write the combination of the ranks' parts in rank order, divided, into `total`."""
        combine, quiet = self.combine, self.quiet
        if rows is not None:
            quiet(add_rows(combine, rows), out=total)
        else:
            quiet(combine, parts[0], parts[1], out=total)
            for part in parts[2:]:
                quiet(combine, total, part, out=total)
        if total.dtype in self._divisions:
            divide, operand = self._divisions[total.dtype]
            quiet(divide, total, operand, total)

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        way, copies = "in the ranks' mailboxes, with the check of the call", ((1.0, "all into this rank's mailbox"),)
        return [
            Description(
                alike,
                way,
                copies,
                f"each rank writes {size_in_words(nbytes_of(alike))} and reads the mailboxes of all {ranks.size}",
            )
            for _, alike, _ in grouped(self.packs, [way] * len(self.packs), arrays)
        ]


def add_rows(combine: Any, rows: Array) -> Callable[..., Any]:
    """Return ``f(out=None)``, which combines the rows of an array in their order.

    NumPy takes one row after the other where a row has several elements.  Of single ones it would add up pairs.
    """
    return partial(combine.reduce, rows, axis=0, dtype=rows.dtype, initial=None)


def _packs(layouts: tuple[Layout, ...]) -> tuple[Pack, ...]:
    return packing.plan(layouts, wire=host_wire_dtype)


def _room(pack: Pack) -> int:
    return -(-pack.nbytes // _ALIGNMENT) * _ALIGNMENT


def repeated_in_mailboxes(
    route: MailboxRoute, guard: Guard, signature: Signature, where: Leaves, kinds: set[type]
) -> Run | None:
    """Return a ``run(value, out)`` for the most frequent kinds of value, one array or numbers; None for others.

    It returns MISFIT, before anything is written, for a `value` or an `out` of another kind.

    Args:
        route: of the values.
        guard: the communicator's.
        signature: of the call.
        where: how to reach the leaves.
        kinds: the types of these.
    """
    if len(route.packs) > 1 or len(kinds) > 1:
        return None
    pack, digest, (kind,) = route.packs[0], guard.digest(signature), kinds
    agreed, mailboxes, differs = (guard, digest, signature), route.mailboxes, partial(guard.resolve, signature)
    is_short_sum = route.op in (ReduceOp.SUM, ReduceOp.MEAN) and mailboxes.fence is None
    divisor = route.op._divisor(pack.dtype, mailboxes.size)
    if where.single and kind is np.ndarray and not pack.converts:
        if is_short_sum and pack.size == 1 and pack.dtype.char in "fd":
            return sum_of_arrays_of_one(mailboxes, digest, differs, divisor, pack.dtype, pack.members[0].shape, MISFIT)
        return _array(route, agreed)
    if where.single and kind in (float, np.float64) and is_short_sum:
        return sum_of_numbers(mailboxes, digest, differs, divisor, MISFIT)
    return _numbers(route, agreed, where) if kind in NUMBERS else None


_Agreed = tuple[Guard, int, Signature]


def _array(route: MailboxRoute, agreed: _Agreed) -> Run:
    """Return the all-reduce of one array."""
    mailboxes, pack, op, (guard, digest, signature) = route.mailboxes, route.packs[0], route.op, agreed
    me = mailboxes.local_rank
    dtype, shape = pack.dtype, pack.members[0].shape
    slots = []
    for slot, (parts,), (rows,) in zip(mailboxes.slots, route.parts, route.rows, strict=True):
        shaped = [part.reshape(shape) for part in parts]
        many = None if rows is None else add_rows(route.combine, rows.reshape(len(parts), *shape))
        slots.append((slot.exchange, shaped[me], shaped[0], shaped[1], shaped[2:], many))
    combine, quiet = route.combine, route.quiet
    divides = op._divisor(dtype, mailboxes.size) != 1
    divide, operand = division(mailboxes.size, dtype)
    result_dtype = mean_dtype(dtype) if op is ReduceOp.MEAN else dtype
    empty, is_exact = np.empty, result_dtype == dtype

    def run(value: Array, out: Array | None) -> Any:
        if out is None:  # memory is taken before the ranks agree
            total = empty(shape, dtype)
            result = None if is_exact else empty(shape, result_dtype)
        elif type(out) is np.ndarray and out.dtype == result_dtype and out.shape == shape and out.flags.writeable:
            total = out if is_exact else empty(shape, dtype)
            result = out
        else:
            return MISFIT
        sequence = mailboxes.sequence + 1
        exchange, place, first, second, others, many = slots[sequence & 1]
        place[...] = value
        if not exchange(sequence, digest):
            guard.resolve(signature)
        if many is not None:
            quiet(many, out=total)
        else:
            quiet(combine, first, second, out=total)
            for other in others:
                quiet(combine, total, other, out=total)
        if divides:
            quiet(divide, total, operand, total)
        return total if is_exact else finish(total, dtype, op, mailboxes.size, result)

    return run


def _numbers(route: MailboxRoute, agreed: _Agreed, where: Leaves) -> Run:
    """Return the all-reduce of a few numbers of one Python or NumPy type."""
    mailboxes, pack, op, (guard, digest, signature) = route.mailboxes, route.packs[0], route.op, agreed
    me = mailboxes.local_rank
    dtype = pack.dtype
    write = struct.Struct(f"{pack.size}{dtype.char if dtype.char != 'l' else 'q'}").pack_into
    slots = []
    for slot, (parts,), (rows,) in zip(mailboxes.slots, route.parts, route.rows, strict=True):
        many = None if rows is None else add_rows(route.combine, rows)
        slots.append((slot.exchange, parts[me].data.cast("B"), parts[0], parts[1], parts[2:], many))
    build, combine, quiet = where.build, route.combine, route.quiet
    divides = op._divisor(dtype, mailboxes.size) != 1
    divide, operand = division(mailboxes.size, dtype)
    is_mean_of_integers = op is ReduceOp.MEAN and dtype.kind in "iu"
    # A run is only called with dictionaries whose keys come in the same order.
    take: Callable[[Any], Any] = dict.values if where.in_order else where.take

    def run(value: Any, out: Any) -> Any:
        if out is not None:
            return MISFIT
        sequence = mailboxes.sequence + 1
        exchange, place, first, second, others, many = slots[sequence & 1]
        try:
            write(place, 0, *take(value))
        except (struct.error, OverflowError):  # an int that has no such dtype
            return MISFIT
        if not exchange(sequence, digest):
            guard.resolve(signature)
        if many is not None:
            total = quiet(many)
        else:
            total = quiet(combine, first, second)
            for other in others:
                quiet(combine, total, other, out=total)
        if divides:
            quiet(divide, total, operand, total)
        if is_mean_of_integers:
            total = finish(total, dtype, op, mailboxes.size)
        return build(total.flat)  # whose elements are made in half the time of the array's own

    return run
