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


def _sizes(ranks: int, thresholds: Thresholds) -> tuple[int, int]:
    """Return the bytes of a rank's mailbox, and of a chunk of the pipelined all-reduce."""
    return (
        aligned(mailboxes.segment_bytes(thresholds.cell_bytes)),
        pipelined.chunk_bytes_for(ranks, thresholds.chunk_bytes),
    )


def bytes_for(ranks: int, thresholds: Thresholds) -> int:
    """Return how much memory `in_memory` needs for each of so many ranks of a node."""
    mailbox_bytes, chunk_bytes = _sizes(ranks, thresholds)
    return mailbox_bytes + pipelined.segment_bytes(chunk_bytes)


def in_memory(
    memory: SharedMemory,
    thresholds: Thresholds,
    waiting: Waiting,
    waiting_for_data: Waiting,
    more: Callable[[int], SharedMemory | None] | None = None,
) -> tuple[Mailboxes, PipelinedAllReduce]:
    """Return the mailboxes and the pipelined all-reduce of a node.

    Args:
        memory: `bytes_for` the same ranks and thresholds.
        thresholds: how large the parts are.
        waiting: how to wait for a peer in the mailboxes, before the ranks have agreed on a call.
        waiting_for_data: how to wait after that.
        more: see `PipelinedAllReduce`.
    """
    mailbox_bytes, chunk_bytes = _sizes(len(memory.segments), thresholds)
    return (
        Mailboxes(part(memory, 0, mailbox_bytes), thresholds.cell_bytes, waiting),
        PipelinedAllReduce(part(memory, mailbox_bytes), chunk_bytes, waiting_for_data, more),
    )


def warn_without_memory(reason: str, *, later: bool) -> None:
    """Warn that the ranks of a node share no memory; `later`: that they share some, and can have no more."""
    what = (
        "the ranks of a node cannot share more memory, and each keeps new arrays to itself"
        if later
        else "the ranks of a node share no memory, and everything goes through MPI"
    )
    warn(
        f"{what}: {reason}. Results are the same, slower. Give the job more memory (srun --mem, docker run "
        "--memory); where /dev/shm is named, give the container more room there (--shm-size, --ipc=host).",
        FallbackWarning,
    )
