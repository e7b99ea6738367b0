"""What the ranks of one node share: mailboxes to compare calls in, and bounce buffers to reduce through; how large."""

from __future__ import annotations

from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.shared_memory import mailboxes
from mpistrategy.mpi.shared_memory.spin_wait import counter_bytes
from mpistrategy.mpi.tuning.thresholds import Thresholds

#: Of the pipelined all-reduce: what each rank counts, and how many chunks it has in its bounce buffers.
COUNTERS = 3
BUFFERS = 2
#: With many ranks on a node a chunk grows, so that each one's slice of it is worth a call of NumPy.
_LEAST_SLICE_BYTES = 16 * 2**10
_LARGEST_CHUNK_BYTES = 2**20


def chunk_bytes_for(ranks: int, chunk_bytes: int) -> int:
    """Return the size of the chunks of the pipelined all-reduce for so many ranks."""
    return max(chunk_bytes, min(ranks * _LEAST_SLICE_BYTES, _LARGEST_CHUNK_BYTES))


def bounce_bytes(chunk_bytes: int) -> int:
    """Return how much memory of each rank the bounce buffers for chunks of this size take."""
    return BUFFERS * 2 * chunk_bytes


def pipelined_bytes(chunk_bytes: int) -> int:
    """Return how much memory each rank's counters and bounce buffers take."""
    return counter_bytes(COUNTERS) + bounce_bytes(chunk_bytes)


def bytes_for(ranks: int, thresholds: Thresholds) -> int:
    """Return how much memory each of so many ranks of a node needs for both."""
    chunk_bytes = chunk_bytes_for(ranks, thresholds.chunk_bytes)
    return mailboxes.segment_bytes(thresholds.cell_bytes) + pipelined_bytes(chunk_bytes)


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
