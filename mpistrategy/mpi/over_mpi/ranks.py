"""The communicator over MPI: its ranks, the shared memory of a node, how all this is freed, and the collectives.

Data move by one MPI collective, or in the shared memory of a node.  The upper-case methods of mpi4py send buffers;
nothing is pickled.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays.dtypes import COMBINE, Array, quietly
from mpistrategy.errors import FallbackWarning, LaunchError
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.mpi_channel import MpiControlChannel
from mpistrategy.mpi.interface.ranks import MAX_COUNT, PROGRAM_TAG, Freed, Ranks, as_bytes, pieces, put
from mpistrategy.mpi.job import launcher, world
from mpistrategy.mpi.multi_node.two_level import Wire, across_nodes
from mpistrategy.mpi.over_mpi.messages import Message
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes, segment_bytes
from mpistrategy.mpi.shared_memory.node_sum import NodeSum, bytes_for, chunk_bytes_for
from mpistrategy.mpi.shared_memory.segments import (
    Fence,
    SharedMemory,
    no_fence,
    part,
    private_memory,
    share,
)
from mpistrategy.mpi.shared_memory.spin_wait import SpinWait
from mpistrategy.mpi.tuning.thresholds import RouteName, Thresholds, agreed, library_name
from mpistrategy.mpi.watchdog import status_board
from mpistrategy.mpi.watchdog.run_directory import new_path

#: The tag of an exchange of uneven parts.
_EXCHANGE_TAG = 2**10


class MpiRanks(Ranks):
    """A `mpistrategy.mpi.interface.ranks.Ranks` on a Dup of an mpi4py communicator.

    Args:
        comm: the communicator to duplicate; None means COMM_WORLD.
        node_key: ranks with an equal number are one node; None asks MPI's shared-memory split.  For tests, and for
            machines where the split is not wanted.
        contains_errors: see `Guard`.

    Raises:
        OptionTypeError: when `comm` is not an intracommunicator of mpi4py.
    """

    #: Whether MPI gives all ranks the same bits of one sum.
    has_equal_sums: bool = True
    #: Called between two looks at messages between nodes, with the number of looks; None: see `two_level`.
    pause: Callable[[int], None] | None = None
    #: How many elements one MPI call may carry.
    max_count: int = MAX_COUNT

    def __init__(
        self,
        comm: Any = None,
        node_key: int | None = None,
        *,
        contains_errors: bool = False,
    ) -> None:
        comm = world.ranks_of(comm)
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
        self._control = MpiControlChannel(comm)
        #: Memory that messages may still come into; it lives until `free`, and after a failure for ever.
        self.under_way: list[object] = self._control.kept
        inside = self._comm.Split_type(MPI.COMM_TYPE_SHARED) if node_key is None else self._comm.Split(node_key)
        first_of_node = np.array([comm.rank])
        inside.Bcast(first_of_node, 0)
        inside.Free()
        leader = int(first_of_node[0])
        own_text = json.dumps((leader, sorted(os.sched_getaffinity(0)), new_path() if comm.rank == 0 else ""))
        lines = [text.split("\n") for text in self.allgather_text(f"{launcher.versions()}\n{own_text}")]
        launcher.check_versions([line[0] for line in lines])  # first: other versions may say more, or less
        leaders, cores_of_rank, paths = zip(*[json.loads(line[1]) for line in lines], strict=True)
        super().__init__(comm.rank, np.unique(leaders, return_inverse=True)[1].tolist())
        cores_of_node = {core for peer, node in enumerate(leaders) if node == leader for core in cores_of_rank[peer]}
        self.is_crowded: bool = self.local_size > len(cores_of_node)
        self.library: str = library_name(MPI.Get_library_version())
        if self.size > 1:
            self.thresholds: Thresholds = agreed(
                MPI.Get_library_version(), self.rank, self.node_of, self.allgather_text
            )
        #: How many bytes one MPI call adds up: between nodes pieces cost messages.
        self.piece_bytes: int = 2**20 if self.nodes == 1 else 2**26
        self.may_use_threads: bool = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.shares_memory: bool = self.nodes < self.size  # where some node has several ranks, which can
        memory, channel = self._share_node_memory() if self.size > 1 else (private_memory(status_board.BYTES), None)
        if channel is self._control:
            self.has_equal_sums: bool = self._control.has_equal_sums(self._comm)
            if self.has_equal_sums:
                self.first_message: ControlChannel | None = self._control
            elif self.rank == 0:
                warn(
                    f"MPI's Allreduce gives the ranks different bits of one sum ({self.library}): values go by a "
                    "slower route that does not. See MPI's settings for the algorithm of Allreduce",
                    FallbackWarning,
                )
        self.guard: Guard = Guard(
            channel, self.rank, self.size, shares_board=self.mailboxes is not None, contains_errors=contains_errors
        )
        world.watch(self.guard, self.free)
        if self.size > 1:
            # Ranks that share no memory count as nodes of their own.
            nodes = self.node_of if memory.is_shared else range(self.size)
            world.watch_waiting(self._comm, self.guard, memory, nodes, paths[0])

    def _share_node_memory(self) -> tuple[SharedMemory, MpiControlChannel | Mailboxes]:
        """Make the shared memory of this node.

        Returns the memory of the watchdog's status board, and the channel on which the ranks compare their calls.
        """
        if not self.shares_memory:
            board, _ = share(status_board.BYTES, self, _memory_fence(), sparing=True)  # `doctor` looks from outside
            return board, self._control
        before, cell_bytes = status_board.BYTES, self.thresholds.cell_bytes
        shared = self.shared(before + bytes_for(self.local_size, self.thresholds))
        board, memory = part(shared, 0, status_board.BYTES), part(shared, before)
        self.shares_memory = shared.is_shared
        if not shared.is_shared or self.local_size == 1:
            return board, self._control
        look = (lambda: self.guard.look()) if self.nodes == 1 else (lambda: None)
        wait = partial(SpinWait, self.progress, look, is_crowded=self.is_crowded)
        self.node_sum: NodeSum | None = NodeSum(
            part(memory, segment_bytes(cell_bytes)),
            chunk_bytes_for(self.local_size, self.thresholds.chunk_bytes),
            wait().until,
            partial(self.shared, sparing=True),
        )
        if self.nodes > 1:
            return board, self._control
        self.mailboxes: Mailboxes | None = Mailboxes(memory, cell_bytes, wait().until, self._control)
        return board, self.mailboxes

    def shared(self, nbytes: int, *, sparing: bool = False) -> SharedMemory:
        """Return `nbytes` zeroed bytes for every rank; the ranks of a node see each other's.  Collective.

        If one node has no room for them, all ranks get private memory, and rank 0 warns.  With `sparing` the caller
        works without shared memory, too: there must be plenty, and there is no warning.
        """
        if not self.shares_memory:
            return private_memory(nbytes)
        memory, reason = share(nbytes, self, _memory_fence(), sparing=sparing)
        if reason and not (self.rank or sparing):
            what = "no more" if self.node_sum else "no"
            warn(
                f"the ranks of a node can share {what} memory: {reason}. Results are the same, slower. Give the job "
                "more memory (srun --mem, docker run --memory); let the containers on a node see each other's "
                "processes (docker run --pid=host).",
                FallbackWarning,
            )
        return memory

    def allgather_text(self, text: str, look: Callable[[], object] | None = None) -> list[str]:
        """Return every rank's text, in rank order."""
        return self._control.allgather_text(text, look if self.mailboxes is None else self.guard.look)

    def node_barrier(self) -> None:
        """Wait for the ranks of this node; then this rank sees their earlier writes to shared memory."""
        if self.node_sum is not None:
            self.node_sum.barrier()

    def duplicate(self) -> MpiRanks:
        """Return a communicator of the same ranks with messages of its own.  Collective."""
        return self._like(self._comm, range(self.size))

    def part(self, ranks: Sequence[int]) -> MpiRanks:
        """Return a communicator of some of these ranks and their nodes, in this order.  Collective over them alone."""
        comm = self.link(ranks)
        try:
            return self._like(comm, ranks)
        finally:
            comm.Free()

    def _like(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> MpiRanks:
        other = MpiRanks(comm, self.node_of[self.rank], contains_errors=self.guard.contains_errors)
        other.devices = tuple(self.devices[rank] for rank in ranks)
        other.guard.timeout = self.guard.timeout
        other.guard.check_as(self.guard.level)
        return other

    def free(self) -> None:
        """Free the duplicates, where all ranks are known to do so."""
        # In a forked child it all belongs to the parent; after a failure messages may be under way.
        is_lost = self.guard.closed or MPI.Is_finalized()
        if not is_lost:
            while self.made:  # the last made first
                _, value = self.made.popitem()
                if isinstance(value, Freed):
                    value.free()
            self.guard.closed = True
            self._control.close()
            self._comm.Free()
        if not is_lost or not self.guard.is_untold:  # else the others hear of it when the program ends
            world.forget(self.guard)

    # ----------------------------------------------------------------------------------------- collectives

    def route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return the route that `allreduce` takes with so many bytes."""
        if self.nodes == 1 and self.node_sum is not None and nbytes >= self.thresholds.window_bytes:
            return "node_sum"
        if not self.has_equal_sums:
            return "root"
        is_large = self.shares_memory and self.has_lanes and nbytes >= self.thresholds.lanes_bytes
        return "lanes" if self.nodes > 1 and (is_large or self.pause is not None) else "mpi"

    def progress(self) -> None:
        """Let messages make progress."""
        self._comm.Iprobe()

    def allreduce(
        self,
        buffer: Array,
        op: str = "SUM",
        source: Array | None = None,
        *,
        by_lanes: bool = False,
        wire: Wire = None,
    ) -> None:
        """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; see `Ranks.allreduce`."""
        way = "lanes" if by_lanes or wire is not None else self.route(buffer.nbytes, buffer.dtype, op)
        flat = buffer.reshape(-1)
        operand = flat if source is None else source.reshape(-1)
        if way == "node_sum" and self.node_sum is not None:
            self.node_sum.run([(operand, flat)], op)
        elif way == "lanes":
            across_nodes(self).allreduce(operand, flat, op, wire)
        else:
            put(buffer, buffer if source is None else source)
            self.reduce(buffer, 0 if way == "root" else None, op)
            if way == "root":
                self.bcast(buffer, 0)

    def reduce(self, buffer: Any, root: int | None, op: str = "SUM") -> None:
        """Replace `buffer` on `root` by the sum (MIN, MAX, PROD) over the ranks; undefined elsewhere.

        With None as the root it is replaced on every rank.  A CUDA-aware MPI also takes an array in GPU memory that no
        stream uses.
        """
        most = self.max_count
        if isinstance(buffer, np.ndarray):  # MPI may allocate as much memory again, on the host
            most = min(most, max(1, self.piece_bytes // buffer.itemsize))
        parts, by_mpi = [*pieces(buffer, most)], operation(op, buffer.dtype)
        for piece in parts:
            if root is None:
                self._call(self._comm.Allreduce, self._comm.Iallreduce, MPI.IN_PLACE, piece, by_mpi)
            else:
                source = MPI.IN_PLACE if self.rank == root else piece
                self._call(self._comm.Reduce, self._comm.Ireduce, source, piece, by_mpi, root)

    def bcast(self, buffer: Array, root: int) -> None:
        """Replace `buffer` on every rank by `root`'s buffer; any dtype."""
        parts = [*pieces(as_bytes(buffer), self.max_count)]
        for piece in parts:
            self._call(self._comm.Bcast, self._comm.Ibcast, piece, root)

    def allgatherv(self, block: Array | None, counts: Sequence[int], target: Array) -> None:
        """Write the ranks' blocks one after the other, in rank order, into `target` on every rank; see `gatherv`."""
        result, sizes = as_bytes(target), (np.asarray(counts, np.int64) * target.itemsize).tolist()
        ends = np.cumsum(sizes)
        if block is not None:
            put(result[ends[self.rank] - sizes[self.rank] : ends[self.rank]], as_bytes(block))
        if result.size > self.max_count:
            for root, (end, size) in enumerate(zip(ends, sizes, strict=True)):
                self.bcast(result[end - size : end], root)
            return
        if len(set(sizes)) == 1:  # for megabytes on a node MPICH's Allgatherv takes two to three times as long
            self._call(self._comm.Allgather, self._comm.Iallgather, MPI.IN_PLACE, result)
        else:
            self._call(self._comm.Allgatherv, self._comm.Iallgatherv, MPI.IN_PLACE, [result, sizes, None, MPI.BYTE])

    def alltoall(self, sent: Array, received: Array) -> None:
        """Send the r-th of `size` equal parts of `sent` to rank r, whose row of this rank in `received` gets it.

        Any dtype; so few bytes that one MPI call takes them.
        """
        # Of equal parts: for megabytes on a node MPICH's Alltoallv takes up to three times as long.
        send_buffer, receive_buffer = as_bytes(sent), as_bytes(received)
        self._call(self._comm.Alltoall, self._comm.Ialltoall, send_buffer, receive_buffer)

    def _call(self, blocking: Callable[..., object], other: Callable[..., MPI.Request], *arguments: Any) -> None:
        """Make a collective call of MPI; `other` is the same without blocking.

        Where errors are contained, ranks of one node leave it if a rank has failed; elsewhere the job ends.
        """
        if self.guard.contains_errors and self.guard.shares_board:
            self._finish([other(*arguments)], arguments)
        else:
            blocking(*arguments)

    def _finish(self, requests: list[MPI.Request], memory: object) -> None:
        """Wait for messages; where errors are contained, this rank may leave them, and their memory stays."""
        done = MPI.Request.Testall if self.guard.contains_errors else MPI.Request.Waitall
        self.under_way.append(memory)
        while not done(requests):
            self.guard.look()
            os.sched_yield()
        self.under_way.pop()

    def alltoallv(self, sent: Array, counts: Sequence[int], received: Array, taken: Sequence[int]) -> None:
        """Send the first ``counts[0]`` elements of `sent` to rank 0, the next ones to rank 1, and so on.

        Any dtype.  `received` gets ``taken[r]`` elements of rank r, in rank order.
        """
        send_blocks, receive_blocks = (
            np.split(as_bytes(array), np.cumsum(np.multiply(sizes, array.itemsize))[:-1])
            for array, sizes in ((sent, counts), (received, taken))
        )
        put(receive_blocks[self.rank], send_blocks[self.rank])
        peers = (*range(self.rank + 1, self.size), *range(self.rank))  # not all to rank 0 first
        most, comm = max(1, self.max_count // self.size), self._comm
        requests = [
            start([piece, MPI.BYTE], rank, _EXCHANGE_TAG)
            for start, blocks in ((comm.Irecv, receive_blocks), (comm.Isend, send_blocks))
            for rank in peers
            for piece in pieces(blocks[rank], most)
        ]
        self._finish(requests, (sent, received))

    def begin_message(self, block: Array, rank: int | None, tag: int, *, sends: bool) -> Message:
        """Begin to send `block`, of any dtype, to one rank, or to receive into it from a rank; None means any rank.

        Both ranks give as many bytes, and the same tag.
        """
        return Message(self._comm, as_bytes(block), rank, PROGRAM_TAG + tag, self.max_count, sends=sends)

    def link(self, ranks: Sequence[int]) -> MPI.Intracomm:
        """Return MPI's communicator of some of these ranks, in their order.  Collective over them alone."""
        all_ranks = self._comm.Get_group()
        group = all_ranks.Incl(ranks)
        link = self._comm.Create_group(group)
        group.Free()
        all_ranks.Free()
        return link

    def begin_allreduce_over(self, link: MPI.Intracomm, buffer: Array, op: str, *, blocks: bool = False) -> MPI.Request:
        """Begin `allreduce` over the ranks of a `link` by one call of MPI, whatever the size.

        The buffer must not be touched until the request is done: at once where the call `blocks`.
        """
        if not blocks:
            return link.Iallreduce(MPI.IN_PLACE, buffer, operation(op, buffer.dtype))
        link.Allreduce(MPI.IN_PLACE, buffer, operation(op, buffer.dtype))
        return MPI.REQUEST_NULL


@cache
def _memory_fence() -> Fence:
    """Return a memory fence, if the processor needs it."""
    if platform.machine().lower() in ("x86_64", "amd64", "i686"):
        return no_fence
    window = MPI.Win.Create_dynamic(comm=MPI.COMM_SELF)
    window.Lock_all(MPI.MODE_NOCHECK)
    return window.Sync


@cache
def operation(op: str, dtype: np.dtype[Any]) -> MPI.Op:
    """Return MPI's operation for host memory, or one of our own.

    MPI's MIN and MAX of floats may lose a NaN, and take either of 0.0 and -0.0; ours are commutative in every bit.
    Open MPI 5 saturates sums of integers of 8 and 16 bits where the processor has AVX; ours wrap around.
    """
    combine = COMBINE[op]
    if dtype.kind != "f" if op in ("MIN", "MAX") else dtype.kind not in "iu" or dtype.itemsize >= 4:
        return {"SUM": MPI.SUM, "PROD": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}[op]

    @quietly
    def combined(source: Any, target_buffer: Any, datatype: MPI.Datatype) -> None:
        target = np.frombuffer(target_buffer, dtype)
        combine(np.frombuffer(source, dtype), target, out=target)

    return MPI.Op.Create(combined, commute=True)
