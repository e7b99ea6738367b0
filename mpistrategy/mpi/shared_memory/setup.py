"""How much memory the ranks of one node share: mailboxes to compare calls in, and buffers to add arrays through."""

from __future__ import annotations

from mpistrategy.mpi.shared_memory import mailboxes, node_sum
from mpistrategy.mpi.tuning.thresholds import Thresholds


def bytes_for(ranks: int, thresholds: Thresholds) -> int:
    """Return how much memory each of so many ranks of a node needs for both."""
    chunk_bytes = node_sum.chunk_bytes_for(ranks, thresholds.chunk_bytes)
    return mailboxes.segment_bytes(thresholds.cell_bytes) + node_sum.segment_bytes(chunk_bytes)
