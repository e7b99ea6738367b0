"""The transport seam: the verbs that every layer above needs, and the one-rank transport that needs no MPI.

All buffers are contiguous NumPy arrays in native byte order and are worked on in place.  Every verb is collective
over the transport's ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from mpistrategy.arrays import Array
from mpistrategy.devices import Device
from mpistrategy.mpi.guard import Guard


class Communicator(Protocol):
    """The ranks of one strategy and the ways to move bytes between them.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
        guard: compares what the ranks are about to do before any of these verbs runs.
        devices: the device that each rank drives, in rank order.
    """

    rank: int
    size: int
    guard: Guard
    devices: tuple[Device, ...]

    def allreduce(self, buffer: Array, op: str = "SUM") -> None:
        """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins."""

    def reduce(self, buffer: Array, root: int, op: str = "SUM") -> None:
        """Replace `buffer` on `root` by the sum (MIN, MAX, PROD) over the ranks; undefined elsewhere."""

    def bcast(self, buffer: Array, root: int) -> None:
        """Replace `buffer` on every rank by that of `root`; any dtype."""

    def gatherv(self, block: Array, blocks: list[Array] | None, root: int) -> None:
        """Copy every rank's `block` into ``blocks[rank]`` on `root`; any dtype, sizes may differ."""

    def allgatherv(self, block: Array, blocks: list[Array]) -> None:
        """Copy every rank's `block` into ``blocks[rank]`` on every rank; any dtype, sizes may differ."""

    def allgather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order; for shapes and the like, never for data."""

    def node(self) -> NodeGroups:
        """Return the transports within this node and between the nodes' leaders."""

    def free(self) -> None:
        """Give the communicator's resources back, where all ranks are known to do so; it cannot be used afterwards."""


@dataclass(frozen=True)
class NodeGroups:
    """How the ranks sit on the nodes.

    Attributes:
        node: the ranks of this node; rank 0 of it is the leader.
        leaders: one rank of each node, or None on a rank that leads none.
    """

    node: Communicator
    leaders: Communicator | None


@dataclass
class SingleCommunicator:
    """One rank alone: every collective is the identity, and MPI is never started."""

    devices: tuple[Device, ...] = (Device(0, "CPU", 0),)
    rank: int = 0
    size: int = 1
    guard: Guard = field(default_factory=Guard)

    def allreduce(self, buffer: Array, op: str = "SUM") -> None:
        """Leave `buffer`: its sum over one rank is itself."""

    def reduce(self, buffer: Array, root: int, op: str = "SUM") -> None:
        """Leave `buffer`."""

    def bcast(self, buffer: Array, root: int) -> None:
        """Leave `buffer`."""

    def gatherv(self, block: Array, blocks: list[Array] | None, root: int) -> None:
        """Copy `block` to the only place there is."""
        if blocks is not None:
            blocks[0][...] = block

    def allgatherv(self, block: Array, blocks: list[Array]) -> None:
        """Copy `block` to the only place there is."""
        blocks[0][...] = block

    def allgather_text(self, text: str) -> list[str]:
        """Return the only text there is."""
        return [text]

    def node(self) -> NodeGroups:
        """Return this rank as its own node."""
        return NodeGroups(self, self)

    def free(self) -> None:
        """Refuse further calls."""
        self.guard.closed = True
