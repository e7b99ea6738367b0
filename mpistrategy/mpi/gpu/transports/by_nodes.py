"""The path over several nodes: CUDA IPC within each node, MPI or the host between the nodes.

An all-reduce of a large buffer is

1. within each node a reduce-scatter: each rank combines its own part, which it reads from its peers' GPUs;
2. between the nodes an all-reduce of each part with the counterpart ranks, in GPU memory or staged through the host;
3. within each node an all-gather: each rank reads the other parts.

So a GPU sends and receives 1/L of the buffer, on a node of L ranks, and no byte of a node's sum crosses the network
twice.  `mpistrategy.mpi.multi_node.lanes` says whose each part is.  A rank of a node with fewer ranks has several
parts, one after the other.  A node of one rank has all of them, and only takes step 2.

Smaller buffers go between all ranks at once, as do gathers: their blocks lie in rank order, and a node's ranks need not
be neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.mpi.contract.sums_by_mpi import digest_of, values_to_try
from mpistrategy.mpi.gpu.transports import ipc
from mpistrategy.mpi.gpu.transports.direct import DirectPath
from mpistrategy.mpi.gpu.transports.ipc import IpcPath
from mpistrategy.mpi.gpu.transports.staged import StagedPath
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import (
    Alone,
    DevicePath,
    PathName,
    communication_memory,
    error_of,
    first_error,
)
from mpistrategy.mpi.multi_node.lanes import every_rank

#: From this size on a buffer takes the three steps.  They cost two waits and barriers of the host more, some 40 us; in
#: that time 1 MiB crosses the bus of a GPU (PCIe 4, 24 GB/s).  Not measured on GPUs.
LEAST_BYTES = 2**20
#: What makes the path between nodes, by the name of the whole.
BETWEEN: dict[PathName, Callable[[], DevicePath]] = {"ipc+mpi": DirectPath, "ipc+staged": StagedPath}


class NodesPath:
    """See `mpistrategy.mpi.interface.gpu_transport.DevicePath`; made by `join`.

    Args:
        name: of the path.
        ranks: who takes part; on several nodes.
        within: the path within each node, of all these ranks.
        between: the path between nodes.
    """

    def __init__(self, name: PathName, ranks: Any, within: IpcPath, between: DevicePath) -> None:
        self.name: PathName = name
        self._ipc, self._between, self._ranks = within, between, ranks
        self._node_of: Sequence[int] = ranks.node_of
        self._node = ranks.node_of[ranks.rank]
        self._peers = [rank for rank, node in enumerate(ranks.node_of) if node == self._node]
        self._within: DevicePath = within if len(self._peers) > 1 else Alone()
        self._lanes = every_rank(ranks.node_of, ranks.rank)
        #: Of each of this rank's slices the ranks that have it too, one of each node, in the order of the nodes.
        self._links: list[Any] = ranks.links(self._lanes.counterparts)

    def make_room(self, nbytes: int) -> None:
        """Take what both paths need."""
        self._ipc.make_room(nbytes)
        self._between.make_room(nbytes)

    def by_host(self, ranks: Communicator, dtype: np.dtype[Any], op: str, wire: str | None = None) -> str:
        """Return why arrays of a dtype are combined on the host alone; "" where they are not."""
        why = self._ipc.by_host(ranks, dtype, op, wire)
        return why if why and self._between.by_host(ranks, dtype, op, wire) else ""

    def allreduce(self, ranks: Communicator, buffer: DeviceArray, op: str, wire: str | None = None) -> None:
        """Replace `buffer` by its combination over the ranks."""
        if self._is_at_once(ranks, buffer, op, wire):
            self._between.allreduce(ranks, buffer, op, wire)
        else:
            self._in_steps(ranks, buffer, op)

    def _in_steps(self, ranks: Communicator, buffer: DeviceArray, op: str) -> None:
        for piece in self._ipc.pieces(buffer):  # each rank has a part of each, so that all read at the same time
            counts = self._counts(piece)
            self._within.reduce_scatter(ranks, piece, counts, op)
            for link, part in self._slices(piece):
                self._between.allreduce(link, part, op)
            self._within.allgather(ranks, self._own(piece), counts, piece)

    def reduce(self, ranks: Communicator, buffer: DeviceArray, root: int, op: str) -> None:
        """Replace `buffer` on `root` by its combination over the ranks: only its node gathers the parts."""
        if self._is_at_once(ranks, buffer, op):
            self._between.reduce(ranks, buffer, root, op)
            return
        node = self._node_of[root]
        for piece in self._ipc.pieces(buffer):
            counts = self._counts(piece)
            self._within.reduce_scatter(ranks, piece, counts, op)
            for link, part in self._slices(piece):
                self._between.reduce(link, part, node, op)
            if node == self._node:
                self._within.allgather(ranks, self._own(piece), counts, piece)

    def reduce_scatter(self, ranks: Communicator, buffer: DeviceArray, counts: Sequence[int], op: str) -> None:
        """Replace each rank's share of `buffer` by its combination, and the others' too: the shares are no parts."""
        if self._is_at_once(ranks, buffer, op):
            self._between.reduce_scatter(ranks, buffer, counts, op)
        else:
            self._in_steps(ranks, buffer, op)

    def bcast(self, ranks: Communicator, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by that of `root`: each rank of its node sends a part to the other nodes."""
        if buffer.nbytes < LEAST_BYTES:
            self._between.bcast(ranks, buffer, root)
            return
        node = self._node_of[root]
        if node == self._node:
            self._within.bcast(ranks, buffer, self._peers.index(root))
        for link, part in self._slices(buffer):
            self._between.bcast(link, part, node)
        if node != self._node:
            self._within.allgather(ranks, self._own(buffer), self._counts(buffer), buffer)

    def allgather(self, ranks: Communicator, block: DeviceArray, counts: Sequence[int], together: DeviceArray) -> None:
        """Write all ranks' blocks into `together`, at once between all ranks."""
        self._between.allgather(ranks, block, counts, together)

    def _is_at_once(self, ranks: Communicator, buffer: DeviceArray, op: str, wire: str | None = None) -> bool:
        """Return whether a buffer is combined between all ranks at once; the same on all ranks."""
        return buffer.nbytes < LEAST_BYTES or bool(self._ipc.by_host(ranks, buffer.dtype, op, wire))

    def _counts(self, buffer: DeviceArray) -> list[int]:
        """Return how many elements each rank of this node has of a buffer."""
        parts = (self._lanes.part_of(each, buffer.size, buffer.itemsize) for each in range(len(self._peers)))
        return [part.stop - part.start for part in parts]

    def _own(self, buffer: DeviceArray) -> DeviceArray:
        """Return this rank's part of a buffer."""
        return buffer[self._lanes.part_of(self._lanes.local_rank, buffer.size, buffer.itemsize)]

    def _slices(self, buffer: DeviceArray) -> Iterator[tuple[Any, DeviceArray]]:
        """Yield the slices of this rank's part, each with its counterparts; none that is empty."""
        own = self._own(buffer)
        for link, part in zip(self._links, self._lanes.slices_of(buffer.size, buffer.itemsize), strict=True):
            if part.stop > part.start:
                yield link, own[part]

    def trial(self) -> str:
        """Add up numbers in steps; return what is wrong, "" if nothing, on all ranks alike.  Collective.

        MPI does not promise that all ranks get the same bits.
        """
        cupy = cupy_for("an array in GPU memory")

        def total_of(values: Array) -> Array:
            memory = communication_memory(cupy, values.size, values.dtype)
            memory.set(values)
            self._in_steps(self._ranks, memory, "SUM")
            total: Array = memory.get()
            return total

        digest = digest_of(map(total_of, values_to_try(self._ranks.rank)))
        digests = self._ranks.allgather_text(str(digest))
        known = total_of(np.ones(1000) * (self._ranks.rank + 1))
        right, size = [self._ranks.size * (self._ranks.size + 1) / 2], len(set(digests))
        found = [] if size > 1 else np.unique(known).tolist()
        wrong = "" if found == right else f"a wrong sum: {found[:3]} for {right[0]}"
        trouble = f"the ranks get {size} different results of one sum" if size > 1 else wrong
        return next(filter(None, self._ranks.allgather_text(trouble)), "")

    def free(self) -> None:
        """Free both paths, and the communicators of the counterparts."""
        self._ipc.free()
        self._between.free()
        for link in self._links:
            link.free()


def join(ranks: Communicator, name: PathName) -> NodesPath | str:
    """Return the path, or why these ranks cannot have it; the same on all.  Collective.

    Args:
        ranks: who takes part; on several nodes.
        name: one of `BETWEEN`.
    """
    within, made = ipc.join(ranks), list[DevicePath]()
    if isinstance(within, str):
        return within
    trouble = first_error(ranks, error_of(lambda: made.append(BETWEEN[name]())))
    if trouble:
        within.free()
        return trouble
    path = NodesPath(name, ranks, within, made[0])
    trouble = path.trial()
    if trouble:
        path.free()
        return trouble
    return path
