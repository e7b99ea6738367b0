"""The all-reduce of a list of arrays to every rank, laid out once for their dtypes and shapes and run many times.

Small lists travel in the ranks' cells together with the check of the call.  Of other lists, small arrays are packed by
dtype, and large ones go as they are: no array is copied that need not be, and results are in memory that is used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays import Array, wire_dtype
from mpistrategy.cross_device_ops.cell_program import CellProgram, fits
from mpistrategy.cross_device_ops.mean import finish, rounded
from mpistrategy.cross_device_ops.packing import DEFAULT_BYTES_PER_PACK, Layout, Member, Pack, plan_layouts
from mpistrategy.mpi.pack_blocks import block_bytes_for
from mpistrategy.mpi.paths import Way
from mpistrategy.mpi.replicas import Replicas, combine_share
from mpistrategy.mpi.transport import Communicator
from mpistrategy.options import ReduceOp

_REMEMBERED = 512
_FEW_ELEMENTS = 64


def dense_reduction(
    communicator: Communicator, layouts: tuple[Layout, ...], op: ReduceOp, bytes_per_pack: float = 0
) -> DenseReduction:
    """Return the reduction of arrays of these layouts; the same object the next time."""
    key = (layouts, op, bytes_per_pack)
    known: DenseReduction | None = communicator.compiled.get(key)
    if known is None:
        if len(communicator.compiled) >= _REMEMBERED:
            communicator.compiled.clear()
        known = communicator.compiled[key] = DenseReduction(communicator, layouts, op, bytes_per_pack)
    return known


class DenseReduction:
    """See `dense_reduction`.

    Attributes:
        program: how a small list travels in the cells; None for others.
        packs: the buffers of the others: several small arrays, or one large one.
    """

    def __init__(
        self, communicator: Communicator, layouts: tuple[Layout, ...], op: ReduceOp, bytes_per_pack: float = 0
    ) -> None:
        self._communicator = communicator
        self._op = op
        self._dtypes = [dtype for dtype, _ in layouts]
        #: Whether results leave the wire as they are: no other dtype, no division of integers.
        self._exact = all(
            dtype == wire_dtype(dtype) and not (op is ReduceOp.MEAN and dtype.kind in "iu") for dtype in self._dtypes
        )
        self.program: CellProgram | None = None
        self.packs: tuple[Pack, ...] = ()
        cells = communicator.cells
        if cells is not None and fits(cells, layouts):
            self.program = CellProgram(cells, layouts, op.on_the_wire)
        else:
            self.packs = _hybrid(layouts, communicator.paths.pack_bytes, bytes_per_pack)
        #: Whether the one pack is reduced where the ranks of the node see it, once there are blocks for that.
        self._in_blocks = (
            cells is not None
            and len(self.packs) == 1
            and len(layouts) > 1
            and self.packs[0].nbytes <= block_bytes_for(communicator.size)
            and self._ways() == ["window"]
        )
        self._pack: Array | None = None
        #: Lone numbers in packs: their results must not keep the memory of a pack.
        self._lone = [m.index for p in self.packs if p.size > _FEW_ELEMENTS for m in p.members if m.stop - m.start == 1]

    def ways(self) -> list[Way]:
        """Return the way of each of `packs`."""
        return ["blocks"] if self._in_blocks else self._ways()

    def _ways(self) -> list[Way]:
        """Return the ways without blocks: through the window go all of a dtype together, else each by itself."""
        ranks, op = self._communicator, self._op.on_the_wire
        together: Counter[np.dtype[Any]] = Counter()
        for pack in self.packs:
            together[pack.dtype] += pack.nbytes
        return [
            "window"
            if ranks.way(together[pack.dtype], pack.dtype, op) == "window"
            else ranks.way(pack.nbytes, pack.dtype, op)
            for pack in self.packs
        ]

    def prepare(self, arrays: Sequence[Any]) -> None:
        """Do what must be done before the ranks agree on the call."""
        if self.program is not None:
            self.program.write(arrays)
        elif self._in_blocks and (blocks := self._communicator.pack_blocks) is not None:
            pack = self.packs[0]
            self._pack = None  # the one before is free when its results are
            self._pack = blocks.take(pack.dtype, pack.size)
            if self._pack is not None:
                pack.fill(arrays, self._pack)

    def only_array(self) -> Callable[[Array, Array], None] | None:
        """Return what reduces one contiguous array into another of its dtype; None for other lists and ways.

        It is the short way of `run`: much of the time of a reduction of 1 MiB is Python that other work has driven out
        of the caches.
        """
        if len(self.packs) != 1 or not self._exact:
            return None
        ranks, op, pack = self._communicator, self._op.on_the_wire, self.packs[0]
        if len(pack.members) > 1 or ranks.way(pack.nbytes, pack.dtype, op) != "window":
            return None
        divisor = ranks.size if self._op is ReduceOp.MEAN else 1
        return lambda source, target: ranks.allreduce(target, op, source, divisor)

    def run(self, arrays: Sequence[Array], targets: Sequence[Array | None] | None = None) -> list[Array]:
        """Return the results, after the agreement.

        Args:
            arrays: this rank's, of the layouts; the same that `prepare` was given.
            targets: for each array memory that a result in its own dtype may be written to, contiguous and sharing
                none with another array; or None.
        """
        if self.program is not None:
            results = self.program.read()
            size = self._communicator.size
            return [finish(r, dtype, self._op, size) for r, dtype in zip(results, self._dtypes, strict=True)]
        if self._in_blocks and (found := self._reduced_in_blocks()) is not None:
            return found
        results = [np.empty(0)] * len(arrays)
        pairs: dict[np.dtype[Any], list[tuple[Array, Array]]] = {}
        for pack in self.packs:
            if len(pack.members) == 1:
                (member,) = pack.members
                result = results[member.index] = self._place(pack, member, targets)
                source, target = self._one(pack, arrays, result)
            else:
                source = target = pack.fill(arrays, self._communicator.pool.take(pack.dtype, (pack.size,)))
                for index, view in pack.views(target):
                    results[index] = view
            if pack.size:
                pairs.setdefault(pack.dtype, []).append((source, target))
        for dtype, those in pairs.items():
            divisor = self._communicator.size if self._op is ReduceOp.MEAN and dtype.kind not in "iu" else 1
            self._communicator.allreduce_many(those, self._op.on_the_wire, divisor)
        return self._finished(results)

    def _reduced_in_blocks(self) -> list[Array] | None:
        """Return the results where the packs of all ranks lie in memory that they see; None where they do not."""
        ranks, pack = self._communicator, self.packs[0]
        blocks, mine, self._pack = ranks.pack_blocks, self._pack, None
        if blocks is None:
            ranks.make_pack_blocks()  # for the next call on: all ranks are in this one
            return None
        packs = blocks.packs(pack.dtype, pack.size)
        if packs is None or mine is None:
            return None
        divisor = ranks.size if self._op is ReduceOp.MEAN and pack.dtype.kind not in "iu" else 1
        with np.errstate(all="ignore"):
            combine_share(Replicas(packs, ranks.local_rank, True), packs, self._op.on_the_wire, divisor)
        ranks.node_barrier()
        if pack.is_plain:
            return self._finished([mine[part] for part in pack.slices])
        return self._finished([view for _, view in pack.views(mine)])

    def _place(self, pack: Pack, member: Member, targets: Sequence[Array | None] | None) -> Array:
        """Return where the result of a lone array goes: its target, or memory that is used again."""
        given = targets[member.index] if targets is not None else None
        if given is not None and given.dtype == pack.dtype:
            return given
        return self._communicator.pool.take(pack.dtype, member.shape)

    def _one(self, pack: Pack, arrays: Sequence[Array], result: Array) -> tuple[Array, Array]:
        target = result.reshape(-1)
        array = arrays[pack.members[0].index]
        if pack.is_array(arrays):
            return array.reshape(-1), target
        np.copyto(result, array, casting="unsafe")
        return target, target

    def _finished(self, results: list[Array]) -> list[Array]:
        for index in self._lone:
            results[index] = results[index].copy()
        if self._exact:
            return results
        size = self._communicator.size
        return [
            finish(result, dtype, self._op, size) if dtype.kind in "iu" else rounded(result, dtype)  # divided already
            for result, dtype in zip(results, self._dtypes, strict=True)
        ]


def _hybrid(layouts: tuple[Layout, ...], pack_bytes: int, bytes_per_pack: float) -> tuple[Pack, ...]:
    """Return packs of the small arrays, and one pack for each large one."""
    small: list[int] = []
    large: list[int] = []
    for index, (dtype, shape) in enumerate(layouts):
        (small if prod(shape) * wire_dtype(dtype).itemsize < pack_bytes else large).append(index)
    packs = plan_layouts(layouts, small, bytes_per_pack or DEFAULT_BYTES_PER_PACK)
    return packs + tuple(pack for index in large for pack in plan_layouts(layouts, [index], 1))
