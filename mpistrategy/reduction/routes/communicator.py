"""The route through the communicator: small arrays are packed, large arrays go as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by, is_buffer, quietly
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.reduced_precision import Wire, between_nodes
from mpistrategy.mpi.multi_node.two_level import allreduce_across
from mpistrategy.mpi.shared_memory import node_results
from mpistrategy.mpi.tuning.thresholds import RouteName
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.transfer import FEW_ELEMENTS, Pack, Targets, Transfer, Way, copies_of

#: Writes the combination of a source into its target, which may be the source itself: flat arrays of one dtype.
ReducePair = Callable[[Array, Array], None]


class CommunicatorRoute(Transfer):
    """The route of arrays on the host without another route.

    Args:
        ranks: the ranks that take part.
        packs: the buffers.
        op: how they are combined.
        name: the way that all packs take; None: each pack takes the usual way.
        reduce_pair: combines one pack; None: `Ranks` does it.
        wire: what sums of float32 travel as between nodes; see `mpistrategy.options.CommunicationOptions`.
    """

    def __init__(
        self,
        ranks: Ranks,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        name: RouteName | None = None,
        reduce_pair: ReducePair | None = None,
        wire: str | None = None,
    ) -> None:
        self.packs = packs
        self.writes_targets: bool = any(len(pack.members) == 1 for pack in packs)
        self._ranks, self._text, self._name, self._wire = ranks, op._on_the_wire, name, wire
        self._reduce_pair = reduce_pair
        self._nbytes = sum(pack.nbytes for pack in packs)
        self._node = ranks.node_sum if "node_sum" in map(self._name_of, packs) else None
        self._divisors = {pack.dtype: op._divisor(pack.dtype, ranks.size) for pack in packs}
        self._count = sum(len(pack.members) for pack in packs)
        self._lone = [m.index for p in packs if p.size > FEW_ELEMENTS for m in p.members if m.stop - m.start == 1]

    def _name_of(self, pack: Pack) -> RouteName:
        """Return the name of the way that a pack takes."""
        if self._name is not None:
            return self._name
        if self._dtype_between_nodes(pack.dtype) is not None:
            return "lanes"
        route_of_all = self._ranks.route(self._nbytes, pack.dtype, self._text)
        return route_of_all if route_of_all == "node_sum" else self._ranks.route(pack.nbytes, pack.dtype, self._text)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> list[tuple[Array, Array]]:
        """Return the source of each pack, flat, and memory for its result.

        A lone array is itself the source, if it can travel so; its result may be its target.  Others are copied.
        """
        memory = []
        make = np.empty if self._node is None else self._node.new
        for pack in self.packs:
            first, is_lone = pack.members[0], len(pack.members) == 1
            array = arrays[first.index]
            travels = is_lone and array.dtype == pack.dtype and is_buffer(array)
            target = targets[first.index] if travels and targets is not None else None
            if target is None or target.dtype != pack.dtype:
                target = make(first.shape if is_lone else (pack.size,), pack.dtype)
            source = array.reshape(-1) if travels else pack.fill(arrays, target.reshape(-1))
            memory.append((source, target))
        return memory

    @quietly
    def run(self, arrays: Sequence[Array], memory: list[tuple[Array, Array]]) -> list[Array]:
        """Return the combinations, in the memory that was taken."""
        results: list[Any] = [None] * self._count
        pairs: dict[np.dtype[Any], list[tuple[Array, Array]]] = {}
        for pack, (source, target) in zip(self.packs, memory, strict=True):
            flat = target.reshape(-1)
            for index, view in pack.views(flat):
                results[index] = view
            if pack.size:
                pairs.setdefault(pack.dtype, []).append((source, flat))
            if len(pack.members) == 1:
                results[pack.members[0].index] = target  # which may be the caller's own
        for dtype, pairs_of_dtype in pairs.items():
            self._combine(dtype, pairs_of_dtype)
        for index in self._lone:
            results[index] = results[index].copy()
        return results

    def _combine(self, dtype: np.dtype[Any], pairs: Sequence[tuple[Array, Array]]) -> None:
        wire, divisor = self._dtype_between_nodes(dtype), self._divisors[dtype]
        if self._node is not None and self._reduce_pair is None:
            self._node.run(pairs, self._text, divisor)
            return
        for source, target in pairs:
            if self._reduce_pair is not None:
                self._reduce_pair(source, target)
            elif wire is not None or self._name == "lanes":
                allreduce_across(self._ranks, target, self._text, source=source, wire=wire)
            else:
                self._ranks.allreduce(target, self._text, source)
            divide_by(divisor, target)

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack travels; see `Transfer.way`."""
        name, copies, wire = self._name_of(pack), copies_of(pack, arrays), self._dtype_between_nodes(pack.dtype)
        stays = name == "node_sum" and pack.nbytes >= node_results.LEAST_BYTES
        text, more = _WAYS["node_results" if stays else name]
        text = text if wire is None else f"{text}, as {wire.name} between them"
        return text, (copies or more) if name in ("root", "none") else copies + more

    def _dtype_between_nodes(self, dtype: np.dtype[Any]) -> Wire:
        return None if self._wire is None else between_nodes(self._ranks, self._wire, dtype, self._text)


#: How the packs of a way travel, and further copies.
_WAYS: dict[str, Way] = {
    "node_sum": (
        "through memory of the node, a share by each rank",
        ("the others' shares into it", "the result out of it"),
    ),
    "node_results": (
        "through memory of the node, a share by each rank; the results stay there",
        ("the others' shares into it",),
    ),
    "lanes": (
        "within each node, by MPI's Allreduce between the nodes, and back",
        ("all into memory of the node", "the result out of it"),
    ),
    "mpi": ("by MPI's Allreduce", ()),
    "alltoallv": ("from rank to rank: each gets a share of all values, and sends their combination", ()),
    "root": ("by MPI's Reduce to one rank, and from there by Bcast", ("all into the result",)),
    "threads": ("between the threads of this process", ()),
    "none": ("stays here, the only replica", ("all into the result",)),
}
