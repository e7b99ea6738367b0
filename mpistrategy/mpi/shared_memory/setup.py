"""What the ranks of one node share: mailboxes to compare calls in, and bounce buffers to reduce through."""

from __future__ import annotations

from collections.abc import Callable

from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.shared_memory import mailboxes, pipelined
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.mpi.shared_memory.pipelined import PipelinedAllReduce
from mpistrategy.mpi.shared_memory.segments import SharedMemory, aligned, part
from mpistrategy.mpi.shared_memory.spin_wait import Waiting
from mpistrategy.mpi.tuning.thresholds import Thresholds


class NodeMemory:
    """The mailboxes and the bounce buffers of one node, in one piece of shared memory.

    Args:
        memory: `bytes_for` the same ranks and thresholds.
        thresholds: how large the parts are.
        waiting: how to wait for a peer in the mailboxes, before the ranks have agreed on a call.
        waiting_for_data: how to wait after that.
        more: see `PipelinedAllReduce`.
    """

    def __init__(
        self,
        memory: SharedMemory,
        thresholds: Thresholds,
        waiting: Waiting,
        waiting_for_data: Waiting,
        more: Callable[[int], SharedMemory | None] | None = None,
    ) -> None:
        mailbox_bytes = _mailbox_bytes(thresholds)
        chunk_bytes = pipelined.chunk_bytes_for(len(memory.segments), thresholds.chunk_bytes)
        self.mailboxes = Mailboxes(part(memory, 0, mailbox_bytes), thresholds.cell_bytes, waiting)
        self.pipelined = PipelinedAllReduce(part(memory, mailbox_bytes), chunk_bytes, waiting_for_data, more)

    @staticmethod
    def bytes_for(ranks: int, thresholds: Thresholds) -> int:
        """Return how much memory each of so many ranks of a node needs."""
        return _mailbox_bytes(thresholds) + pipelined.segment_bytes(
            pipelined.chunk_bytes_for(ranks, thresholds.chunk_bytes)
        )


class MailboxChannel:
    """The guard's channel among the ranks of one node.

    Args:
        mailboxes: where the digests are compared.
        allgather_text: returns every rank's text; for the reports.
    """

    def __init__(self, mailboxes: Mailboxes, allgather_text: Callable[[str], list[str]]) -> None:
        self.start, self.finished, self.all_equal = mailboxes.start, mailboxes.finished, mailboxes.all_equal
        self.allgather_text = allgather_text


def warn_without_memory(reason: str, rank: int, *, later: bool = False) -> None:
    """Say on rank 0 why the ranks of a node share no memory; an empty reason needs no words.

    Args:
        reason: in words.
        rank: this rank's number.
        later: they share some already, and only more of it cannot be had: for an arena, say.
    """
    if reason and rank == 0:
        what = (
            "the ranks of a node cannot share more memory, and each keeps what is new to itself"
            if later
            else "the ranks of a node share no memory, and everything goes through MPI"
        )
        warn(
            f"{what}: {reason}. Results are the same, slower. Give the job more memory (srun --mem, docker run "
            "--memory); where /dev/shm is named, give the container more room there (--shm-size, --ipc=host).",
            FallbackWarning,
        )


def _mailbox_bytes(thresholds: Thresholds) -> int:
    return aligned(mailboxes.segment_bytes(thresholds.cell_bytes))
