"""The route through the communicator: small arrays are packed, large ones go as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by, quietly
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.reduced_precision import between_nodes
from mpistrategy.mpi.multi_node.rounded_exchange import Wire
from mpistrategy.mpi.multi_node.two_level import allreduce_across
from mpistrategy.mpi.shared_memory import node_results
from mpistrategy.mpi.tuning.thresholds import RouteName
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.packing import FEW_ELEMENTS, Pack
from mpistrategy.reduction.routes.base import Copies, Description, Targets, copies_of

#: Writes the combination of a source into its target, which may be the source itself: flat arrays of one dtype.
ReducePair = Callable[[Array, Array], None]


class CommunicatorRoute:
    """See `mpistrategy.reduction.routes.base.Route`.

    Args:
        communicator: the ranks.
        packs: the buffers.
        reduce_pair: combines one of them; None means `Ranks.allreduce_many` for all together.
        op: how.
        names: the name of the way that each pack takes.
        wire: what sums of float32 travel as between nodes; see `mpistrategy.options.CommunicationOptions`.
        only_lanes: whether all packs go by lanes, whatever their size.
    """

    def __init__(
        self,
        communicator: Ranks,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        names: Sequence[str],
        reduce_pair: ReducePair | None = None,
        *,
        wire: str | None = None,
        only_lanes: bool = False,
    ) -> None:
        self.packs: tuple[Pack, ...] = packs
        self._wire, self._only_lanes = wire, only_lanes
        self._node = communicator.node_sum if "node_sum" in names else None
        self._communicator, self._text, self._names = communicator, op._on_the_wire, names
        self._divisors = {pack.dtype: op._divisor(pack.dtype, communicator.size) for pack in packs}
        self._nbytes = sum(pack.nbytes for pack in packs)
        self._count = sum(len(pack.members) for pack in packs)
        self._reduce_pairs = self._all_reduce if reduce_pair is None else partial(self._reduce_each, reduce_pair)
        self._lone = [m.index for p in packs if p.size > FEW_ELEMENTS for m in p.members if m.stop - m.start == 1]

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return memory for each pack: the target of a lone array, or new memory, which is filled for several."""
        memory = [self._taken(pack, targets) for pack in self.packs]
        for pack, taken in zip(self.packs, memory, strict=True):
            if len(pack.members) > 1:
                pack.fill(arrays, taken)
        return memory

    def _taken(self, pack: Pack, targets: Targets) -> Array:
        first, dtype = pack.members[0], pack.dtype
        shape: tuple[int, ...] = (pack.size,)
        if len(pack.members) == 1:
            given = None if targets is None else targets[first.index]
            if given is not None and given.dtype == dtype:
                return given
            shape = first.shape
        node = self._node
        return np.empty(shape, dtype) if node is None else node.new(shape, dtype)

    @quietly
    def run(self, arrays: Sequence[Array], memory: list[Array]) -> list[Array]:
        """Return the combinations, in the memory that was taken."""
        results: list[Any] = [None] * self._count
        pairs: dict[np.dtype[Any], list[tuple[Array, Array]]] = {}
        for pack, taken in zip(self.packs, memory, strict=True):
            source = target = taken.reshape(-1)
            if len(pack.members) == 1:
                index = pack.members[0].index
                results[index], source = taken, self._source(pack, arrays[index], target)
            else:
                for index, view in pack.views(target):
                    results[index] = view
            if pack.size:
                pairs.setdefault(pack.dtype, []).append((source, target))
        for those in pairs.values():
            self._reduce_pairs(those)
        for index in self._lone:
            results[index] = results[index].copy()
        return results

    def _source(self, pack: Pack, array: Array, target: Array) -> Array:
        """Return a lone array, flat, where it can travel as it is; else `target`, into which it has been copied."""
        flags = array.flags
        if array.dtype == pack.dtype and flags.c_contiguous and flags.aligned:
            return array.reshape(-1)
        np.copyto(target, array.reshape(-1), casting="unsafe")
        return target

    def _all_reduce(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        wire = self._dtype_between_nodes(pairs[0][1].dtype)
        if wire is not None or self._only_lanes:
            allreduce = partial(allreduce_across, self._communicator, op=self._text, wire=wire)
            self._reduce_each(lambda source, target: allreduce(target, source=source), pairs)
            return
        self._communicator.allreduce_many(pairs, self._text, self._divisors[pairs[0][1].dtype], self._nbytes)

    def _reduce_each(self, reduce_pair: ReducePair, pairs: Sequence[tuple[Array, Array]]) -> None:
        for source, target in pairs:
            reduce_pair(source, target)
            divide_by(self._divisors[target.dtype], target)

    def describe(self, ranks: Ranks, arrays: Sequence[Array]) -> list[Description]:
        names = [
            "node_results" if name == "node_sum" and pack.nbytes >= node_results.LEAST_BYTES else name
            for name, pack in zip(self._names, self.packs, strict=True)
        ]
        return [
            described(ranks, name, pack, copies_of(pack, arrays), wire=self._dtype_between_nodes(pack.dtype))
            for name, pack in zip(names, self.packs, strict=True)
            if pack.size
        ]

    def _dtype_between_nodes(self, dtype: np.dtype[Any]) -> Wire:
        return None if self._wire is None else between_nodes(self._communicator, self._wire, dtype, self._text)


def names_of(communicator: Ranks, packs: Sequence[Pack], op: ReduceOp, wire: str | None = None) -> list[RouteName]:
    """Return the name of the way that `CommunicatorRoute` takes with each pack of a list."""
    nbytes, text = sum(pack.nbytes for pack in packs), op._on_the_wire
    return [
        "lanes"
        if wire is not None and between_nodes(communicator, wire, pack.dtype, text) is not None
        else "node_sum"
        if communicator.route(nbytes, pack.dtype, text) == "node_sum"
        else communicator.route(pack.nbytes, pack.dtype, text)
        for pack in packs
    ]


def described(
    ranks: Ranks,
    name: str,
    pack: Pack,
    copies: Copies,
    *,
    in_place: bool = False,
    seen: bool = False,
    wire: Wire = None,
) -> Description:
    """Return what becomes of a pack on a way of the communicator, or of an algorithm.

    Args:
        ranks: the ranks.
        name: the name of the way.
        pack: the pack.
        copies: what is copied before and after.
        in_place: whether the results are written over them.
        seen: whether the ranks of a node combine them where they are, before they travel to other nodes.
        wire: the dtype in which they travel between nodes, where it is another one.
    """
    local = ranks.node_of.count(ranks.node_of[ranks.rank])
    by_node, part = f"through memory of the node, each rank 1/{local} of them", (local - 1) / local
    between, dtype = ("by MPI's Allreduce", pack.dtype) if wire is None else ("from rank to rank", wire)
    result: Copies = () if copies or in_place else ((1, "all into the result"),)
    within: Copies = ((part, f"{local - 1}/{local} into the node's memory"),)
    out: Copies = ((1, "the result out of it"),)
    lanes: Copies = result if not ranks.shares_memory else ((1, "all into the node's memory"), *out)
    way, more = {
        "node_sum": (by_node, within + out),
        "node_results": (f"{by_node}, where the results stay", within),
        "lanes": (
            f"within each node, {between} between the {ranks.nodes} nodes as {dtype.name}, and back",
            () if seen or local == 1 else lanes,
        ),
        "mpi": ("by MPI's Allreduce", result),
        "alltoallv": (f"from rank to rank: each gets 1/{ranks.size} of all values, and sends their combination", ()),
        "root": ("by MPI's Reduce to one rank, and from there by Bcast", result),
        "threads": ("between the threads of this process", ()),
    }.get(name, ("stays here, the only replica", result))
    return Description(pack, way, copies + more)
