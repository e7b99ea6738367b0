"""The sliced step: each rank of a node reduces and updates its share of all variables, in every rank's copy.

It needs variables, slots and gradients in memory that the ranks of the node share.  One rank then reads, adds and
steps each number, instead of all ranks, while the number is in that rank's cache.  The bits equal those of the plain
path: sums are made in rank order, a mean is divided after the sum, and the kernel is the same.

Small variables that follow one another in the memory of every rank are one run, so hundreds of them need few calls of
NumPy.  A large variable is a run by itself: of its gradient only the part that other ranks read is copied to shared
memory, unless it is there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by, span
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, aligned
from mpistrategy.options import ReduceOp, VariableSynchronization
from mpistrategy.reduction.arena import Arena
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.training import kernels
from mpistrategy.training.formulas import Kernel
from mpistrategy.training.kernels import ChangedMemory, FlatUpdate, Scratch, chunk_size, chunks, scratch_of
from mpistrategy.variables.variable import Variable

#: Dtypes that are added without conversion, and whose sums do not depend on the alignment of the arrays.
_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
#: From so many arenas on a step makes no other one: the second is for variables that had no gradients at first.
_MOST_ARENAS = 2


#: Where an array is: flat uint8 arrays, the memory of every local rank, and the offset in each, a multiple of
#: `ALIGNMENT` bytes.
_Place: TypeAlias = tuple[tuple[Array, ...], int]


class GradientArena(NamedTuple):
    """The gradients of some variables, in memory that the ranks of the node share where they can.

    Attributes:
        arena: the memory; its values are like the variables, in their order.
        variables: the variables.
        numbers: the index of each variable, by its id.
    """

    arena: Arena[Any]
    variables: tuple[Variable, ...]
    numbers: dict[int, int]


#: The arenas of an optimizer, by the ids of their variables.
Arenas: TypeAlias = dict[tuple[int, ...], GradientArena]


def arena_of(arenas: Arenas, strategy: Strategy, variables: tuple[Variable, ...]) -> GradientArena:
    """Return the arena of exactly these variables; where there is none, make one.  Collective then."""
    ids = tuple(map(id, variables))
    if ids not in arenas or arenas[ids].arena._closed:
        numbers = {key: number for number, key in enumerate(ids)}
        arenas[ids] = GradientArena(strategy.arena(list(variables)), variables, numbers)
    return arenas[ids]


def arena_for_step(arenas: Arenas, strategy: Strategy, variables: tuple[Variable, ...]) -> GradientArena | None:
    """Return an arena that has these variables among others; where there is none, make one.  Collective then.

    Returns:
        None instead of a third arena, where other variables have gradients in every step: memory would grow.
    """
    ids = {*map(id, variables)}
    for arena in reversed(arenas.values()):
        if ids <= arena.numbers.keys() and not arena.arena._closed:
            return arena
    return arena_of(arenas, strategy, variables) if len(arenas) < _MOST_ARENAS else None


def can_be_sliced(strategy: Strategy, variables: Sequence[Variable], slots: Sequence[Mapping[str, Variable]]) -> bool:
    """Return whether the variables and slots are in memory that the ranks share; the same on all ranks."""
    ranks = strategy.extended.communicator
    everything = [*variables, *(slot for beside in slots for slot in beside.values())]
    return (
        ranks.size > 1
        and ranks.nodes == 1
        and len({*map(id, variables)}) == len(variables)
        and all(
            var.synchronization is VariableSynchronization.ON_WRITE
            and var.dtype in _DTYPES
            and var._memory_slot is not None
            for var in everything
        )
    )


def _place_of(var: Variable) -> _Place:
    assert var._memory_slot is not None
    return var._memory_slot.slab.segments, var._memory_slot.offset


@dataclass
class _Run:
    """Variables of one dtype that follow one another in the memory of every rank.

    Attributes:
        dtype: the dtype of all arrays.
        places: where the first variable is, its gradient, and its slots.
        nbytes: from the first element of the first variable to the last of the last.
        number: its variable; None for several variables.
    """

    dtype: np.dtype[Any]
    places: list[_Place]
    nbytes: int
    number: int | None

    def takes(self, dtype: np.dtype[Any], places: list[_Place], nbytes: int) -> bool:
        """Return whether a variable continues this run: both are small, and nothing is between them."""
        is_small = self.number is None or self.nbytes < kernels.CHUNK_BYTES
        distance = aligned(self.nbytes)
        return (is_small and nbytes < kernels.CHUNK_BYTES and dtype == self.dtype) and all(
            memory[0] is own_memory[0] and offset == own_offset + distance
            for (own_memory, own_offset), (memory, offset) in zip(self.places, places, strict=True)
        )


class _Chunk(NamedTuple):
    """A part of a run that is updated at once.

    Attributes:
        number: its variable; None for a run of several variables.
        piece: which elements of the run.
        gradients: of all ranks.
        total: for their sum.
        update: of this rank's copies.
        copies: which of these arrays goes to which peer's copy.
    """

    number: int | None
    piece: slice
    gradients: tuple[Array, ...]
    total: Array
    update: FlatUpdate
    copies: list[tuple[Array, Array]]


class SlicedStep:
    """This rank's share of a step, cut into chunks once; `run` makes it.

    Args:
        strategy: whose ranks; all of one node.
        gradients: the shared memory for the gradients.
        variables: the variables, in the same order on all ranks.
        slots: the slots of each.
        scratch: temporary arrays for sums and kernels.
    """

    def __init__(
        self,
        strategy: Strategy,
        gradients: GradientArena,
        variables: Sequence[Variable],
        slots: Sequence[Mapping[str, Variable]],
        scratch: Scratch,
    ) -> None:
        self._ranks = strategy.extended.communicator
        self._values = [gradients.arena._leaves[gradients.numbers[id(var)]] for var in variables]
        runs = _runs(gradients, variables, slots)
        me = self._ranks.local_rank
        #: What a step writes, and where it collects gradients.
        self._changed = ChangedMemory([memory[me] for run in runs for memory, _ in run.places])
        #: Of large variables, the part of this rank's gradient that only this rank reads.
        self._own: dict[int, slice] = {}
        self._chunks: list[_Chunk] = []
        for run, share in _shares(runs, me, self._ranks.size):
            if run.number is not None:
                self._own[run.number] = share
            for piece in chunks(share.start, share.stop, chunk_size(run.dtype)):
                start, stop = (at * run.dtype.itemsize for at in (piece.start, piece.stop))
                parameters, parts, *beside = (
                    tuple(array[offset + start : offset + stop].view(run.dtype) for array in memory)
                    for memory, offset in run.places
                )
                own_slots = {name: replicas[me] for name, replicas in zip(slots[0], beside, strict=True)}
                self._chunks.append(
                    _Chunk(
                        run.number,
                        piece,
                        parts,
                        scratch_of(scratch, run.dtype, piece.stop - piece.start)[-1],
                        FlatUpdate(parameters[me], own_slots, scratch),
                        [
                            (all_of[me], peer)
                            for all_of in (parameters, *beside)
                            for peer in all_of
                            if peer is not all_of[me]
                        ],
                    )
                )

    def run(self, gradients: Sequence[Array], kernel: Kernel, op: ReduceOp, call: Call) -> None:
        """Combine the gradients and make one step in every copy, on all ranks.

        Args:
            gradients: arrays of the variables' shapes and dtypes.
            kernel: the step.
            op: SUM or MEAN.
            call: the call that all ranks make.
        """
        elsewhere = self._collect(gradients)
        # Shapes and dtypes equal the variables', and call.structure names the variables.
        call.agree("update", op=op.value, options="each rank its share")
        size, me, mean = self._ranks.size, self._ranks.local_rank, op is ReduceOp.MEAN
        for chunk in self._chunks:
            parts, total = chunk.gradients, chunk.total
            if chunk.number in elsewhere:
                parts = (*parts[:me], elsewhere[chunk.number][chunk.piece], *parts[me + 1 :])
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(parts[0], parts[1], out=total)
                for part in parts[2:]:
                    np.add(total, part, out=total)
                if mean:
                    divide_by(size, total)
            chunk.update.run(kernel, total)
            for source, target in chunk.copies:
                target[...] = source
        self._ranks.node_barrier()

    def _collect(self, gradients: Sequence[Array]) -> dict[int | None, Array]:
        """Copy the parts that other ranks read to shared memory.

        Returns:
            By the numbers of variables: flat gradients whose part for this rank was not copied.
        """
        elsewhere: dict[int | None, Array] = {}
        moved: Sequence[int] = range(len(gradients))
        if any(gradient.base is not None for gradient in gradients):  # views: some are views of the arena
            pairs = enumerate(zip(gradients, self._values, strict=True))
            moved = [number for number, (array, value) in pairs if array.base is None or not _is_same(array, value)]
            # Gradients that share memory with other gradients, or with the step's arrays, are copied before a write.
            gradients = self._changed.apart([gradients[at] for at in moved])
        for number, gradient in zip(moved, gradients, strict=True):
            value, own = self._values[number], self._own.get(number)
            if own is not None and gradient.flags.c_contiguous:
                source, target = gradient.reshape(-1), value.reshape(-1)
                target[: own.start] = source[: own.start]
                target[own.stop :] = source[own.stop :]
                elsewhere[number] = source
            else:
                value[...] = gradient
        return elsewhere


def _is_same(gradient: Array, value: Array) -> bool:
    """Return whether two arrays of one shape and dtype are the same memory, the second one contiguous."""
    return gradient is value or (gradient.flags.c_contiguous and span(gradient) == span(value))


def _runs(
    gradients: GradientArena, variables: Sequence[Variable], slots: Sequence[Mapping[str, Variable]]
) -> list[_Run]:
    """Return the runs of the variables.  Padding is part of a run: it is updated, too, and nobody reads it."""
    runs: list[_Run] = []
    memory = [tuple(array.view(np.uint8) for array in bucket.arrays) for bucket in gradients.arena._buckets]
    for number, (var, beside) in enumerate(zip(variables, slots, strict=True)):
        bucket, member = gradients.arena._places[gradients.numbers[id(var)]]
        gradient = memory[bucket], member.start * var.dtype.itemsize
        places = [_place_of(var), gradient, *map(_place_of, beside.values())]
        nbytes = var.local_view.nbytes
        if not (runs and runs[-1].takes(var.dtype, places, nbytes)):
            runs.append(_Run(var.dtype, places, nbytes, number))
            continue
        runs[-1].nbytes = aligned(runs[-1].nbytes) + nbytes
        runs[-1].number = None
    return runs


def _shares(runs: Sequence[_Run], local_rank: int, size: int) -> Iterator[tuple[_Run, slice]]:
    """Yield this rank's parts of the runs, in elements: equal shares of all bytes."""
    lines, before = sum(aligned(run.nbytes) for run in runs) // ALIGNMENT, 0
    first, last = (lines * rank // size * ALIGNMENT for rank in (local_rank, local_rank + 1))
    for run in runs:
        start, stop = max(first - before, 0), min(last - before, run.nbytes)
        before += aligned(run.nbytes)
        if start < stop:
            yield run, slice(start // run.dtype.itemsize, stop // run.dtype.itemsize)
