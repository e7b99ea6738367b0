"""The route of large arrays on one node: result buffers, which the ranks share and in which the results stay.

A rank copies what its peers will add up into its buffer, agrees with them on the call, and combines its own share of
all packs into all ranks' buffers; its own array is read where it is.  For two ranks that is half a copy, one pass and
two synchronizations, one of which is the check of the call.  Every other route needs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType

import numpy as np

from mpistrategy.arrays.dtypes import Array, quiet_runner
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.shared_memory.bounce_buffers import share
from mpistrategy.mpi.shared_memory.segments import aligned
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.packing import Pack
from mpistrategy.reduction.routes.base import Description, Route, Targets, grouped, nbytes_of

#: `mpistrategy.reduction.routes.in_place.combine`, or what does the same in another order.
Combination = Callable[[Sequence[Array], Sequence[Array], str, int, tuple[int, int]], None]


class ResultBufferRoute:
    """See `mpistrategy.reduction.routes.base.Route`.

    Small arrays and large ones have separate buffers: keeping a small result keeps no large one alive.

    Args:
        communicator: the ranks of one node; it has result buffers.
        op: how they are combined.
        otherwise: the route of calls in which a rank has no free buffer, or wants the results elsewhere.
        combination: how the buffers are combined.
    """

    def __init__(self, communicator: Communicator, op: ReduceOp, otherwise: Route, combination: Combination) -> None:
        assert communicator.result_buffers is not None
        self._ranks, self._buffers, self._otherwise = communicator, communicator.result_buffers, otherwise
        self._op, self._combine, self._quiet = op._on_the_wire, combination, quiet_runner()
        packs = otherwise.packs
        self.packs: tuple[Pack, ...] = packs
        self._count = sum(len(pack.members) for pack in packs)
        self._numbers = [m.index for p in packs for m in p.members if m.stop - m.start == 1]
        self._slots: list[_PackSlot] = []
        self._sizes: list[int] = []
        for small in (True, False):
            start = 0
            for pack in packs:
                if (len(pack.members) > 1 or pack.nbytes < communicator.thresholds.pack_bytes) == small:
                    own = share(pack.size, communicator.local_rank, communicator.size, pack.dtype.itemsize)
                    others = [slice(*part) for part in ((0, own[0]), (own[1], pack.size)) if part[0] < part[1]]
                    divisor = op._divisor(pack.dtype, communicator.size)
                    self._slots.append(_PackSlot(pack, divisor, len(self._sizes), start, own, others))
                    start += aligned(pack.nbytes)
            if start:
                self._sizes.append(start)
        #: This rank's buffers and its packs between `bring` and `run`; None while it has none.
        self._mine: list[Array] | None = None
        self._sources: list[Array] = []
        self._has_begun = False

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> None:
        """Copy this rank's arrays into result buffers; if one rank wants the results elsewhere, none does."""
        self._mine, self._sources = None, []  # those before are free when their results are
        if targets is not None and {*map(type, targets)} != {NoneType}:
            self._buffers.decline()
        else:
            self._mine = self._buffers.take(self._sizes)
        if self._mine is None:
            self._otherwise.bring(arrays, targets)
        else:
            self._sources = [slot.copy_in(arrays, self._mine[slot.buffer]) for slot in self._slots]

    def run(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return the combinations, in this rank's result buffers unless a rank had none."""
        ranks = self._ranks
        mine, self._mine = self._mine, None
        sources, self._sources = self._sources, []
        everybodys = self._buffers.taken(self._sizes)
        if everybodys is None or mine is None:
            # Some rank has no buffer.  Those that have one have yet to take memory, which may fail: all hear of it.
            ranks.guard.on_all(lambda: None if mine is None else self._otherwise.bring(arrays, targets))
            return self._otherwise.run(arrays, targets)
        if not self._has_begun:
            self._has_begun = True
            for slot in self._slots:
                ranks.pool.forget(slot.pack.nbytes)  # what was taken while there were no buffers
        for slot, source in zip(self._slots, sources, strict=True):
            targets_of_all = [slot.of(theirs) for theirs in everybodys[slot.buffer]]
            brought = targets_of_all.copy()
            brought[ranks.local_rank] = source
            # Overflow gives inf, as in MPI; NumPy would warn on the one rank that computes the element.
            self._quiet(self._combine, brought, targets_of_all, self._op, slot.divisor, slot.own)
        ranks.node_barrier()
        results: list[Array] = [np.empty(0)] * self._count
        for slot in self._slots:
            total = slot.of(mine[slot.buffer])
            if slot.pack.is_plain and len(self._slots) == 1:
                results = [total[part] for part in slot.pack.slices]
            else:
                for index, view in slot.pack.views(total):
                    results[index] = view
        for index in self._numbers:
            results[index] = results[index].copy()
        return results

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        """See `Route.describe`: there are buffers, or there will be next time."""
        if not self._buffers.may_have(self._sizes):
            return self._otherwise.describe(ranks, arrays)
        rest = 1 - 1 / ranks.size
        described = []
        for _, packs, copies in grouped(self.packs, [""] * len(self.packs), arrays):
            size = size_in_words(nbytes_of(packs))
            copies = (*copies, (rest, f"{ranks.size - 1}/{ranks.size} into this rank's result buffer"))
            way = f"in result buffers that the node shares, each rank 1/{ranks.size} of them"
            moved = f"each rank reads {size} and writes {size}, into every result buffer"
            described.append(Description(packs, way, copies, moved))
        return described


@dataclass(frozen=True)
class _PackSlot:
    """Where a pack is: from `start` on in one of the buffers.

    Attributes:
        pack: which.
        divisor: what its sum is divided by.
        buffer: the number of the buffer.
        start: in bytes.
        own: where the elements begin and end that this rank adds up.
        others: the parts of it that other ranks add up.
    """

    pack: Pack
    divisor: int
    buffer: int
    start: int
    own: tuple[int, int]
    others: list[slice]

    def of(self, buffer: Array) -> Array:
        """Return the pack in a buffer."""
        return np.ndarray((self.pack.size,), self.pack.dtype, buffer, self.start)

    def copy_in(self, arrays: Sequence[Array], buffer: Array) -> Array:
        """Copy this rank's arrays into its buffer, as far as others look at them; return where all of them are."""
        source = self.pack.in_one_piece(arrays)
        if source is None:
            return self.pack.fill(arrays, self.of(buffer))
        mine = self.of(buffer)
        for part in self.others:
            mine[part] = source[part]
        return source
