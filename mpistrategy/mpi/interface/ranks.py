"""The collectives that the layers above use: their base class, which makes them of one exchange of values.

Buffers are NumPy arrays in native byte order, contiguous and aligned (`dtypes.is_buffer`), and are changed in place.
Every method that moves data is collective over the communicator's ranks.

One MPI call gets at most 2^30 elements; dtypes that MPI does not know travel as bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from mpistrategy.arrays.devices import Device
from mpistrategy.arrays.dtypes import Array, quietly
from mpistrategy.errors import OptionError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.mpi.shared_memory.node_sum import NodeSum, in_rank_order
from mpistrategy.mpi.shared_memory.segments import SharedMemory, private_memory
from mpistrategy.mpi.tuning.thresholds import DEFAULT, RouteName, Thresholds

T = TypeVar("T")

#: Open MPI 5.0 refuses counts of 2^31 and more; MPICH takes them.  A power of two keeps every piece aligned.
MAX_COUNT = 2**30
#: The first tag that a program can choose.
PROGRAM_TAG = 2**11
#: The greatest tag that every MPI takes.
GREATEST_TAG = 2**15 - 1 - PROGRAM_TAG


def pieces(buffer: Array, max_count: int = MAX_COUNT) -> Iterator[Array]:
    """Yield `buffer`, which must be contiguous, as flat views of at most `max_count` elements; nothing when empty."""
    flat = buffer.reshape(-1)
    for start in range(0, flat.size, max_count):
        yield flat[start : start + max_count]


class Freed(ABC):
    """An object that its communicator must free."""

    @abstractmethod
    def free(self) -> None:
        """Free it, where all ranks are known to do so."""


def as_bytes(buffer: Array) -> Array:
    """Return a flat uint8 view of a contiguous buffer of any dtype."""
    return buffer.reshape(-1).view(np.uint8)


def put(buffer: Array, source: Array) -> None:
    """Copy an array into another one of as many elements, unless both are the same memory."""
    if source is not buffer and not (source.flags.c_contiguous and source.ctypes.data == buffer.ctypes.data):
        buffer[...] = source.reshape(buffer.shape)


class Ranks:
    """The ranks of one strategy and the ways to move bytes between them; the defaults fit one rank alone.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
        guard: compares the ranks' calls before any of these collectives runs.
        devices: the device that each rank drives, in rank order.
        node_of: the number of the node of each rank, from 0 on.
        nodes: how many nodes there are.
        has_lanes: whether all nodes have equally many ranks, and several.
        local_rank: this rank's index among the ranks of its node.
        local_size: how many ranks its node has.
        library: the MPI library and its version, in words; "" without one.
        shares_memory: whether ranks of one node see each other's memory; the same on all ranks.
        thresholds: from which size on a buffer takes which route.
        mailboxes: carry small values with the check of the call; None unless all ranks share one node's memory.
        first_message: adds up a few numbers with the check of the call; None where the check takes another way.
        node_sum: adds up arrays of this node; None where its ranks share no memory.
        made: what `once` has made, by key.
        is_simulated: whether the ranks are threads of one process.
        may_use_threads: whether several threads may call this MPI at the same time.
    """

    library: str = ""
    shares_memory: bool = False
    thresholds: Thresholds = DEFAULT
    mailboxes: Mailboxes | None = None
    first_message: ControlChannel | None = None
    node_sum: NodeSum | None = None
    is_simulated: bool = False
    may_use_threads: bool = False

    def __init__(
        self,
        rank: int = 0,
        node_of: Sequence[int] = (0,),
        guard: Guard | None = None,
        devices: tuple[Device, ...] = (Device(0, "CPU", 0),),
    ) -> None:
        self.rank: int = rank
        self.size: int = len(node_of)
        self.devices: tuple[Device, ...] = devices
        self.guard: Guard = guard or Guard()
        self.made: dict[Hashable, Any] = {}
        sizes = Counter(node_of).values()
        self.has_lanes: bool = min(sizes) == max(sizes) > 1
        self.node_of: tuple[int, ...] = tuple(node_of)
        self.nodes: int = max(node_of) + 1
        self.local_rank: int = self.node_of[: self.rank].count(self.node_of[self.rank])
        self.local_size: int = self.node_of.count(self.node_of[self.rank])

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of `key`, which is made once for these ranks: call `make` for it the first time."""
        if key not in self.made:
            self.made[key] = make()
        value: T = self.made[key]
        return value

    def route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return the route that `allreduce` takes with a buffer of so many bytes."""
        return "threads" if self.is_simulated else "none"

    def _gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order: arrays, lists of arrays, or anything else.

        Other ranks' values are copies.  The methods below call it; a class of several ranks defines it, or all of them.
        """
        return [value]

    @quietly
    def allreduce(
        self,
        buffer: Array,
        op: str = "SUM",
        source: Array | None = None,
        *,
        by_lanes: bool = False,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks, the same bits on all; NaN wins.

        Any number, of one dtype and size on all ranks.

        Args:
            buffer: contiguous.
            op: "SUM", "MIN", "MAX" or "PROD".
            source: this rank's value, which does not change; None means that it is in `buffer`.
            by_lanes: whether a buffer of any size goes by lanes between nodes.
            wire: the dtype in which sums travel between nodes, where it differs from the buffer's.
        """
        values = self._gathered(buffer if source is None else source)
        in_rank_order([value.reshape(-1) for value in values], [buffer.reshape(-1)], op, 1)

    def reduce(self, buffer: Array, root: int, op: str = "SUM") -> None:
        """Replace `buffer` on `root` by the sum (MIN, MAX, PROD) over the ranks; undefined elsewhere."""
        self.allreduce(buffer, op)

    def bcast(self, buffer: Array, root: int) -> None:
        """Replace `buffer` on every rank by `root`'s buffer; any dtype."""
        put(buffer, self._gathered(buffer if self.rank == root else None)[root])

    def gatherv(self, block: Array, counts: Sequence[int], target: Array, root: int) -> None:
        """Write the ranks' blocks one after the other, in rank order, into `target` on `root`; any dtype.

        Rank r's block has ``counts[r]`` elements; every rank knows all counts.  The own block may be its part of
        `target`, which is empty on the other ranks.
        """
        counts_here = counts if self.rank == root else [0] * self.size
        sent = [block.size * (rank == root) for rank in range(self.size)]
        self.alltoallv(block.reshape(-1), sent, target.reshape(-1), counts_here)

    def allgatherv(self, block: Array, counts: Sequence[int], target: Array) -> None:
        """Write the ranks' blocks one after the other, in rank order, into `target` on every rank; see `gatherv`."""
        np.concatenate(self._gathered(block), axis=None, out=target.reshape(-1))

    def alltoall(self, sent: Array, received: Array) -> None:
        """Send the r-th of `size` equal parts of `sent` to rank r, whose row of this rank in `received` gets it.

        Any dtype; so few bytes that one MPI call takes them.
        """
        values = self._gathered(sent)
        received[...] = np.reshape([rows.reshape(self.size, -1)[self.rank] for rows in values], received.shape)

    def alltoallv(self, sent: Array, counts: Sequence[int], received: Array, taken: Sequence[int]) -> None:
        """Send the first ``counts[0]`` elements of `sent` to rank 0, the next ones to rank 1, and so on.

        Any dtype.  `received` gets ``taken[r]`` elements of rank r, in rank order.
        """
        values = self._gathered(np.split(sent, np.cumsum(counts)[:-1]))
        np.concatenate([blocks[self.rank] for blocks in values], out=received)

    def exchange(
        self,
        call: Call,
        sent: Array,
        counts: Sequence[int],
        width: int = 1,
        taken: Sequence[int] | None = None,
        **words: Any,
    ) -> tuple[Array, list[int]]:
        """Send parts of an array to all ranks, which do not know beforehand how much each of the others sends.

        Args:
            call: the public call, in which the ranks agree.
            sent: bytes.
            counts: how many units go to each rank.
            width: of a unit, in bytes.
            taken: how many units come from each rank; None if this is to be found out.
            words: further fields that the ranks compare.

        Returns:
            The bytes from all ranks, in rank order, and the number of units from each rank.

        Raises:
            OptionError: on every rank, where `taken` is wrong.
        """
        send_counts, receive_counts = np.array(counts, np.int64), np.empty(self.size, np.int64)
        call.agree(call.where, **words)
        self.alltoall(send_counts, receive_counts)
        call.expect_more()  # not before: the others may be in the exchange
        if taken is not None and receive_counts.tolist() != list(taken):
            raise OptionError.at(
                call.where,
                found=f"parts of {receive_counts.tolist()} elements for rank {self.rank}, from rank 0 on",
                expected=f"{list(taken)}, as its outputs are",
            )
        received = np.empty(int(receive_counts.sum()) * width, np.uint8)
        call.agree(call.where)
        self.alltoallv(sent, np.multiply(counts, width).tolist(), received, (receive_counts * width).tolist())
        return received, receive_counts.tolist()

    def allgather_text(self, text: str, look: Callable[[], object] | None = None) -> list[str]:
        """Return every rank's text, in rank order; for descriptions, never for data.

        Args:
            text: this rank's.
            look: is called now and then where the others may not come; an exception in it ends the wait.
        """
        return list(self._gathered(text))

    def shared(self, nbytes: int) -> SharedMemory:
        """Return `nbytes` zeroed bytes for every rank; the ranks of a node see each other's if they share memory."""
        return private_memory(nbytes)

    def node_barrier(self) -> None:
        """Wait for the ranks of this node; then this rank sees their earlier writes to shared memory."""
        self._gathered(None)

    def free(self) -> None:
        """Free the communicator, where all ranks are known to do so; it cannot be used afterwards."""
        self.guard.closed = True


class Alone(Ranks):
    """One rank alone: every collective is the identity, and MPI is never started."""
