"""The collectives that move data over MPI: by one MPI collective, or in the shared memory of a node.

They use the upper-case methods of mpi4py, which send buffers; nothing is pickled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays.dtypes import Array, divide_by, is_buffer
from mpistrategy.errors import CollectiveTimeoutError
from mpistrategy.mpi.contract.failures import Failures
from mpistrategy.mpi.interface import buffers
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node.two_level import Manner, allreduce_across
from mpistrategy.mpi.over_mpi import gathering
from mpistrategy.mpi.over_mpi.operations import operation
from mpistrategy.mpi.tuning.thresholds import RouteName

#: Up to this size MPI reads the source itself; above, a copy and an in-place call are faster.
_DIRECT_BYTES = 2**21 if MPI.get_vendor()[0] == "Intel MPI" else 2**19
#: Tags of messages between two ranks: of an exchange of uneven parts, and the first of those that a program chooses.
_EXCHANGE, _PROGRAM = 2**10, 2**11
#: Messages that were not answered in time: MPI may still use their memory.
_abandoned: list[Message] = []
#: The greatest tag that every MPI takes.
GREATEST_TAG = 2**15 - 1 - _PROGRAM


def _spans(start: int, size: int, most: int) -> list[tuple[int, int]]:
    """Return begins and ends of pieces of at most `most` bytes."""
    return [(at, min(at + most, start + size)) for at in range(start, start + size, most)]


class Message:
    """A message between two ranks that is under way, in pieces that MPI can count.

    Attributes:
        source: the rank that has sent what was received; None before.
    """

    def __init__(
        self, comm: MPI.Intracomm, block: Array, rank: int | None, tag: int, most: int, *, sends: bool
    ) -> None:
        self._comm, self._block, self._tag, self._most = comm, block, tag, most
        self.source: int | None = rank
        self._requests: list[MPI.Request] = []
        if rank is not None:
            self._begin(comm.Isend if sends else comm.Irecv, rank)

    def _begin(self, start: Callable[..., MPI.Request], rank: int) -> None:
        spans = _spans(0, self._block.size, self._most) or [(0, 0)]
        self._requests = [start([self._block[begin:end], MPI.BYTE], rank, self._tag) for begin, end in spans]

    def test(self) -> bool:
        """Return whether the block has been sent or received."""
        if self.source is None:  # by looking for one: MPICH 5.0.2 loses messages to MPI_ANY_SOURCE between nodes
            status = MPI.Status()
            if not self._comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
                return False
            self.source = status.Get_source()
            self._begin(self._comm.Irecv, self.source)
        return bool(MPI.Request.Testall(self._requests))

    def wait(self, where: str, timeout: float) -> None:
        """Wait until the block has been sent or received; in steps, since no other rank may come.

        Args:
            where: the public name.
            timeout: for how many seconds.

        Raises:
            CollectiveTimeoutError: when it takes longer.
        """
        end = time.monotonic() + timeout
        while not self.test():
            if time.monotonic() > end:
                _abandoned.append(self)
                peer = "any rank" if self.source is None else f"rank {self.source}"
                raise CollectiveTimeoutError.at(
                    where,
                    found=f"no message between this rank and {peer} for {timeout:g} s",
                    expected="send and recv on both",
                    fix="A longer limit is the group's timeout, or MPISTRATEGY_TIMEOUT_SECONDS.",
                )
            os.sched_yield()


class Collectives(Communicator):
    """The part of a `Communicator` that moves arrays, on ranks that have agreed on the call.

    By itself it is a part of another communicator: it has no guard of its own, and each rank is a node.

    Args:
        comm: MPI's communicator of the ranks; it is freed with this one.
        max_count: how many elements one MPI call may carry.
    """

    has_links = True
    #: Whether MPI gives all ranks the same bits of one sum.
    has_equal_sums: bool = True
    #: How to wait for messages between nodes; None: the usual one of `two_level`.
    manner: Manner | None = None
    #: Tells the ranks of each other's failures; None on several nodes.
    failures: Failures | None = None
    local_size: int = 1

    def __init__(self, comm: Any, max_count: int = buffers.MAX_COUNT) -> None:
        self._comm: MPI.Intracomm = comm
        self.max_count = max_count
        super().__init__(comm.rank, range(comm.size))

    def route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return the route that `allreduce` takes with so many bytes."""
        if self.nodes > 1:
            return self._route_between_nodes(nbytes)
        is_large = self.local_size == self.size and nbytes >= self.thresholds.window_bytes
        return "node_sum" if is_large and self.node_sum is not None else "mpi"

    def _route_between_nodes(self, nbytes: int) -> RouteName:
        if not self.has_equal_sums:
            return "root"
        if self.manner is not None and not self.manner.blocks:
            return "lanes"
        return "lanes" if self.shares_memory and self.has_lanes and nbytes >= self.thresholds.lanes_bytes else "mpi"

    def progress(self) -> None:
        self._comm.Iprobe()

    def allreduce(self, buffer: Array, op: str = "SUM", source: Array | None = None) -> None:
        """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins.

        This rank's value is in `source`, which does not change; None means in `buffer`.
        """
        way = self.route(buffer.nbytes, buffer.dtype, op)
        if way == "node_sum" and self.node_sum is not None:
            flat = buffer.reshape(-1)
            self.node_sum.run([(flat if source is None else source.reshape(-1), flat)], op)
            return
        if way == "lanes":
            allreduce_across(self, buffer, op, source=source)
            return
        if way == "root":
            if source is not None:
                buffer[...] = source
            self.reduce(buffer, 0, op)
            self.bcast(buffer, 0)
            return
        brought: Any = MPI.IN_PLACE
        if source is not None and source is not buffer:
            if _goes_to_mpi(source, buffer):
                brought = source
            elif not _is_the_same(source, buffer):
                np.copyto(buffer, source)
        count, by_mpi = self._count(buffer), operation(op, buffer.dtype)
        self._meet()
        if 0 < buffer.size <= count:
            self._comm.Allreduce(brought, buffer, by_mpi)
        else:
            parts = repeat(brought) if brought is MPI.IN_PLACE else buffers.pieces(brought, count)
            for those, piece in zip(parts, buffers.pieces(buffer, count), strict=False):
                self._comm.Allreduce(those, piece, by_mpi)

    def allreduce_many(self, pairs: Sequence[tuple[Array, Array]], op: str, divisor: int, nbytes: int) -> None:
        """Do ``allreduce(target, op, source)`` for pairs of (source, target), flat and of one dtype.

        The results are divided by `divisor`, which must be 1 unless the dtype is a floating one.
        They are part of a list of `nbytes`, which goes through shared memory as a whole or not at all.
        """
        if self.route(nbytes, pairs[0][1].dtype, op) == "node_sum" and self.node_sum is not None:
            self.node_sum.run(pairs, op, divisor)
            return
        for source, target in pairs:
            self.allreduce(target, op, source)
            divide_by(divisor, target)

    def allreduce_device_memory(self, buffer: Any, op: str) -> None:
        """Do `allreduce` with a contiguous array in GPU memory that no stream uses; for CUDA-aware MPIs only."""
        for piece in buffers.pieces(buffer, self.max_count):
            self._comm.Allreduce(MPI.IN_PLACE, piece, operation(op, buffer.dtype))

    def reduce(self, buffer: Array, root: int, op: str = "SUM") -> None:
        """Replace `buffer` on `root` by the sum (MIN, MAX, PROD) over the ranks; undefined elsewhere."""
        pieces, by_mpi = [*buffers.pieces(buffer, self._count(buffer))], operation(op, buffer.dtype)
        self._meet()
        for piece in pieces:
            if self.rank == root:
                self._comm.Reduce(MPI.IN_PLACE, piece, by_mpi, root)
            else:
                self._comm.Reduce(piece, None, by_mpi, root)

    def _count(self, buffer: Any) -> int:
        """Return how many elements one MPI call combines: MPI may allocate as much memory again, on the host."""
        if not isinstance(buffer, np.ndarray):
            return self.max_count
        return min(self.max_count, max(1, self.thresholds.mpi_piece_bytes(self.nodes) // buffer.itemsize))

    def reduce_by_mpi(self, buffer: Array, op: str) -> None:
        """Do `allreduce` by one call of MPI, whatever the size."""
        self._comm.Allreduce(MPI.IN_PLACE, buffer, operation(op, buffer.dtype))

    def begin_to_reduce_by_mpi(self, buffer: Array, op: str) -> MPI.Request:
        """Begin to do so; the buffer must not be touched until the request is done."""
        return self._comm.Iallreduce(MPI.IN_PLACE, buffer, operation(op, buffer.dtype))

    def bcast(self, buffer: Array, root: int) -> None:
        """Replace `buffer` on every rank by that of `root`; any dtype."""
        pieces = [*buffers.pieces(buffers.as_bytes(buffer), self.max_count)]
        self._meet()
        for piece in pieces:
            self._comm.Bcast(piece, root)

    def gatherv(self, block: Array, counts: Sequence[int], together: Array | None, root: int) -> None:
        """Write the ranks' blocks one after the other, in rank order, into `together` on `root`; any dtype.

        Rank r's block has ``counts[r]`` elements; every rank knows all counts.  The own block may be its part of
        `together`, which is None on the other ranks.
        """
        gathering.gather(self._comm, block, counts, together, root, self.max_count, self._meet)

    def gather_blocks(self, block: Array, blocks: list[Array] | None, root: int) -> None:
        """Copy every rank's `block` into ``blocks[rank]`` on `root`, which alone knows their sizes; any dtype."""
        self._meet()
        if blocks is None:
            self._exchange([(root, block)], [])
        else:
            blocks[root][...] = block
            self._exchange([], [(rank, each) for rank, each in enumerate(blocks) if rank != root])

    def scatter_blocks(self, blocks: list[Array] | None, block: Array, root: int) -> None:
        """Copy ``blocks[rank]`` of `root` into every rank's `block`; any dtype, sizes may differ."""
        self._meet()
        if blocks is None:
            self._exchange([], [(root, block)])
        else:
            block[...] = blocks[root]
            self._exchange([(rank, each) for rank, each in enumerate(blocks) if rank != root], [])

    def _exchange(self, sent: Sequence[tuple[int, Array]], received: Sequence[tuple[int, Array]]) -> None:
        """Send blocks, of any dtype, to some ranks, and receive blocks from others; empty ones are no messages."""
        most, comm = max(1, self.max_count // self.size), self._comm
        requests = [
            start([piece, MPI.BYTE], rank, _EXCHANGE)
            for start, blocks in ((comm.Irecv, received), (comm.Isend, sent))
            for rank, block in blocks
            for piece in buffers.pieces(buffers.as_bytes(block), most)
        ]
        MPI.Request.Waitall(requests)

    def allgatherv(self, block: Array | None, counts: Sequence[int], together: Array) -> None:
        """Write the ranks' blocks one after the other, in rank order, into `together` on every rank; see `gatherv`."""
        gathering.allgather(self._comm, block, counts, together, self.max_count, self._meet)

    def alltoall(self, sent: Array, received: Array) -> None:
        """Send the r-th of `size` equal parts of `sent` to rank r, whose row of this rank in `received` gets it.

        Any dtype; so few bytes that one MPI call takes them.
        """
        # Of equal parts: for megabytes on a node MPICH's Alltoallv takes up to three times as long.
        mine, theirs = buffers.as_bytes(sent), buffers.as_bytes(received)
        self._meet()
        self._comm.Alltoall(mine, theirs)

    def _meet(self) -> None:
        """Wait until all ranks are about to call MPI, since a rank cannot leave an MPI call if another one has failed.

        The calls of MPI follow at once: all that can fail comes before.  Does nothing on several nodes.
        """
        if self.failures is not None and self.node_sum is not None:
            self.node_sum.barrier()

    def alltoallv(self, sent: Array, counts: Sequence[int], received: Array, taken: Sequence[int]) -> None:
        """Send the first ``counts[0]`` elements of `sent` to rank 0, the next ones to rank 1, and so on.

        Any dtype.  `received` gets ``taken[r]`` elements of rank r, in rank order.
        """
        ours, theirs = (np.split(array, np.cumsum(each)[:-1]) for array, each in ((sent, counts), (received, taken)))
        ranks = (*range(self.rank, self.size), *range(self.rank))  # not all to rank 0 first
        self._meet()
        self._exchange([(rank, ours[rank]) for rank in ranks], [*enumerate(theirs)])

    def begin_to_send(self, block: Array, rank: int, tag: int) -> Message:
        """Begin to send `block`, of any dtype, to one rank, which receives as many bytes with this tag."""
        return Message(self._comm, buffers.as_bytes(block), rank, _PROGRAM + tag, self.max_count, sends=True)

    def begin_to_receive(self, block: Array, rank: int | None, tag: int) -> Message:
        """Begin to receive into `block`, of any dtype, from one rank; None means any."""
        return Message(self._comm, buffers.as_bytes(block), rank, _PROGRAM + tag, self.max_count, sends=False)

    def begin_alltoall(self, sent: Array, received: Array) -> MPI.Request:
        """Begin `alltoall`; neither array may be touched until the request is done."""
        return self._comm.Ialltoall(buffers.as_bytes(sent), buffers.as_bytes(received))

    def begin_allgather(self, block: Array, together: Array) -> MPI.Request:
        """Begin to write the ranks' blocks, of one size, into `together`, in rank order; any dtype."""
        return self._comm.Iallgather(buffers.as_bytes(block), buffers.as_bytes(together))

    def node_barrier(self) -> None:
        """Wait for the ranks of this node; then this rank sees what they wrote to shared memory before."""
        if self.node_sum is not None:
            self.node_sum.barrier()

    def link(self, ranks: Sequence[int]) -> Collectives:
        """Return a communicator of some ranks, this one among them.  Collective over them alone."""
        return Collectives(self._comm_of(ranks), self.max_count)

    def _comm_of(self, ranks: Sequence[int]) -> MPI.Intracomm:
        """Return MPI's communicator of some of these ranks, in their order.  Collective over them alone."""
        everybody = self._comm.Get_group()
        chosen = everybody.Incl(ranks)
        made = self._comm.Create_group(chosen)
        chosen.Free()
        everybody.Free()
        return made

    def free(self) -> None:
        """Free it, where all ranks are known to do so."""
        if not self.guard.closed:
            self.once.free()
            self.guard.closed = True
            self._comm.Free()


def _goes_to_mpi(source: Array, buffer: Array) -> bool:
    return buffer.nbytes <= _DIRECT_BYTES and is_buffer(source) and not np.may_share_memory(source, buffer)


def _is_the_same(source: Array, buffer: Array) -> bool:
    """Return whether both, of one size and dtype, are the same contiguous memory."""
    return source.flags.c_contiguous and source.ctypes.data == buffer.ctypes.data
