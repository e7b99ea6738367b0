"""The collectives that move data over MPI: by one MPI collective, or in the shared memory of a node.

They use the upper-case methods of mpi4py, which send buffers; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays.dtypes import Array, divide_by, is_buffer
from mpistrategy.mpi.contract.failures import Failures
from mpistrategy.mpi.interface import buffers
from mpistrategy.mpi.multi_node.two_level import allreduce_across
from mpistrategy.mpi.over_mpi.operations import operation
from mpistrategy.mpi.shared_memory.pipelined import PipelinedAllReduce
from mpistrategy.mpi.tuning.thresholds import RouteName, Thresholds

#: Over TCP Open MPI sends messages of 64 KiB and more only after an answer of the receiver, which waits behind data:
#: 16 MiB both ways at 1 Gbit/s take 160-200 ms, and 142 ms in shorter messages.
_MESSAGE_BYTES = 60 * 2**10 if MPI.get_vendor()[0] == "Open MPI" else buffers.MAX_COUNT
#: Up to this size MPI reads the source itself; above, a copy and an in-place call are faster.
_DIRECT_BYTES = 2**21 if MPI.get_vendor()[0] == "Intel MPI" else 2**19


class Collectives:
    """The part of a `Communicator` that moves arrays, on ranks that have agreed on the call.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
        local_rank, local_size: the same among the ranks of this node.
        node_of: the node of each rank.
        nodes: how many nodes there are.
        pipelined: the pipelined all-reduce of this node; None where its ranks share no memory.
        failures: tells the ranks of each other's failures; None on several nodes.
        thresholds: from how many bytes on which route is taken.
        max_count: how many elements one MPI call may carry.
    """

    _comm: MPI.Intracomm
    _inside: MPI.Comm
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_of: tuple[int, ...]
    nodes: int
    pipelined: PipelinedAllReduce | None = None
    failures: Failures | None = None
    thresholds: Thresholds
    max_count: int

    def route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return the route that `allreduce` takes with so many bytes."""
        if (
            self.pipelined is not None
            and self.local_size == self.size
            and nbytes >= self.thresholds.window_bytes_for(dtype)
        ):
            return "pipelined"
        return "across" if nbytes >= self.thresholds.across_bytes and self.nodes > 1 else "mpi"

    def allreduce(self, buffer: Array, op: str = "SUM", source: Array | None = None) -> None:
        """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins.

        This rank's value is in `source`, which does not change; None means in `buffer`.
        """
        way = self.route(buffer.nbytes, buffer.dtype, op)
        if self.pipelined is not None and way == "pipelined":
            flat = buffer.reshape(-1)
            self.pipelined.allreduce_many([(flat if source is None else source.reshape(-1), flat)], op)
            return
        if way == "across":
            allreduce_across(self, buffer, op, source=source)
            return
        brought: Any = MPI.IN_PLACE
        if source is not None and source is not buffer:
            if _goes_to_mpi(source, buffer):
                brought = source
            elif not _is_the_same(source, buffer):
                np.copyto(buffer, source)
        self._meet()
        count = self._count(buffer)
        if 0 < buffer.size <= count:
            self._comm.Allreduce(brought, buffer, operation(op, buffer.dtype))
        else:
            parts = repeat(brought) if brought is MPI.IN_PLACE else buffers.pieces(brought, count)
            for those, piece in zip(parts, buffers.pieces(buffer, count), strict=False):
                self._comm.Allreduce(those, piece, operation(op, buffer.dtype))

    def allreduce_many(
        self, pairs: Sequence[tuple[Array, Array]], op: str = "SUM", divisor: int = 1, nbytes: int = 0
    ) -> None:
        """Do ``allreduce(target, op, source)`` for pairs of (source, target), flat and of one dtype.

        The results are divided by `divisor`, which must be 1 unless the dtype is a floating one.
        They are part of a list of `nbytes`, which is pipelined through shared memory as a whole or not at all.
        """
        if self.pipelined is not None and self.route(nbytes, pairs[0][1].dtype, op) == "pipelined":
            self.pipelined.allreduce_many(pairs, op, divisor)
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
        self._meet()
        for piece in buffers.pieces(buffer, self._count(buffer)):
            if self.rank == root:
                self._comm.Reduce(MPI.IN_PLACE, piece, operation(op, buffer.dtype), root)
            else:
                self._comm.Reduce(piece, None, operation(op, buffer.dtype), root)

    def _count(self, buffer: Array) -> int:
        """Return how many elements one MPI call combines: MPI may allocate as much memory again."""
        return min(self.max_count, max(1, self.thresholds.piece_bytes // buffer.itemsize))

    def bcast(self, buffer: Array, root: int) -> None:
        """Replace `buffer` on every rank by that of `root`; any dtype."""
        self._meet()
        for piece in buffers.pieces(buffers.as_bytes(buffer), self.max_count):
            self._comm.Bcast(piece, root)

    def gatherv(self, block: Array, blocks: list[Array] | None, root: int) -> None:
        """Copy every rank's `block` into ``blocks[rank]`` on `root`; any dtype, sizes may differ."""
        self._meet()
        if self.rank != root:
            for piece in buffers.pieces(buffers.as_bytes(block), self.max_count):
                self._comm.Send(piece, root)
            return
        assert blocks is not None
        for rank, target in enumerate(blocks):
            if rank == root:
                target[...] = block
                continue
            for piece in buffers.pieces(buffers.as_bytes(target), self.max_count):
                self._comm.Recv(piece, rank)

    def scatterv(self, blocks: list[Array] | None, block: Array, root: int) -> None:
        """Copy ``blocks[rank]`` of `root` into every rank's `block`; any dtype, sizes may differ."""
        self._meet()
        if self.rank != root:
            for piece in buffers.pieces(buffers.as_bytes(block), self.max_count):
                self._comm.Recv(piece, root)
            return
        assert blocks is not None
        for rank, source in enumerate(blocks):
            if rank == root:
                block[...] = source
                continue
            for piece in buffers.pieces(buffers.as_bytes(source), self.max_count):
                self._comm.Send(piece, rank)

    def allgatherv(self, block: Array, blocks: list[Array]) -> None:
        """Copy every rank's `block` into ``blocks[rank]`` on every rank; any dtype, sizes may differ."""
        counts = [target.nbytes for target in blocks]
        if sum(counts) <= self.max_count:
            together = np.empty(sum(counts), np.uint8)
            self._meet()
            self._comm.Allgatherv(buffers.as_bytes(block), [together, counts])
            for target, piece in zip(blocks, np.split(together, np.cumsum(counts)[:-1]), strict=True):
                buffers.as_bytes(target)[...] = piece
            return
        blocks[self.rank][...] = block
        for root, target in enumerate(blocks):
            self.bcast(target, root)

    def alltoallv(self, sent: Array, counts: Sequence[int], received: Array) -> None:
        """Send the r-th part of `sent`, of ``counts[r]`` elements, to rank r; any dtype.

        Row r of `received` gets the part from rank r: ``counts[rank]`` elements each.
        """
        # Not MPI's Alltoallv: for megabytes on a node MPICH's takes 30 times as long.
        parts = np.split(sent, np.cumsum(counts)[:-1])
        self._meet()
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        requests = [request for other in others for request in self.irecv(received[other], other, 0)]
        requests += [request for other in others for request in self.isend(parts[other], other, 0)]
        received[self.rank] = parts[self.rank]
        MPI.Request.Waitall(requests)

    def _meet(self) -> None:
        """Wait until all ranks are about to call MPI, since a rank cannot leave an MPI call if another one has failed.

        Does nothing on several nodes.
        """
        if self.failures is not None and self.pipelined is not None:
            self.pipelined.barrier()

    def isend(self, block: Array, rank: int, tag: int) -> list[MPI.Request]:
        """Begin to send `block`, of any dtype; it must not change until the requests are done."""
        return [self._comm.Isend(part, rank, tag) for part in buffers.pieces(buffers.as_bytes(block), _MESSAGE_BYTES)]

    def irecv(self, block: Array, rank: int, tag: int) -> list[MPI.Request]:
        """Begin to receive into `block`, of any dtype."""
        return [self._comm.Irecv(part, rank, tag) for part in buffers.pieces(buffers.as_bytes(block), _MESSAGE_BYTES)]

    def node_barrier(self) -> None:
        """Wait for the ranks of this node; then this rank sees what they wrote to shared memory before."""
        if self.pipelined is not None:
            self.pipelined.barrier()
        elif self.local_size > 1:
            self._inside.Barrier()


def _goes_to_mpi(source: Array, buffer: Array) -> bool:
    return buffer.nbytes <= _DIRECT_BYTES and is_buffer(source) and not np.may_share_memory(source, buffer)


def _is_the_same(source: Array, buffer: Array) -> bool:
    """Return whether both, of one size and dtype, are the same contiguous memory."""
    return source.flags.c_contiguous and source.ctypes.data == buffer.ctypes.data
