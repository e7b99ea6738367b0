"""The guard's channel over MPI, for ranks that share no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.mpi.contract.channel import wait_patiently


class MpiControlChannel:
    """The guard's channel: one persistent 16-byte Allreduce, and text for the reports.

    A persistent collective matches only itself, so a rank that leaves can start it without waiting.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm: MPI.Intracomm = comm.Dup()
        self._mine = np.zeros(2, np.int64)
        self._greatest = np.zeros(2, np.int64)
        self._request: Any = None
        self._persistent = True
        #: The request for texts that this rank may have left: MPI could still write into its buffers.
        self._texts: Any = None
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
        # The maximum of d and the maximum of -d are opposite only if all d are equal.
        return bool(self._greatest[0] == -self._greatest[1])

    def progress(self) -> None:
        """Let MPI make progress with messages for this rank."""
        self._comm.Iprobe()

    def allgather_text(self, text: str, look: Callable[[], object] | None = None) -> list[str]:
        """Return every rank's text, in rank order; see `ControlChannel.allgather_text`."""
        mine = np.frombuffer(text.encode(), np.uint8)
        counts = np.zeros(self._comm.size, np.int64)
        self._gather(self._comm.Iallgather(np.array([mine.size], np.int64), counts), look)
        together = np.empty(int(counts.sum()), np.uint8)
        self._gather(self._comm.Iallgatherv(mine, [together, counts]), look)
        texts, ends = together.tobytes(), np.cumsum(counts).tolist()
        return [texts[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]

    def _gather(self, request: Any, look: Callable[[], object] | None) -> None:
        if look is None:
            request.Wait()
            return
        self._texts = request
        wait_patiently(lambda: request.Test() or None, look)

    def close(self) -> None:
        """Free the request and the communicator."""
        if self._persistent:
            self._request.Free()
        self._comm.Free()
