"""All ranks of the job, by mpi4py alone: the doctor examines jobs that the library refuses, bench is its reference."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.objects.text import decoded, encoded

_TEXT = 71
_NAP_SECONDS = 1e-3
_COUNT = 2**20


class Ranks:
    """All ranks; making it starts MPI.  Nothing collective happens before `collect` has seen that all are there.

    Attributes:
        comm: their communicator.
        rank, size: the number of this rank, and how many ranks there are.
        version, mpi4py: the MPI library's version text, and mpi4py's.
        thread_level: what MPI was started with, in a word.
    """

    def __init__(self) -> None:
        from mpi4py import MPI, __version__  # here, since it starts MPI

        self._mpi: Any = MPI
        self.comm: Any = MPI.COMM_WORLD
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        self.version: str = str(MPI.Get_library_version())
        self.mpi4py: str = __version__
        levels = {
            MPI.THREAD_SINGLE: "single",
            MPI.THREAD_FUNNELED: "funneled",
            MPI.THREAD_SERIALIZED: "serialized",
            MPI.THREAD_MULTIPLE: "multiple",
        }
        self.thread_level: str = levels[MPI.Query_thread()]

    def collect(self, text: str, seconds: float) -> dict[int, str]:
        """Return the texts of all ranks that arrived in time on rank 0; elsewhere only the own text."""
        texts = {self.rank: text}
        if self.rank:
            self.comm.Send(np.frombuffer(encoded(text), np.uint8), 0, _TEXT)
            return texts
        end, status = time.monotonic() + seconds, self._mpi.Status()
        while len(texts) < self.size and time.monotonic() < end:
            if not self.comm.Iprobe(self._mpi.ANY_SOURCE, _TEXT, status):
                time.sleep(_NAP_SECONDS)
                continue
            letters = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self.comm.Recv(letters, status.Get_source(), _TEXT)
            texts[status.Get_source()] = decoded(letters.data)
        return texts

    def from_first(self, number: int) -> int:
        """Return rank 0's number, which is not negative.  Collective."""
        return int(self.greatest(np.array([0 if self.rank else number]))[0])

    def places(self) -> tuple[list[int], int]:
        """Return the first rank of each rank's node, and this rank's index on its own node.  Collective."""
        node = self.comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        leader, place = np.array([self.rank], np.int64), int(node.rank)
        node.Bcast(leader, 0)
        node.Free()
        leaders = np.empty(self.size, np.int64)
        self.comm.Allgather(leader, leaders)
        return leaders.tolist(), place

    def greatest(self, values: Array) -> Array:
        """Return the element-wise greatest numbers of all ranks.  Collective."""
        shared = np.array(values)
        self.comm.Allreduce(self._mpi.IN_PLACE, shared, self._mpi.MAX)
        return shared

    def slowest(self, seconds: float) -> float:
        """Return the greatest number of all ranks.  Collective."""
        return float(self.greatest(np.array([seconds]))[0])

    def all_right(self, is_right: bool) -> bool:
        """Return whether every rank says so.  Collective."""
        return not self.slowest(float(not is_right))

    def add_up_right(self) -> bool:
        """Return whether every rank gets the right sum of known numbers from this library.  Collective."""
        from mpistrategy.mpi.over_mpi.ranks import MpiRanks  # here, since it starts MPI

        pattern = np.resize(np.arange(251, dtype=np.float32), _COUNT)
        total = np.empty_like(pattern)
        communicator = MpiRanks()
        try:
            communicator.allreduce(total, source=pattern + np.float32(self.rank))
        finally:
            communicator.free()
        expected = pattern * self.size + self.size * (self.size - 1) / 2
        return self.all_right(bool((total == expected).all()))
