"""The ranks of one node, as they find each other to share memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI


class NodePeers:
    """The ranks of this node.

    Args:
        inside: the communicator of the node's ranks.
        allgather_text: returns the texts of all ranks of the job.
    """

    def __init__(self, inside: MPI.Comm, allgather_text: Callable[[str], list[str]]) -> None:
        self._inside = inside
        self._allgather_text = allgather_text
        self.local_rank: int = inside.rank
        self.local_size: int = inside.size

    def text_of_leader(self, text: str) -> str:
        """Return the text of the first rank of this node."""
        length = np.array([len(text.encode())])
        self._inside.Bcast(length, 0)
        letters = np.frombuffer(text.encode(), np.uint8) if self.local_rank == 0 else np.empty(length[0], np.uint8)
        letters = letters.copy()
        self._inside.Bcast(letters, 0)
        return bytes(letters).decode()

    def any_reason(self, reason: str) -> str:
        """Return the first text that is not empty, of all ranks; "" when all are."""
        return next(filter(None, self._allgather_text(reason)), "")
