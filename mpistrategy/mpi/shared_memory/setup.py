"""How much memory the ranks of one node share: mailboxes to compare calls in, and buffers to add arrays through."""

from __future__ import annotations

from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.shared_memory import mailboxes, node_sum
from mpistrategy.mpi.tuning.thresholds import Thresholds


def bytes_for(ranks: int, thresholds: Thresholds) -> int:
    """Return how much memory each of so many ranks of a node needs for both."""
    chunk_bytes = node_sum.chunk_bytes_for(ranks, thresholds.chunk_bytes)
    return mailboxes.segment_bytes(thresholds.cell_bytes) + node_sum.segment_bytes(chunk_bytes)


def warn_without_memory(reason: str, *, later: bool) -> None:
    """Warn that the ranks of a node share no memory; `later`: that they share some, and can have no more."""
    what = (
        "the ranks of a node cannot share more memory, and each keeps new arrays to itself"
        if later
        else "the ranks of a node share no memory, and everything goes through MPI"
    )
    warn(
        f"{what}: {reason}. Results are the same, slower. Give the job more memory (srun --mem, docker run "
        "--memory); give containers on one node one network (docker run --net=host).",
        FallbackWarning,
    )
