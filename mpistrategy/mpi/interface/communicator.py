"""The collectives that the layers above use, as a Protocol, and a communicator of one rank, which needs no MPI.

Buffers are NumPy arrays in native byte order, contiguous and aligned (`dtypes.is_buffer`), and are changed in place.
Every method that moves data is collective over the communicator's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpistrategy.arrays.devices import Device
from mpistrategy.arrays.dtypes import Array, divide_by
from mpistrategy.mpi.contract.channel import FirstMessage
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.buffers import Once
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.mpi.shared_memory.segments import SharedMemory, private_memory
from mpistrategy.mpi.tuning.thresholds import DEFAULT, RouteName, Thresholds

if TYPE_CHECKING:
    from mpistrategy.mpi.shared_memory.node_sum import NodeSum


class Communicator(Protocol):
    """The ranks of one strategy and the ways to move bytes between them.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
        guard: compares the ranks' calls before any of these collectives runs.
        devices: the device that each rank drives, in rank order.
        node_of: the number of the node of each rank, from 0 on.
        nodes: how many nodes there are.
        local_rank: this rank's index among the ranks of its node.
        library: the MPI library and its version, in words; "" without one.
        shares_memory: whether ranks of one node see each other's memory; the same on all ranks.
        thresholds: from which size on a buffer takes which route.
        mailboxes: carry small values with the check of the call; None unless all ranks share one node's memory.
        first_message: adds up a few numbers with the check of the call; None where the check takes another way.
        node_sum: adds up arrays of this node; None where its ranks share no memory.
        once: returns what is made once for these ranks: ``once(key, make)``.
    """

    rank: int
    size: int
    guard: Guard
    devices: tuple[Device, ...]
    node_of: tuple[int, ...]
    nodes: int
    local_rank: int
    library: str
    shares_memory: bool
    thresholds: Thresholds
    mailboxes: Mailboxes | None
    first_message: FirstMessage | None
    once: Once
    node_sum: NodeSum | None

    def route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return the route that `allreduce` takes with a buffer of so many bytes."""

    def allreduce(self, buffer: Array, op: str = "SUM", source: Array | None = None) -> None:
        """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins.

        This rank's value is in `source`, which does not change; None means in `buffer`.
        """

    def allreduce_many(
        self, pairs: Sequence[tuple[Array, Array]], op: str = "SUM", divisor: int = 1, nbytes: int = 0
    ) -> None:
        """Do ``allreduce(target, op, source)`` for pairs of (source, target), flat and of one dtype.

        The results are divided by `divisor`, which must be 1 unless the dtype is a floating one.
        They are part of a list of `nbytes`, which the ranks of a node add up themselves as a whole or not at all.
        """

    def reduce(self, buffer: Array, root: int, op: str = "SUM") -> None:
        """Replace `buffer` on `root` by the sum (MIN, MAX, PROD) over the ranks; undefined elsewhere."""

    def bcast(self, buffer: Array, root: int) -> None:
        """Replace `buffer` on every rank by that of `root`; any dtype."""

    def gatherv(self, block: Array, counts: Sequence[int], together: Array | None, root: int) -> None:
        """Write the ranks' blocks one after the other, in rank order, into `together` on `root`; any dtype.

        Rank r's block has ``counts[r]`` elements; every rank knows all counts.  The own block may be its part of
        `together`, which is None on the other ranks.
        """

    def gather_blocks(self, block: Array, blocks: list[Array] | None, root: int) -> None:
        """Copy every rank's `block` into ``blocks[rank]`` on `root`, which alone knows their sizes; any dtype."""

    def scatter_blocks(self, blocks: list[Array] | None, block: Array, root: int) -> None:
        """Copy ``blocks[rank]`` of `root` into every rank's `block`; any dtype, sizes may differ."""

    def allgatherv(self, block: Array, counts: Sequence[int], together: Array) -> None:
        """Write the ranks' blocks one after the other, in rank order, into `together` on every rank; see `gatherv`."""

    def alltoall(self, sent: Array, received: Array) -> None:
        """Send the r-th of `size` equal parts of `sent` to rank r, whose row of this rank in `received` gets it.

        Any dtype; so few bytes that one MPI call takes them.
        """

    def alltoallv(self, sent: Array, counts: Sequence[int], received: Array, taken: Sequence[int]) -> None:
        """Send the first ``counts[0]`` elements of `sent` to rank 0, the next ones to rank 1, and so on.

        Any dtype.  `received` gets ``taken[r]`` elements of rank r, in rank order.
        """

    def allgather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order; for descriptions, never for data."""

    def node(self) -> NodeGroups:
        """Return the communicators within this node and between the nodes' leaders."""

    def shared(self, nbytes: int) -> SharedMemory:
        """Return `nbytes` zeroed bytes for every rank; the ranks of a node see each other's if they share memory."""

    def node_barrier(self) -> None:
        """Wait for the ranks of this node; then this rank sees what they wrote to shared memory before."""

    def free(self) -> None:
        """Free the communicator, where all ranks are known to do so; it cannot be used afterwards."""


@dataclass(frozen=True)
class NodeGroups:
    """The communicators of `Communicator.node`.

    Attributes:
        node: the ranks of this node; rank 0 of it is the leader.
        leaders: one rank of each node, or None on a rank that leads none.
    """

    node: Communicator
    leaders: Communicator | None

    def free(self) -> None:
        """Free both, where all ranks are known to do so."""
        self.node.free()
        if self.leaders is not None:
            self.leaders.free()


@dataclass
class SingleCommunicator:
    """One rank alone: every collective is the identity, and MPI is never started."""

    devices: tuple[Device, ...] = (Device(0, "CPU", 0),)
    rank: int = 0
    size: int = 1
    guard: Guard = field(default_factory=Guard)
    node_of: tuple[int, ...] = (0,)
    nodes: int = 1
    local_rank: int = 0
    library: str = ""
    shares_memory: bool = False
    thresholds: Thresholds = DEFAULT
    mailboxes: Mailboxes | None = None
    node_sum: NodeSum | None = None
    first_message: FirstMessage | None = None
    once: Once = field(default_factory=Once)

    def route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return "none": nothing moves."""
        return "none"

    def allreduce(self, buffer: Array, op: str = "SUM", source: Array | None = None) -> None:
        """Leave `buffer`, or copy `source` to it: the sum over one rank."""
        if source is not None:
            buffer[...] = source.reshape(buffer.shape)

    def allreduce_many(
        self, pairs: Sequence[tuple[Array, Array]], op: str = "SUM", divisor: int = 1, nbytes: int = 0
    ) -> None:
        """Copy every source to its target."""
        for source, target in pairs:
            self.allreduce(target, op, source)
            divide_by(divisor, target)

    def reduce(self, buffer: Array, root: int, op: str = "SUM") -> None:
        """Leave `buffer`."""

    def bcast(self, buffer: Array, root: int) -> None:
        """Leave `buffer`."""

    def gatherv(self, block: Array, counts: Sequence[int], together: Array | None, root: int) -> None:
        """Copy `block`."""
        if together is not None:
            together[...] = block.reshape(together.shape)

    def gather_blocks(self, block: Array, blocks: list[Array] | None, root: int) -> None:
        """Copy the only block."""
        if blocks is not None:
            blocks[0][...] = block

    def scatter_blocks(self, blocks: list[Array] | None, block: Array, root: int) -> None:
        """Copy the only block."""
        if blocks is not None:
            block[...] = blocks[0]

    def allgatherv(self, block: Array, counts: Sequence[int], together: Array) -> None:
        """Copy `block`."""
        together[...] = block.reshape(together.shape)

    def alltoall(self, sent: Array, received: Array) -> None:
        """Copy `sent`."""
        received[...] = sent.reshape(received.shape)

    def alltoallv(self, sent: Array, counts: Sequence[int], received: Array, taken: Sequence[int]) -> None:
        """Copy `sent`."""
        received[...] = sent

    def allgather_text(self, text: str) -> list[str]:
        """Return the only text there is."""
        return [text]

    def node(self) -> NodeGroups:
        """Return this rank as its own node."""
        return NodeGroups(self, self)

    def shared(self, nbytes: int) -> SharedMemory:
        """Return private memory."""
        return private_memory(nbytes)

    def node_barrier(self) -> None:
        """Do nothing: there is no other rank."""

    def free(self) -> None:
        """Refuse further calls."""
        self.guard.closed = True
