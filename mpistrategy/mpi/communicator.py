"""The transport over real MPI.  Only this file, `operations`, `control_channel` and `world` import mpi4py.MPI.

Buffers go to MPI as buffers (the upper-case methods of mpi4py); nothing is ever pickled.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays import Array
from mpistrategy.devices import Device, parse
from mpistrategy.errors import LaunchError, OptionTypeError
from mpistrategy.mpi import abort, buffers, watch_lines, watchdog, world
from mpistrategy.mpi.across_nodes import LEAST_BYTES, allreduce_across, lanes_of
from mpistrategy.mpi.blocks import Blocks
from mpistrategy.mpi.buffers import Pool, divide_by
from mpistrategy.mpi.cells import Cells
from mpistrategy.mpi.channel import ControlChannel
from mpistrategy.mpi.control_channel import MpiControlChannel
from mpistrategy.mpi.device_path import DevicePaths
from mpistrategy.mpi.guard import Guard
from mpistrategy.mpi.launch import Introduction, introductions
from mpistrategy.mpi.node_memory import CellChannel, NodeMemory, warn_without_memory
from mpistrategy.mpi.node_peers import NodePeers
from mpistrategy.mpi.operations import operation
from mpistrategy.mpi.path_files import agreed, library_name
from mpistrategy.mpi.paths import DEFAULT, Paths, Way
from mpistrategy.mpi.shared_memory import Fence, SharedMemory, part, private_memory, share
from mpistrategy.mpi.transport import NodeGroups
from mpistrategy.mpi.waiting import Waiting, cores
from mpistrategy.mpi.window import NodeWindow


class MpiCommunicator:
    """The verbs of `mpistrategy.mpi.transport.Communicator` on a Dup of an mpi4py communicator.

    Args:
        comm: the communicator to duplicate; None means COMM_WORLD.
        node_key: groups the ranks into nodes in place of MPI's shared-memory split: ranks with an equal number are
            one node.  For tests, and for machines where the split is not what is wanted.
        channel: makes the guard's channel from the usual one.

    Raises:
        OptionTypeError: when `comm` is no intracommunicator of mpi4py.
    """

    def __init__(
        self,
        comm: Any = None,
        node_key: int | None = None,
        channel: Callable[[ControlChannel], ControlChannel] = lambda usual: usual,
    ) -> None:
        if comm is None:
            comm = MPI.COMM_WORLD
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise OptionTypeError.at(
                "MirroredStrategy",
                found=f"communicator={comm!r}",
                expected="an mpi4py intracommunicator, or None for all ranks",
            )
        world.check("MirroredStrategy", comm)
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
        if node_key is None:
            self._inside = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        else:
            self._inside = self._comm.Split(node_key, self.rank)
        self._peers = NodePeers(self._inside, self.allgather_text)
        self.local_rank, self.local_size = self._peers.local_rank, self._peers.local_size
        leader = int(self._peers.text_of_leader(str(self.rank)))
        ranks = self._introduce(Introduction.of_this_rank(self.size, leader, self.local_size, sorted(cores())))
        leaders = sorted({each.leader for each in ranks})
        self.node_of = tuple(leaders.index(each.leader) for each in ranks)
        self._cores = len({core for each in ranks if each.leader == leader for core in each.cores})
        self.library = library_name(MPI.Get_library_version())
        self.paths: Paths = agreed(MPI.Get_library_version(), self) if self.size > 1 else DEFAULT
        self.cells: Cells | None = None
        self.blocks: Blocks | None = None
        self.window: NodeWindow | None = None
        self._has_warned = False
        #: Whether some node has several ranks, which can share memory; equal on all ranks.
        self.shares_memory = max(map(self.node_of.count, self.node_of)) > 1
        self.pool = Pool()
        self.compiled: dict[Any, Any] = {}
        memory, usual = self._share_node_memory() if self.size > 1 else (private_memory(watch_lines.BYTES), None)
        is_free = usual is None or usual is not self._control
        self.guard = Guard(None if usual is None else channel(usual), self.rank, self.size, is_free=is_free)
        self.devices: tuple[Device, ...] = ()
        self._node: NodeGroups | None = None
        #: The state of the two-level exchange, once `mpistrategy.mpi.across_nodes` has made it.
        self.across: Any = None
        #: From how many bytes on a buffer takes that way.
        self.least_across = LEAST_BYTES
        #: What runs all-reduces in the background, once `mpistrategy.mpi.progress` has made it.
        self.engine: Any = None
        self.device_paths = DevicePaths()
        self._links: list[_Group] = []
        self.max_count = buffers.MAX_COUNT
        world.watch(self.guard, self.free)
        if self.size > 1:
            self._watch_waiting(memory, ranks[0].directory)

    def _watch_waiting(self, memory: SharedMemory, path: str) -> None:
        shown = None if self.cells is None else self.cells.shown
        world.watch_waiting(self._comm, self.guard, memory, self.node_of, path, shown)

    def _introduce(self, me: Introduction) -> list[Introduction]:
        """Return what all ranks say about themselves.

        Raises:
            LaunchError: on every rank, when they do not fit together; nothing is left of the communicator then.
        """
        try:
            return introductions(self.allgather_text(me.text()))
        except LaunchError:
            if self._control is not None:
                self._control.close()
            self._inside.Free()
            self._comm.Free()
            raise

    def _share_node_memory(self) -> tuple[SharedMemory, MpiControlChannel | CellChannel]:
        """Make the cells and the window of this node.

        Returns the memory of the watchdogs' lines, and the channel on which the ranks compare their calls.
        """
        assert self._control is not None
        shared = self.shared(watch_lines.BYTES + NodeMemory.bytes_for(self.local_size, self.paths))
        lines, shared = part(shared, 0, watch_lines.BYTES), part(shared, watch_lines.BYTES)
        self.shares_memory = shared.is_shared
        if shared.is_shared and self.local_size > 1:
            control = self._control
            node = NodeMemory(shared, self.paths, Waiting(self.local_size, control.progress, self._cores))
            self.window = node.window
            if self.local_size == self.size:
                self.cells = node.cells
                self.blocks = Blocks(node.cells, self._shared_if_there_is_room)
                return lines, CellChannel(node.cells, control.allgather_text)
        return lines, self._control

    def shared(self, nbytes: int) -> SharedMemory:
        """Return `nbytes` zeroed bytes for every rank, which the ranks of its node see.  Collective.

        Where one node has no room for them, all ranks get private memory, and rank 0 warns.
        """
        if not self.shares_memory:
            return private_memory(nbytes)
        memory = share(nbytes, self._peers, _memory_fence())
        if isinstance(memory, str):
            if not self._has_warned:
                warn_without_memory(memory, self.rank)
            self._has_warned = True
            return private_memory(nbytes)
        return memory

    def _shared_if_there_is_room(self, nbytes: int) -> SharedMemory | None:
        """Return shared memory for what is only faster with it: without a word where there is not plenty."""
        memory = share(nbytes, self._peers, _memory_fence(), sparing=True)
        return None if isinstance(memory, str) else memory

    def node_barrier(self) -> None:
        """Wait for the ranks of this node; what they wrote to shared memory before can be read after it."""
        if self.window is not None:
            self.window.barrier()
        elif self.local_size > 1:
            self._inside.Barrier()

    def local_rank_and_size(self) -> tuple[int, int]:
        """Return this rank's index among the ranks of its node, and how many they are."""
        return self.local_rank, self.local_size

    def share_device(self, device: Device) -> None:
        """Tell every rank which device this one drives; fills `devices`."""
        self.devices = tuple(parse(text) for text in self.allgather_text(str(device)))

    def way(self, nbytes: int, dtype: np.dtype[Any], op: str) -> Way:
        """Return which way `allreduce` takes with so many bytes."""
        if self.window is not None and self.local_size == self.size and nbytes >= self.paths.window_bytes:
            return "window"
        return "across" if nbytes >= self.least_across and max(self.node_of) > 0 else "mpi"

    def allreduce(self, buffer: Array, op: str = "SUM", source: Array | None = None, divisor: int = 1) -> None:
        """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins.

        What this rank brings is in `source`, which stays as it is; None means in `buffer`.  The result is divided by
        `divisor`, which must be 1 unless the dtype is a floating one.
        """
        way = self.way(buffer.nbytes, buffer.dtype, op)
        if self.window is not None and way == "window":
            flat = buffer.reshape(-1)
            self.window.allreduce(flat if source is None else source.reshape(-1), flat, op, divisor)
            return
        if way == "across":
            allreduce_across(self, buffer, op, source=source)
            divide_by(divisor, buffer)
            return
        if source is not None:
            np.copyto(buffer, source)
        count = min(self.max_count, max(1, self.paths.piece_bytes // buffer.itemsize))
        for piece in buffers.pieces(buffer, count):
            self._comm.Allreduce(MPI.IN_PLACE, piece, operation(op, buffer.dtype))
        divide_by(divisor, buffer)

    def allreduce_many(
        self, pairs: Sequence[tuple[Array, Array]], op: str = "SUM", divisor: int = 1, nbytes: int = 0
    ) -> None:
        """Do ``allreduce(target, op, source, divisor)`` for pairs of (source, target), flat and of one dtype.

        They are part of a list of `nbytes`, which goes through the window of a node as a whole or not at all.
        """
        if self.window is not None and self.way(nbytes, pairs[0][1].dtype, op) == "window":
            self.window.allreduce_many(pairs, op, divisor)
            return
        for source, target in pairs:
            self.allreduce(target, op, source, divisor)

    def allreduce_device_memory(self, buffer: Any, op: str) -> None:
        """Do `allreduce` with a contiguous array in GPU memory that no stream works on; for CUDA-aware MPIs only."""
        for piece in buffers.pieces(buffer, self.max_count):
            self._comm.Allreduce(MPI.IN_PLACE, piece, operation(op, buffer.dtype))

    def reduce(self, buffer: Array, root: int, op: str = "SUM") -> None:
        """Replace `buffer` on `root` by the sum (MIN, MAX, PROD) over the ranks; undefined elsewhere."""
        for piece in buffers.pieces(buffer, self.max_count):
            if self.rank == root:
                self._comm.Reduce(MPI.IN_PLACE, piece, operation(op, buffer.dtype), root)
            else:
                self._comm.Reduce(piece, None, operation(op, buffer.dtype), root)

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

    def alltoallv(self, sent: Array, counts: Sequence[int], received: Array) -> None:
        """Send ``counts[r]`` elements of `sent`, one part after another, to rank r; any dtype.

        The row of `received` with a rank's number gets what that rank sends here: ``counts[rank]`` elements each.
        """
        # Not MPI's Alltoallv: on a node MPICH's takes 30 times as long for megabytes.
        parts = np.split(sent, np.cumsum(counts)[:-1])
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        requests = [request for other in others for request in self.irecv(received[other], other, 0)]
        requests += [request for other in others for request in self.isend(parts[other], other, 0)]
        received[self.rank] = parts[self.rank]
        MPI.Request.Waitall(requests)

    def allgather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order."""
        return [text] if self._control is None else self._control.allgather_text(text)

    def node(self) -> NodeGroups:
        """Return the transports within this node and between the nodes' leaders; the first call is collective."""
        if self._node is None:
            across = self._comm.Split(0 if self.local_rank == 0 else MPI.UNDEFINED, self.rank)
            self._node = NodeGroups(
                _Group(self._inside.Dup(), self.max_count, self.window),
                _Group(across, self.max_count) if across != MPI.COMM_NULL else None,
            )
        return self._node

    def links(self, most: int) -> tuple[int, _Group | None]:
        """Return how many ranks of each node, up to `most`, have a counterpart on every node, and this rank's.

        Collective.  The counterparts are ordered by node.
        """
        count = lanes_of(self.node_of, most)
        lane = self.local_rank if self.local_rank < count else MPI.UNDEFINED
        comm = self._comm.Split(lane, self.node_of[self.rank])
        if comm == MPI.COMM_NULL:
            return count, None
        link = _Group(comm, self.max_count)
        self._links.append(link)
        return count, link

    def isend(self, block: Array, rank: int, tag: int) -> list[MPI.Request]:
        """Begin to send `block`, of any dtype; it must stay as it is until the requests are done."""
        return [self._comm.Isend(part, rank, tag) for part in buffers.pieces(buffers.as_bytes(block), _MESSAGE_BYTES)]

    def irecv(self, block: Array, rank: int, tag: int) -> list[MPI.Request]:
        """Begin to receive into `block`, of any dtype."""
        return [self._comm.Irecv(part, rank, tag) for part in buffers.pieces(buffers.as_bytes(block), _MESSAGE_BYTES)]

    def duplicate(self, channel: Callable[[ControlChannel], ControlChannel] = lambda usual: usual) -> MpiCommunicator:
        """Return a communicator of the same ranks on the same nodes that never meets this one's calls.  Collective."""
        made = MpiCommunicator(self._comm, self.node_of[self.rank], channel)
        made.guard.timeout = self.guard.timeout
        made.guard.check_as(self.guard.level)
        return made

    @property
    def place_in_job(self) -> tuple[int, int]:
        """This rank's number among all ranks of the job, and how many they are."""
        return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    @property
    def may_use_threads(self) -> bool:
        """Whether several threads may call this MPI at a time."""
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def free(self) -> None:
        """Free the duplicates, where all ranks are known to do so."""
        if self.guard.closed:
            return
        if self.engine is not None:
            self.engine.stop()
        self.guard.closed = True
        abort.forget(self.guard)
        self.across = None
        self.device_paths.free()
        for link in self._links:
            link.free()
        if self._control is not None:
            self._control.close()
        if self._node is not None:
            self._node.node.free()
            if self._node.leaders is not None:
                self._node.leaders.free()
        if self._inside != MPI.COMM_NULL:
            self._inside.Free()
        self._comm.Free()
        watchdog.forget(self.guard)


#: Open MPI announces messages of 64 KiB and more over TCP, and sends them when the receiver answers; but the answer
#: stands in line behind what is on its way: 16 MiB both ways at 1 Gbit/s take 160-200 ms so, and 142 in shorter ones.
_MESSAGE_BYTES = 60 * 2**10 if MPI.get_vendor()[0] == "Open MPI" else buffers.MAX_COUNT


@cache
def _memory_fence() -> Fence | None:
    """Return what orders this process's writes for its peers; None where the processor keeps them in order."""
    if platform.machine().lower() in ("x86_64", "amd64", "i686"):
        return None
    window = MPI.Win.Create_dynamic(comm=MPI.COMM_SELF)
    window.Lock_all(MPI.MODE_NOCHECK)
    return window.Sync


class _Group(MpiCommunicator):
    """A part of a communicator whose ranks have already agreed: the same verbs without a guard of its own."""

    def __init__(self, comm: Any, max_count: int, window: NodeWindow | None = None) -> None:
        self._comm = comm
        self._inside = MPI.COMM_NULL
        self.rank = comm.rank
        self.size = comm.size
        self.local_rank, self.local_size = (self.rank, self.size) if window is not None else (0, 1)
        self.node_of = (0,) * self.size if window is not None else tuple(range(self.size))
        self.paths = DEFAULT
        self.cells, self.blocks, self.window = None, None, window
        self.pool, self.compiled = Pool(), {}
        self.guard, self.devices = Guard(), ()
        self.across, self.engine, self._links, self.device_paths = None, None, [], DevicePaths()
        self._control = self._node = None
        self.least_across = LEAST_BYTES
        self.max_count = max_count
