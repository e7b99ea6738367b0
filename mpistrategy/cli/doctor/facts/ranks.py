"""All ranks of the job, by mpi4py alone: the library refuses to start on some jobs that the doctor examines.

Importing it starts MPI.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

from mpistrategy.objects.text import decoded, encoded

_TEXT = 71
_NAP_SECONDS = 1e-3
_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


class Ranks:
    """All ranks, or some.  Nothing collective happens before `collect` has seen that all are there."""

    def __init__(self, comm: MPI.Intracomm = MPI.COMM_WORLD) -> None:
        self._comm = comm
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size

    @property
    def mpi4py(self) -> str:
        """The version of mpi4py."""
        return mpi4py.__version__

    @property
    def library(self) -> str:
        """What the MPI library says about itself."""
        return str(MPI.Get_library_version())

    @property
    def built_for(self) -> str:
        """The MPI that mpi4py was built for."""
        return str(MPI.get_vendor()[0])

    @property
    def thread_level(self) -> str:
        """What MPI was started with."""
        return _LEVELS.get(MPI.Query_thread(), "unknown")

    def collect(self, text: str, seconds: float) -> dict[int, str]:
        """Return the texts of all ranks that arrived in time on rank 0; elsewhere only the own text."""
        found = {self.rank: text}
        if self.rank:
            self._comm.Send(np.frombuffer(encoded(text) or b" ", np.uint8), 0, _TEXT)
            return found
        end, status = time.monotonic() + seconds, MPI.Status()
        while len(found) < self.size:
            if self._comm.Iprobe(MPI.ANY_SOURCE, _TEXT, status):
                letters = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                source = status.Get_source()
                self._comm.Recv(letters, source, _TEXT)
                found[source] = decoded(letters.data)
            elif time.monotonic() > end:
                break
            else:
                time.sleep(_NAP_SECONDS)
        return found

    def told(self, number: int) -> int:
        """Return rank 0's number.  Collective."""
        shared = np.array([number], np.int64)
        self._comm.Bcast(shared, 0)
        return int(shared[0])

    def place_on_node(self) -> tuple[int, int, int]:
        """Return the first rank of this node, the local rank, and the number of local ranks.  Collective."""
        inside = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        leader = np.array([self.rank], np.int64)
        inside.Bcast(leader, 0)
        place = int(leader[0]), int(inside.rank), int(inside.size)
        inside.Free()
        return place

    def slowest(self, seconds: float) -> float:
        """Return the greatest number of all ranks.  Collective."""
        shared = np.array([seconds])
        self._comm.Allreduce(MPI.IN_PLACE, shared, MPI.MAX)
        return float(shared[0])

    def all_right(self, is_right: bool) -> bool:
        """Return whether every rank says so.  Collective."""
        return not self.slowest(float(not is_right))

    def barrier(self) -> None:
        """Wait for all ranks.  Collective."""
        self._comm.Barrier()

    def allreduce(self, buffer: Any) -> None:
        """Sum in place, as MPI does it.  Collective."""
        self._comm.Allreduce(MPI.IN_PLACE, buffer)

    def pass_on(self, mine: Any, theirs: Any) -> None:
        """Send a buffer, on whatever device it is, to the next rank, and get that of the one before.  Collective."""
        self._comm.Sendrecv(mine, (self.rank + 1) % self.size, recvbuf=theirs, source=(self.rank - 1) % self.size)

    def abort(self, status: int) -> None:
        """End the job."""
        sys.stdout.flush()
        self._comm.Abort(status)
