"""The communicator over MPI: its ranks, the shared memory of a node, and how all this is freed.

`over_mpi.collectives` moves the data.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from mpi4py import MPI

from mpistrategy.arrays.devices import Device, parse
from mpistrategy.errors import FallbackWarning, LaunchError
from mpistrategy.mpi.contract import failures
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.channel import FirstMessage
from mpistrategy.mpi.contract.failures import Failures
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.contract.mpi_channel import MpiControlChannel
from mpistrategy.mpi.job import abort, world
from mpistrategy.mpi.job.introductions import Introduction, introductions
from mpistrategy.mpi.over_mpi.collectives import Collectives
from mpistrategy.mpi.shared_memory import setup
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes, segment_bytes
from mpistrategy.mpi.shared_memory.node_sum import NodeSum, chunk_bytes_for
from mpistrategy.mpi.shared_memory.segments import (
    Fence,
    NodePeers,
    SharedMemory,
    part,
    private_memory,
    share,
)
from mpistrategy.mpi.shared_memory.spin_wait import Waiting, cores
from mpistrategy.mpi.tuning.files import agreed, library_name
from mpistrategy.mpi.tuning.thresholds import Thresholds
from mpistrategy.mpi.watchdog import status_board, watchdog

_UNEQUAL = (
    "MPI's Allreduce gives the ranks different bits of one sum ({}): values go by a slower route that does not. "
    "See MPI's settings for the algorithm of Allreduce"
)


class MpiCommunicator(Collectives):
    """A `mpistrategy.mpi.interface.communicator.Communicator` on a Dup of an mpi4py communicator.

    Args:
        comm: the communicator to duplicate; None means COMM_WORLD.
        node_key: ranks with an equal number are one node; None asks MPI's shared-memory split.  For tests, and for
            machines where the split is not what is wanted.
        contains_errors: as of `Guard`.

    Raises:
        OptionTypeError: when `comm` is not an intracommunicator of mpi4py.
    """

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
            super().__init__(comm.Dup())
        except MPI.Exception as error:
            raise LaunchError.at(
                "MirroredStrategy",
                found=f"an MPI that gives no further communicator ({error})",
                expected="fewer strategies at a time",
                fix="Call close() on those that are done with, or use `with MirroredStrategy() as strategy:`.",
            ) from error
        self._control = MpiControlChannel(comm) if self.size > 1 else None
        if node_key is None:
            self._inside = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        else:
            self._inside = self._comm.Split(node_key, self.rank)
        self._peers = NodePeers(self._inside, self.allgather_text)
        self.local_size: int = self._peers.local_size
        leader = int(self._peers.text_of_leader(str(self.rank)))
        me = Introduction.of_this_rank(self.rank, leader, sorted(cores()))
        ranks = introductions(self.allgather_text(me.text()))
        numbers = {leader: node for node, leader in enumerate(sorted({each.leader for each in ranks}))}
        self._place([numbers[each.leader] for each in ranks])
        self._cores = len({core for each in ranks if each.leader == leader for core in each.cores})
        self.is_crowded: bool = self.local_size > self._cores
        self.library: str = library_name(MPI.Get_library_version())
        if self.size > 1:
            self.thresholds: Thresholds = agreed(
                MPI.Get_library_version(), self.rank, self.node_of, self.allgather_text
            )
        self._has_warned = False
        self.shares_memory: bool = self.nodes < self.size  # where some node has several ranks, which can
        memory, usual = self._share_node_memory() if self.size > 1 else (private_memory(status_board.BYTES), None)
        if self._control is not None and usual is self._control:
            self.has_equal_sums: bool = self._control.has_equal_sums(self._comm)
            if self.has_equal_sums:
                self.first_message: FirstMessage | None = self._control
            elif self.rank == 0:
                warn(_UNEQUAL.format(self.library), FallbackWarning)
        self.guard: Guard = Guard(usual, self.rank, self.size, failures=self.failures, contains_errors=contains_errors)
        self._is_free = False
        world.close_at_finalize()
        world.watch(self.guard, self.free)
        if self.size > 1:
            world.watch_waiting(self._comm, self.guard, memory, self.node_of, ranks[0].directory)

    def _share_node_memory(self) -> tuple[SharedMemory, MpiControlChannel | Mailboxes]:
        """Make the shared memory of this node.

        Returns the memory of the watchdog's status board, and the channel on which the ranks compare their calls.
        """
        assert self._control is not None
        if not self.shares_memory:
            alone = self._shared_if_there_is_room(status_board.BYTES)  # `doctor` looks at it from outside
            return alone or private_memory(status_board.BYTES), self._control
        before = status_board.BYTES + failures.BYTES
        shared = self.shared(before + setup.bytes_for(self.local_size, self.thresholds))
        lines, errors = part(shared, 0, status_board.BYTES), part(shared, status_board.BYTES, failures.BYTES)
        shared, cell_bytes = part(shared, before), self.thresholds.cell_bytes
        self.shares_memory = shared.is_shared
        if not shared.is_shared or self.local_size == 1:
            return lines, self._control
        control, wait = self._control, partial(Waiting, self.local_size, self._control.progress, self._cores)
        chunk_bytes = chunk_bytes_for(self.local_size, self.thresholds.chunk_bytes)
        add_up = partial(NodeSum, part(shared, segment_bytes(cell_bytes)), chunk_bytes)
        if self.local_size < self.size:
            self.node_sum: NodeSum | None = add_up(wait())
            return lines, control
        self.failures: Failures | None = Failures(errors.segments, errors.local_rank, errors.fence)
        mailboxes = Mailboxes(shared, cell_bytes, wait(self._look), control)
        self.mailboxes: Mailboxes | None = mailboxes
        self.node_sum = add_up(wait(self._look), self._shared_if_there_is_room)
        return lines, mailboxes

    def _look(self) -> None:
        self.guard.look()

    def shared(self, nbytes: int) -> SharedMemory:
        """Return `nbytes` zeroed bytes for every rank; the ranks of a node see each other's.  Collective.

        If one node has no room for them, all ranks get private memory, and rank 0 warns.
        """
        if not self.shares_memory:
            return private_memory(nbytes)
        self._meet()
        memory = share(nbytes, self._peers, _memory_fence())
        if isinstance(memory, str):
            if self.rank == 0 and not self._has_warned:
                setup.warn_without_memory(memory, later=self.node_sum is not None)
            self._has_warned = True
            return private_memory(nbytes)
        return memory

    def _shared_if_there_is_room(self, nbytes: int) -> SharedMemory | None:
        """Return shared memory for what also works without it; None, without a warning, unless there is plenty."""
        self._meet()
        memory = share(nbytes, self._peers, _memory_fence(), sparing=True)
        return None if isinstance(memory, str) else memory

    def share_device(self, device: Device) -> None:
        """Tell every rank which device this one drives; fills `devices`."""
        self.devices: tuple[Device, ...] = tuple(parse(text) for text in self.allgather_text(str(device)))

    def allgather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order."""
        if self._control is None:
            return [text]
        self._meet()
        return self._control.allgather_text(text)

    def node_barrier(self) -> None:
        if self.node_sum is None and self.local_size > 1:
            self._inside.Barrier()
        super().node_barrier()

    def duplicate(self) -> MpiCommunicator:
        """Return a communicator of the same ranks and nodes with messages of its own.  Collective."""
        made = MpiCommunicator(self._comm, self.node_of[self.rank], contains_errors=self.guard.contains_errors)
        made.guard.timeout = self.guard.timeout
        made.guard.check_as(self.guard.level)
        made.devices = self.devices
        return made

    def part(self, ranks: Sequence[int]) -> MpiCommunicator:
        """Return a communicator of some of these ranks, in their order.  Collective over them alone."""
        comm = self._comm_of(list(ranks))
        try:
            made = MpiCommunicator(comm, contains_errors=self.guard.contains_errors)
        finally:
            comm.Free()
        made.guard.timeout = self.guard.timeout
        made.guard.check_as(self.guard.level)
        made.devices = tuple(self.devices[rank] for rank in ranks)
        return made

    @property
    def place_in_job(self) -> tuple[int, int]:
        """This rank's number in the job, and the number of ranks."""
        return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    @property
    def may_use_threads(self) -> bool:
        """Whether several threads may call this MPI at the same time."""
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def free(self) -> None:
        """Free the duplicates, where all ranks are known to do so."""
        if self._is_free:
            return
        self._is_free = True
        if self.guard.closed or MPI.Is_finalized():
            # In a forked child it all belongs to the parent; after a failure messages may be under way.
            if not self.guard.is_untold:  # else the others hear of it when the program ends
                abort.forget(self.guard)
                watchdog.forget(self.guard)
            return
        self.once.free()
        self.guard.closed = True
        abort.forget(self.guard)
        if self._control is not None:
            self._control.close()
        self._inside.Free()
        self._comm.Free()
        watchdog.forget(self.guard)


@cache
def _memory_fence() -> Fence | None:
    """Return a memory fence; None if the processor keeps writes in order."""
    if platform.machine().lower() in ("x86_64", "amd64", "i686"):
        return None
    window = MPI.Win.Create_dynamic(comm=MPI.COMM_SELF)
    window.Lock_all(MPI.MODE_NOCHECK)
    return window.Sync
