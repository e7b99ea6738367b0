"""The route through the communicator: small arrays are packed, large ones go as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, host_wire_dtype, quiet_runner
from mpistrategy.mpi.interface.buffers import LEAST_POOLED
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.tuning.thresholds import RouteName
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import divisor_of
from mpistrategy.reduction.layout.packing import DEFAULT_BYTES_PER_PACK, Layout, Pack, plan_layouts
from mpistrategy.reduction.routes.base import Targets

#: A number that is a view of a larger pack would keep all of it.
_FEW_ELEMENTS = 64

#: Writes the combination of each source into its target: pairs of flat arrays of one dtype.
ReducePairs = Callable[[Sequence[tuple[Array, Array]]], None]


class CommunicatorRoute:
    """See `mpistrategy.reduction.routes.base.Route`.

    Args:
        communicator: the ranks.
        packs: the buffers.
        reduce_pairs: combines them; None means `Communicator.allreduce_many`, which divides, too.
        op: how.
        names: the name of the way that each pack takes.
    """

    def __init__(
        self,
        communicator: Communicator,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        names: Sequence[str],
        reduce_pairs: ReducePairs | None = None,
    ) -> None:
        self.packs = packs
        self._communicator, self._op, self._names = communicator, op, names
        self._nbytes = sum(pack.nbytes for pack in packs)
        self._count = sum(len(pack.members) for pack in packs)
        self._reduce_pairs = reduce_pairs or self._all_reduce
        self._quiet = quiet_runner()
        self._lone = [m.index for p in packs if p.size > _FEW_ELEMENTS for m in p.members if m.stop - m.start == 1]
        #: Memory for each pack, between `bring` and `run`.
        self._memory: list[Array] = []

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> None:
        """Take memory for each pack: the target of a lone array, or memory that is used again."""
        self._memory = [self._taken(pack, targets) for pack in self.packs]

    def _taken(self, pack: Pack, targets: Targets) -> Array:
        if len(pack.members) > 1:
            if pack.nbytes < LEAST_POOLED:
                return np.empty(pack.size, pack.dtype)
            return self._communicator.pool.take(pack.dtype, (pack.size,))
        (member,) = pack.members
        given = targets[member.index] if targets is not None else None
        if given is not None and given.dtype == pack.dtype:
            return given
        return self._communicator.pool.take(pack.dtype, member.shape)

    def run(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return the combinations, in the memory that was taken."""
        memory, self._memory = self._memory, []
        results: list[Array] = [np.empty(0)] * self._count
        pairs: dict[np.dtype[Any], list[tuple[Array, Array]]] = {}
        for pack, taken in zip(self.packs, memory, strict=True):
            target = taken.reshape(-1)
            first = pack.members[0].index
            source = arrays[first].reshape(-1) if pack.is_array(arrays) else pack.fill(arrays, target)
            for index, view in pack.views(target) if len(pack.members) > 1 else ((first, taken),):
                results[index] = view
            if pack.size:
                pairs.setdefault(pack.dtype, []).append((source, target))
        for those in pairs.values():
            self._quiet(self._reduce_pairs, those)
        for index in self._lone:
            results[index] = results[index].copy()
        return results

    def _all_reduce(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        ranks, op = self._communicator, self._op
        ranks.allreduce_many(pairs, op.on_the_wire, divisor_of(pairs[0][1].dtype, op, ranks.size), self._nbytes)

    def describe(self) -> Sequence[str]:
        """Return the name of the way that each pack takes."""
        return self._names


def hybrid(layouts: tuple[Layout, ...], pack_bytes: int, bytes_per_pack: float) -> tuple[Pack, ...]:
    """Return packs of the arrays below `pack_bytes`, and one pack for each larger one."""
    small: list[int] = []
    large: list[int] = []
    for index, (dtype, shape) in enumerate(layouts):
        (small if prod(shape) * host_wire_dtype(dtype).itemsize < pack_bytes else large).append(index)
    packs = plan_layouts(layouts, small, bytes_per_pack or DEFAULT_BYTES_PER_PACK)
    return packs + tuple(pack for index in large for pack in plan_layouts(layouts, [index], 1))


def names_of(communicator: Communicator, packs: Sequence[Pack], op: ReduceOp) -> list[RouteName]:
    """Return the name of the way that `Communicator.allreduce_many` takes with each pack of a list."""
    nbytes, text = sum(pack.nbytes for pack in packs), op.on_the_wire
    return [
        "pipelined"
        if communicator.route(nbytes, pack.dtype, text) == "pipelined"
        else communicator.route(pack.nbytes, pack.dtype, text)
        for pack in packs
    ]
