"""The reduction of packs in blocks: memory that the ranks of a node share, and in which the results stay.

A rank brings what its peers will add up, agrees with them on the call, and then combines its own share of all packs
into all ranks' blocks, reading its own array where it is.  For two ranks that is half a copy, one pass, and two
meetings, one of which is the check of the call; every other way copies more or meets more often.
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

    Small arrays and large ones have blocks of their own: who keeps a small result keeps no large ones alive.

    Args:
        communicator: the ranks of one node; it has blocks.
        packs: what is reduced.
        op: "SUM", "MIN", "MAX" or "PROD".
        divisors: what the sum of each pack is divided by.
        combination: how the blocks are combined.
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
        self._places: list[_Place] = []
        self._sizes: list[int] = []
        for small in (True, False):
            start = 0
            for pack, divisor in zip(packs, divisors, strict=True):
                if (len(pack.members) > 1 or pack.nbytes < communicator.thresholds.pack_bytes) == small:
                    own = share(pack.size, communicator.local_rank, communicator.size, pack.dtype.itemsize)
                    others = [slice(*part) for part in ((0, own[0]), (own[1], pack.size)) if part[0] < part[1]]
                    self._places.append(_Place(pack, divisor, len(self._sizes), start, own, others))
                    start += aligned(pack.nbytes)
            if start:
                self._sizes.append(start)
        self._blocks: list[Array] | None = None
        self._sources: list[Array] = []
        self._has_begun = False

    @property
    def is_possible(self) -> bool:
        """Whether there are blocks for it, or will be when it is done again."""
        blocks = self._communicator.result_buffers
        return blocks is not None and blocks.may_have(self._sizes)

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has found blocks for this rank's arrays."""
        return self._blocks is not None

    def prepare(self, arrays: Sequence[Array], *, wanted: bool = True) -> None:
        """Bring this rank's arrays, before the ranks agree on the call; where one does not want it, none will."""
        blocks = self._communicator.result_buffers
        assert blocks is not None
        self._blocks, self._sources = None, []  # those before are free when their results are
        if not wanted:
            blocks.decline()
            return
        self._blocks = blocks.take(self._sizes)
        if self._blocks is not None:
            self._sources = [place.bring(arrays, self._blocks[place.block]) for place in self._places]

    def run(self) -> list[tuple[Pack, Array]] | None:
        """Return the packs and their sums, flat, after the agreement; None, on all ranks, where one had no block."""
        ranks = self._communicator
        mine, self._blocks = self._blocks, None
        sources, self._sources = self._sources, []
        assert ranks.result_buffers is not None
        everybodys = ranks.result_buffers.taken(self._sizes)
        if everybodys is None or mine is None:
            return None
        if not self._has_begun:
            self._has_begun = True
            for place in self._places:
                ranks.pool.forget(place.pack.nbytes)  # what was taken while there were no blocks
        for place, source in zip(self._places, sources, strict=True):
            targets = [place.of(theirs) for theirs in everybodys[place.block]]
            arrays = targets.copy()
            arrays[ranks.local_rank] = source
            # Overflow gives inf, as in MPI; NumPy would warn on the one rank that computes the element.
            self._quiet(self._combine, arrays, targets, self._op, place.divisor, place.own)
        ranks.node_barrier()
        return [(place.pack, place.of(mine[place.block])) for place in self._places]


@dataclass(frozen=True)
class _Place:
    """Where a pack is: from `start` on in one of the blocks.

    Attributes:
        pack: which.
        divisor: what its sum is divided by.
        block: the number of the block.
        start: in bytes.
        own: where the elements begin and end that this rank adds up.
        others: the parts of it that other ranks add up.
    """

    pack: Pack
    divisor: int
    block: int
    start: int
    own: tuple[int, int]
    others: list[slice]

    def of(self, block: Array) -> Array:
        """Return the pack in a block."""
        return np.ndarray((self.pack.size,), self.pack.dtype, block, self.start)

    def bring(self, arrays: Sequence[Array], block: Array) -> Array:
        """Copy this rank's arrays into its block, as far as others look at them; return where all of them are."""
        source = self.pack.in_one_piece(arrays)
        if source is None:
            return self.pack.fill(arrays, self.of(block))
        mine = self.of(block)
        for part in self.others:
            mine[part] = source[part]
        return source
