"""The sliced update: each rank of a node reduces and updates its share of all variables, in every rank's copy.

It needs parameters, slots and gradients in memory that the ranks of the node share.  One rank then reads, adds and
steps each number, instead of all of them, while the number is in that rank's cache.  The bits are those of the plain
path: sums are made in rank order, a mean is divided after the sum, and the kernel is the same.

Arrays that follow one another in the memory of every rank are one run, so hundreds of small variables need few calls
of NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by
from mpistrategy.errors import RemoteError
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory, aligned
from mpistrategy.options import ReduceOp
from mpistrategy.training.kernels import SCRATCH_ARRAYS, Kernel, Scratch, chunk_size, chunks


@dataclass(frozen=True)
class MemoryRange:
    """Where an array is: at the same offset in the memory of every rank of the node.

    Attributes:
        memory: flat uint8 arrays, by local rank.
        offset: in bytes, a multiple of `ALIGNMENT`.
    """

    memory: tuple[Array, ...]
    offset: int

    def view(self, start: int, stop: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        """Return the elements between two byte numbers, counted from the offset, of every rank's copy."""
        return tuple(one[self.offset + start : self.offset + stop].view(dtype) for one in self.memory)

    def is_followed_by(self, other: MemoryRange, distance: int) -> bool:
        """Return whether `other` begins `distance` bytes after this one, in the same memory."""
        return other.offset == self.offset + distance and other.memory[0] is self.memory[0]


@dataclass(frozen=True)
class Run:
    """Variables of one dtype that follow one another in memory; one variable, before runs are merged.

    Attributes:
        dtype: the dtype of all arrays.
        nbytes: the bytes from the first element of the first variable to the last of the last.
        parameter: where the variables are.
        gradient: where their gradients are.
        slots: where their slots are, by name.
        sizes: the bytes of each variable; () means one.
    """

    dtype: np.dtype[Any]
    nbytes: int
    parameter: MemoryRange
    gradient: MemoryRange
    slots: Mapping[str, MemoryRange]
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.sizes:
            object.__setattr__(self, "sizes", (self.nbytes,))

    @property
    def ranges(self) -> tuple[MemoryRange, ...]:
        """The ranges of all of its arrays."""
        return (self.parameter, self.gradient, *self.slots.values())

    def with_next(self, other: Run) -> Run | None:
        """Return this run and `other` as one; None when there is something else between them."""
        distance = aligned(self.nbytes)
        pairs = zip(self.ranges, other.ranges, strict=True)
        if self.dtype != other.dtype or not all(mine.is_followed_by(its, distance) for mine, its in pairs):
            return None
        sizes = (*self.sizes, *other.sizes)
        return Run(self.dtype, distance + other.nbytes, self.parameter, self.gradient, self.slots, sizes)

    def part_of_one(self, piece: slice) -> tuple[int, slice] | None:
        """Return the variable that contains a piece, by number, and the piece within it; None for several variables."""
        before, itemsize = 0, self.dtype.itemsize
        for number, nbytes in enumerate(self.sizes):
            first, last = before // itemsize, (before + nbytes) // itemsize
            if first <= piece.start and piece.stop <= last:
                return number, slice(piece.start - first, piece.stop - first)
            before += aligned(nbytes)
        return None


@dataclass(frozen=True, slots=True)
class _Chunk:
    gradients: tuple[Array, ...]
    of_one: tuple[int, slice] | None
    total: Array
    parameter: Array
    slots: Mapping[str, Array]
    scratch: tuple[Array, ...]
    copies: tuple[tuple[Array, Array], ...]


class SlicedUpdate:
    """This rank's share of the update, cut into chunks once; `run` makes a step.

    Args:
        variables: one run for each variable, in the same order on all ranks.
        communicator: the ranks, all of one node.
        failures: at least one byte of shared memory for each rank, where it says that it has failed.
        scratch: temporary arrays for sums and kernels.
        merged: whether neighbours become one run.  The padding between them is then part of it: it is filled with
            zeros, and the kernel must leave zeros unchanged.
    """

    def __init__(
        self,
        variables: Sequence[Run],
        communicator: Ranks,
        failures: SharedMemory,
        scratch: Scratch,
        merged: bool = True,
    ) -> None:
        self._communicator = communicator
        self._failures = failures.segments
        self._failed = failures.mine
        runs = list(_merged(variables, communicator.local_rank)) if merged else list(variables)
        #: How many runs the variables make.
        self.runs: int = len(runs)
        self._chunks: list[_Chunk] = []
        #: For each variable, the parts of this rank's gradient that only this rank reads, in chunks of their own.
        self.own_parts: list[list[slice]] = [[] for _ in variables]
        before = dict(zip(map(id, runs), accumulate((len(run.sizes) for run in runs), initial=0), strict=False))
        for run, start, stop in _shares(runs, communicator.local_rank, communicator.size):
            for piece in chunks(start, stop, chunk_size(run.dtype)):
                of_one = run.part_of_one(piece)
                if of_one is not None:
                    of_one = (before[id(run)] + of_one[0], of_one[1])
                    self.own_parts[of_one[0]].append(of_one[1])
                self._chunks.append(_chunk(run, piece, of_one, communicator.local_rank, scratch))
        self._memory = {id(m): m for run in runs for p in (run.parameter, *run.slots.values()) for m in p.memory}

    def changes(self, array: Array) -> bool:
        """Return whether a step may write to the memory of `array`."""
        # An array that owns its memory shares none.
        return array.base is not None and any(np.may_share_memory(array, each) for each in self._memory.values())

    def run(self, kernel: Kernel, op: ReduceOp, elsewhere: Sequence[Array | None] = ()) -> None:
        """Combine the gradients and make one step in every copy, after all ranks have agreed on it.

        Args:
            kernel: the step.
            op: SUM or MEAN.
            elsewhere: for each variable, a flat array that has the `own_parts` of this rank's gradient; None where
                they are in shared memory.

        Raises:
            RemoteError: when another rank could not finish its share.
        """
        self._failed[0] = 0
        try:
            self._update(kernel, op, elsewhere)
        except BaseException:
            self._failed[0] = 1
            raise
        finally:  # the peers wait for this rank, also after an error
            self._communicator.node_barrier()
        for rank, segment in enumerate(self._failures):
            if segment[0]:
                raise RemoteError.at(
                    "Optimizer.apply_gradients",
                    found=f"an exception on rank {rank} while it updated its share of the variables",
                    expected="none",
                    fix="Its own message says what happened. The variables are partly updated: restore them.",
                )

    def _update(self, kernel: Kernel, op: ReduceOp, elsewhere: Sequence[Array | None]) -> None:
        mean, size, me = op is ReduceOp.MEAN, self._communicator.size, self._communicator.local_rank
        for chunk in self._chunks:
            first, second, *others = chunk.gradients
            if elsewhere and chunk.of_one is not None and (mine := elsewhere[chunk.of_one[0]]) is not None:
                gradients = list(chunk.gradients)
                gradients[me] = mine[chunk.of_one[1]]
                first, second, *others = gradients
            total = chunk.total
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(first, second, out=total)
                for other in others:
                    np.add(total, other, out=total)
                if mean:
                    divide_by(size, total)
            kernel(chunk.parameter, total, chunk.slots, chunk.scratch)
            for source, target in chunk.copies:
                target[...] = source


def _merged(variables: Sequence[Run], local_rank: int) -> Iterator[Run]:
    """Yield the runs that the variables make; clear the padding inside them, in this rank's memory."""
    current: Run | None = None
    for variable in variables:
        longer = current.with_next(variable) if current is not None else None
        if current is not None and longer is None:
            yield current
        elif current is not None:
            for each in (current.parameter, *current.slots.values()):
                start = each.offset + current.nbytes
                each.memory[local_rank][start : each.offset + aligned(current.nbytes)] = 0
        current = longer or variable
    if current is not None:
        yield current


def _shares(runs: Sequence[Run], local_rank: int, size: int) -> Iterator[tuple[Run, int, int]]:
    """Yield this rank's parts of the runs, as first and last element: equal shares of all bytes."""
    lines = [aligned(run.nbytes) // ALIGNMENT for run in runs]
    total, before = sum(lines), 0
    first, last = total * local_rank // size, total * (local_rank + 1) // size
    for run, count in zip(runs, lines, strict=True):
        begin, end = max(first - before, 0), min(last - before, count)
        before += count
        start, stop = begin * ALIGNMENT, min(end * ALIGNMENT, run.nbytes)
        if start < stop:
            yield run, start // run.dtype.itemsize, stop // run.dtype.itemsize


def _chunk(run: Run, piece: slice, of_one: tuple[int, slice] | None, local_rank: int, scratch: Scratch) -> _Chunk:
    def replicas(one: MemoryRange) -> tuple[Array, ...]:
        return one.view(piece.start * run.dtype.itemsize, piece.stop * run.dtype.itemsize, run.dtype)

    changed = {name: replicas(one) for name, one in {"": run.parameter, **run.slots}.items()}
    mine = {name: arrays[local_rank] for name, arrays in changed.items()}
    arrays = scratch.of(run.dtype, piece.stop - piece.start)
    return _Chunk(
        gradients=replicas(run.gradient),
        of_one=of_one,
        total=arrays[SCRATCH_ARRAYS],
        parameter=mine.pop(""),
        slots=mine,
        scratch=arrays[:SCRATCH_ARRAYS],
        copies=tuple(
            (each[local_rank], target)
            for each in changed.values()
            for rank, target in enumerate(each)
            if rank != local_rank
        ),
    )
