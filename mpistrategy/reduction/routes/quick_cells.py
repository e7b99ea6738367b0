"""The shortest ways through the cells: one array, one element, one number, a few numbers of one kind.

Each function returns a ``run(value, out)`` that writes the value next to the digest of the call, waits for the
peers' cells, compares, and adds up; it returns MISFIT before anything has been shown, when `value` or `out` is not
what it seemed.  Few lines are run a call, since a message between two cores takes half a microsecond.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, mean_dtype
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.signature import Signature
from mpistrategy.mpi.shared_memory.mailboxes import Cells
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import finish
from mpistrategy.reduction.layout.leaves import Leaves
from mpistrategy.reduction.routes.mailboxes import CellProgram

#: Returned for a value that must go the general way.
MISFIT: Any = object()

Agreed = tuple[Guard, int, Signature]


def _meet(cells: Cells, sequence: int, peers: Sequence[memoryview], agreed: Agreed) -> None:
    """Wait for the peers and compare, after this rank has shown its own digest and number."""
    guard, digest, signature = agreed
    for peer in peers:
        if peer[0] != sequence:
            cells.waiting.until(peer, sequence)
        if peer[1] != digest:
            guard.settle(signature)
            return


def array_in_cells(program: CellProgram, op: ReduceOp, agreed: Agreed) -> Callable[[Any, Any], Any]:
    """Return the all-reduce of one array."""
    cells, pack, digest = program.cells, program.packs[0], agreed[1]
    shape = pack.members[0].shape
    dtype = pack.dtype
    slots = []
    for slot, (parts,) in zip(cells.slots, program.parts, strict=True):
        shaped = [part.reshape(shape) for part in parts]
        slots.append((slot.mine, slot.peers, shaped[cells.local_rank], shaped[0], shaped[1], shaped[2:]))
    combine, quiet = program.combine, program.quiet
    divisor = dtype.type(cells.size) if op is ReduceOp.MEAN else None
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
        sequence = cells.sequence + 1
        mine, peers, place, first, second, others = slots[sequence & 1]
        mine[1] = digest  # first: its cache line, which the peers look at, is written by the next line anyway
        place[...] = value
        cells.sequence = sequence
        mine[0] = sequence
        for peer in peers:
            if peer[0] != sequence or peer[1] != digest:
                _meet(cells, sequence, peers, agreed)
                break
        total = quiet(combine, first, second) if total is None else quiet(combine, first, second, out=total)
        for other in others:
            quiet(combine, total, other, out=total)
        if divisor is not None:
            if integers:
                total = finish(total, dtype, op, cells.size)
            else:
                quiet(divide, total, divisor, total)
        if out is not None and total is not out:
            out[...] = total
            return out
        return total

    return run


def _slots_of_one(program: CellProgram) -> list[tuple[memoryview, tuple[memoryview, ...], Any, Any, Any, list[Any]]]:
    """Return for each slot its cells, and where one number of this rank, of ranks 0 and 1, and of the others is."""
    slots = []
    for slot, (parts,) in zip(program.cells.slots, program.parts, strict=True):
        numbers = [part.data for part in parts]
        slots.append((slot.mine, slot.peers, numbers[program.cells.local_rank], numbers[0], numbers[1], numbers[2:]))
    return slots


def lone_element_in_cells(program: CellProgram, op: ReduceOp, agreed: Agreed) -> Callable[[Any, Any], Any]:
    """Return the sum or the mean of an array of one float; that of a loss is made in every step.

    Python adds float32 as float64, and what is rounded to float32 after each sum is what NumPy gives.
    """
    cells, pack, digest = program.cells, program.packs[0], agreed[1]
    dtype, shape = pack.dtype, pack.members[0].shape
    slots = _slots_of_one(program)
    divisor = float(cells.size) if op is ReduceOp.MEAN else None
    empty, at = np.empty, (0,) * len(shape)
    rounded: Any = np.empty(1, dtype).data  # memory warns of no overflow

    def run(value: Array, out: Array | None) -> Any:
        if out is None:
            result = empty(shape, dtype)
        elif type(out) is np.ndarray and out.dtype == dtype and out.shape == shape and out.flags.writeable:
            result = out
        else:
            return MISFIT
        sequence = cells.sequence + 1
        mine, peers, place, first, second, others = slots[sequence & 1]
        mine[1] = digest
        place[0] = value.item()
        cells.sequence = sequence
        mine[0] = sequence
        for peer in peers:
            if peer[0] != sequence or peer[1] != digest:
                _meet(cells, sequence, peers, agreed)
                break
        rounded[0] = first[0] + second[0]
        for other in others:
            rounded[0] += other[0]
        if divisor is not None:
            rounded[0] /= divisor
        result[at] = rounded[0]
        return result

    return run


def number_in_cells(program: CellProgram, op: ReduceOp, agreed: Agreed) -> Callable[[Any, Any], Any]:
    """Return the sum or the mean of one Python float; Python's own arithmetic gives the same bits."""
    cells, digest, slots = program.cells, agreed[1], _slots_of_one(program)
    divisor = float(cells.size) if op is ReduceOp.MEAN else None
    result = np.float64

    def run(value: Any, out: Any) -> Any:
        if out is not None:
            return MISFIT
        sequence = cells.sequence + 1
        mine, peers, place, first, second, others = slots[sequence & 1]
        place[0] = value
        cells.sequence = sequence
        mine[1] = digest
        mine[0] = sequence
        for peer in peers:
            if peer[0] != sequence or peer[1] != digest:
                _meet(cells, sequence, peers, agreed)
                break
        total = first[0] + second[0]
        for other in others:
            total += other[0]
        return result(total if divisor is None else total / divisor)

    return run


def numbers_in_cells(program: CellProgram, op: ReduceOp, agreed: Agreed, where: Leaves) -> Callable[[Any, Any], Any]:
    """Return the all-reduce of a few numbers of one Python or NumPy type."""
    cells, pack, digest = program.cells, program.packs[0], agreed[1]
    dtype, count = pack.dtype, pack.size
    write = struct.Struct(f"{count}{dtype.char if dtype.char != 'l' else 'q'}").pack_into
    slots = []
    for slot, (parts,) in zip(cells.slots, program.parts, strict=True):
        slots.append((slot.mine, slot.peers, parts[cells.local_rank].data.cast("B"), parts))
    build, mean, quiet, total_of = where.build, op is ReduceOp.MEAN, program.quiet, program.total
    divide, divisor = np.true_divide, None if dtype.kind in "iu" else dtype.type(cells.size)
    # A run is only called with dictionaries whose keys come in the same order.
    take: Callable[[Any], Any] = dict.values if where.in_order else where.take

    def run(value: Any, out: Any) -> Any:
        if out is not None:
            return MISFIT
        sequence = cells.sequence + 1
        mine, peers, place, parts = slots[sequence & 1]
        try:
            write(place, 0, *take(value))
        except (struct.error, OverflowError):  # an int that has no such dtype
            return MISFIT
        cells.sequence = sequence
        mine[1] = digest
        mine[0] = sequence
        for peer in peers:
            if peer[0] != sequence or peer[1] != digest:
                _meet(cells, sequence, peers, agreed)
                break
        total = total_of(parts)
        if mean and divisor is None:
            total = finish(total, dtype, op, cells.size)
        elif mean:
            quiet(divide, total, divisor, total)
        return build(total.flat)  # whose elements are made in half the time of the array's own

    return run
