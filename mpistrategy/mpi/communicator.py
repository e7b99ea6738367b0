"""The transport over real MPI; the only file that imports mpi4py.MPI.

Buffers go to MPI as buffers (the upper-case methods of mpi4py); nothing is ever pickled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays import COMBINE, Array
from mpistrategy.devices import Device, parse
from mpistrategy.errors import LaunchError, OptionTypeError
from mpistrategy.mpi import abort, buffers
from mpistrategy.mpi.guard import Guard
from mpistrategy.mpi.transport import NodeGroups


class MpiCommunicator:
    """The verbs of `mpistrategy.mpi.transport.Communicator` on a Dup of an mpi4py communicator.

    Args:
        comm: the communicator to duplicate; None means COMM_WORLD.
        node_key: groups the ranks into nodes in place of MPI's shared-memory split: ranks with an equal number are
            one node.  For tests, and for machines where the split is not what is wanted.

    Raises:
        OptionTypeError: when `comm` is no intracommunicator of mpi4py.
    """

    def __init__(self, comm: Any = None, node_key: int | None = None) -> None:
        if comm is None:
            comm = MPI.COMM_WORLD
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise OptionTypeError.at(
                "MirroredStrategy",
                found=f"communicator={comm!r}",
                expected="an mpi4py intracommunicator, or None for all ranks",
            )
        try:
            self._comm: MPI.Intracomm = comm.Dup()
        except MPI.Exception as error:
            raise LaunchError.at(
                "MirroredStrategy",
                found=f"an MPI that gives no further communicator ({error})",
                expected="fewer strategies at a time",
                fix="Call close() on those that are done with, or use `with MirroredStrategy() as strategy:`.",
            ) from error
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self._control = MpiControlChannel(comm) if self.size > 1 else None
        self.guard = Guard(self._control, self.rank, self.size)
        self.devices: tuple[Device, ...] = ()
        self._node_key = node_key
        self._node: NodeGroups | None = None
        self.max_count = buffers.MAX_COUNT
        if MPI.COMM_WORLD.size > 1:
            abort.watch(
                self.guard, self.free, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.COMM_WORLD.Abort, MPI.Is_finalized
            )

    def local_rank_and_size(self) -> tuple[int, int]:
        """Return this rank's index among the ranks of its node, and how many they are."""
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        try:
            return node.rank, node.size
        finally:
            node.Free()

    def share_device(self, device: Device) -> None:
        """Tell every rank which device this one drives; fills `devices`."""
        self.devices = tuple(parse(text) for text in self.allgather_text(str(device)))

    def allreduce(self, buffer: Array, op: str = "SUM") -> None:
        """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins."""
        for piece in buffers.pieces(buffer, self.max_count):
            self._comm.Allreduce(MPI.IN_PLACE, piece, _mpi_op(op, buffer.dtype))

    def reduce(self, buffer: Array, root: int, op: str = "SUM") -> None:
        """Replace `buffer` on `root` by the sum (MIN, MAX, PROD) over the ranks; undefined elsewhere."""
        for piece in buffers.pieces(buffer, self.max_count):
            if self.rank == root:
                self._comm.Reduce(MPI.IN_PLACE, piece, _mpi_op(op, buffer.dtype), root)
            else:
                self._comm.Reduce(piece, None, _mpi_op(op, buffer.dtype), root)

    def bcast(self, buffer: Array, root: int) -> None:
        """Replace `buffer` on every rank by that of `root`; any dtype."""
        for piece in buffers.pieces(buffers.as_bytes(buffer), self.max_count):
            self._comm.Bcast(piece, root)

    def gatherv(self, block: Array, blocks: list[Array] | None, root: int) -> None:
        """Copy every rank's `block` into ``blocks[rank]`` on `root`; any dtype, sizes may differ."""
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

    def allgatherv(self, block: Array, blocks: list[Array]) -> None:
        """Copy every rank's `block` into ``blocks[rank]`` on every rank; any dtype, sizes may differ."""
        counts = [target.nbytes for target in blocks]
        if sum(counts) <= self.max_count:
            together = np.empty(sum(counts), np.uint8)
            self._comm.Allgatherv(buffers.as_bytes(block), [together, counts])
            for target, piece in zip(blocks, np.split(together, np.cumsum(counts)[:-1]), strict=True):
                buffers.as_bytes(target)[...] = piece
            return
        blocks[self.rank][...] = block
        for root, target in enumerate(blocks):
            self.bcast(target, root)

    def allgather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order."""
        return [text] if self._control is None else self._control.allgather_text(text)

    def node(self) -> NodeGroups:
        """Return the transports within this node and between the nodes' leaders; the first call is collective."""
        if self._node is None:
            comm = self._comm
            if self._node_key is None:
                inside = comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
            else:
                inside = comm.Split(self._node_key, self.rank)
            across = comm.Split(0 if inside.rank == 0 else MPI.UNDEFINED, self.rank)
            self._node = NodeGroups(
                _Group(inside, self.max_count), _Group(across, self.max_count) if across != MPI.COMM_NULL else None
            )
        return self._node

    def free(self) -> None:
        """Free the duplicates, where all ranks are known to do so."""
        if self.guard.closed:
            return
        self.guard.closed = True
        abort.forget(self.guard)
        if self._control is not None:
            self._control.close()
        if self._node is not None:
            self._node.node.free()
            if self._node.leaders is not None:
                self._node.leaders.free()
        self._comm.Free()


@cache
def _mpi_op(op: str, dtype: np.dtype[Any]) -> MPI.Op:
    """Return MPI's operation; for MIN and MAX of floats one of our own, since MPI's may lose a NaN."""
    if op not in ("MIN", "MAX") or dtype.kind != "f":
        known: MPI.Op = getattr(MPI, op)
        return known
    combine = COMBINE[op]

    def keep_nan(these: Any, those: Any, datatype: MPI.Datatype) -> None:
        target = np.frombuffer(those, dtype)
        combine(np.frombuffer(these, dtype), target, out=target)

    return MPI.Op.Create(keep_nan, commute=True)


class _Group(MpiCommunicator):
    """A part of a communicator whose ranks have already agreed: the same verbs without a guard of its own."""

    def __init__(self, comm: Any, max_count: int) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._control = None
        self.guard = Guard()
        self.devices = ()
        self._node_key = None
        self._node = None
        self.max_count = max_count


class MpiControlChannel:
    """The guard's channel: one persistent 16-byte Allreduce, and text for the reports.

    A persistent collective only ever meets itself, so that a rank that leaves can start it without waiting.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm: MPI.Intracomm = comm.Dup()
        self._mine = np.zeros(2, np.int64)
        self._greatest = np.zeros(2, np.int64)
        self._request: Any = None
        self._persistent = True
        try:
            self._request = self._comm.Allreduce_init(self._mine, self._greatest, MPI.MAX)
        except NotImplementedError:  # an MPI before 4.0
            self._persistent = False

    def start(self, digest: int) -> None:
        """Begin `all_equal` without waiting."""
        self._mine[0], self._mine[1] = digest, -digest
        if self._persistent:
            self._request.Start()
        else:
            self._request = self._comm.Iallreduce(self._mine, self._greatest, MPI.MAX)

    def finished(self) -> bool | None:
        """Return the answer to `start`, or None while ranks are missing."""
        return self._equal() if self._request.Test() else None

    def all_equal(self, digest: int) -> bool:
        """Wait for every rank's digest; return whether all are equal."""
        self.start(digest)
        self._request.Wait()
        return self._equal()

    def _equal(self) -> bool:
        # The greatest of d and the greatest of -d are opposite only when all d are the same.
        return bool(self._greatest[0] == -self._greatest[1])

    def allgather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order."""
        mine = np.frombuffer(text.encode(), np.uint8)
        counts = np.zeros(self._comm.size, np.int64)
        self._comm.Allgather(np.array([mine.size], np.int64), counts)
        together = np.empty(int(counts.sum()), np.uint8)
        self._comm.Allgatherv(mine, [together, counts])
        return [bytes(piece).decode() for piece in np.split(together, np.cumsum(counts)[:-1])]

    def close(self) -> None:
        """Free the request and the communicator."""
        if self._persistent:
            self._request.Free()
        self._comm.Free()
