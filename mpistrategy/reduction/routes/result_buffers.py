"""The route of large arrays on one node: result buffers, which the ranks share and in which the results stay.

A rank copies what its peers will add up into its buffer, agrees with them on the call, and combines its own share of
all packs into all ranks' buffers; its own array is read where it is.  For two ranks that is half a copy, one pass and
two synchronizations, one of which is the check of the call.  Every other route needs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpistrategy.arrays.dtypes import Array, quiet_runner
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.shared_memory.bounce_buffers import share
from mpistrategy.mpi.shared_memory.segments import aligned
from mpistrategy.reduction.layout.packing import Pack
from mpistrategy.reduction.routes.in_place import combine

#: `mpistrategy.reduction.routes.in_place.combine`, or what does the same in another order.
Combination = Callable[[Sequence[Array], Sequence[Array], str, int, tuple[int, int]], None]


class ResultBufferReduction:
    """The reduction of certain packs.

    Small arrays and large ones have separate buffers: keeping a small result keeps no large one alive.

    Args:
        communicator: the ranks of one node; it has result buffers.
        packs: what is reduced.
        op: "SUM", "MIN", "MAX" or "PROD".
        divisors: what the sum of each pack is divided by.
        combination: how the buffers are combined.
    """

    def __init__(
        self,
        communicator: Communicator,
        packs: Sequence[Pack],
        op: str,
        divisors: Sequence[int],
        combination: Combination = combine,
    ) -> None:
        self._communicator = communicator
        self._op = op
        self._combine = combination
        self._quiet = quiet_runner()
        self._slots: list[_PackSlot] = []
        self._sizes: list[int] = []
        for small in (True, False):
            start = 0
            for pack, divisor in zip(packs, divisors, strict=True):
                if (len(pack.members) > 1 or pack.nbytes < communicator.thresholds.pack_bytes) == small:
                    own = share(pack.size, communicator.local_rank, communicator.size, pack.dtype.itemsize)
                    others = [slice(*part) for part in ((0, own[0]), (own[1], pack.size)) if part[0] < part[1]]
                    self._slots.append(_PackSlot(pack, divisor, len(self._sizes), start, own, others))
                    start += aligned(pack.nbytes)
            if start:
                self._sizes.append(start)
        self._buffers: list[Array] | None = None
        self._sources: list[Array] = []
        self._has_begun = False

    @property
    def is_possible(self) -> bool:
        """Whether there are buffers for it, or will be when it is done again."""
        buffers = self._communicator.result_buffers
        return buffers is not None and buffers.may_have(self._sizes)

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has found buffers for this rank's arrays."""
        return self._buffers is not None

    def prepare(self, arrays: Sequence[Array], *, wanted: bool = True) -> None:
        """Copy this rank's arrays, before the ranks agree on the call; if one rank does not want it, none does."""
        buffers = self._communicator.result_buffers
        assert buffers is not None
        self._buffers, self._sources = None, []  # those before are free when their results are
        if not wanted:
            buffers.decline()
            return
        self._buffers = buffers.take(self._sizes)
        if self._buffers is not None:
            self._sources = [slot.copy_in(arrays, self._buffers[slot.buffer]) for slot in self._slots]

    def run(self) -> list[tuple[Pack, Array]] | None:
        """Return the packs and their sums, flat, after the agreement; None, on all ranks, where one had no buffer."""
        ranks = self._communicator
        mine, self._buffers = self._buffers, None
        sources, self._sources = self._sources, []
        assert ranks.result_buffers is not None
        everybodys = ranks.result_buffers.taken(self._sizes)
        if everybodys is None or mine is None:
            return None
        if not self._has_begun:
            self._has_begun = True
            for slot in self._slots:
                ranks.pool.forget(slot.pack.nbytes)  # what was taken while there were no buffers
        for slot, source in zip(self._slots, sources, strict=True):
            targets = [slot.of(theirs) for theirs in everybodys[slot.buffer]]
            arrays = targets.copy()
            arrays[ranks.local_rank] = source
            # Overflow gives inf, as in MPI; NumPy would warn on the one rank that computes the element.
            self._quiet(self._combine, arrays, targets, self._op, slot.divisor, slot.own)
        ranks.node_barrier()
        return [(slot.pack, slot.of(mine[slot.buffer])) for slot in self._slots]


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
