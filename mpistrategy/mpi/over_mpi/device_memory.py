"""The collectives of a CUDA-aware MPI, which gets pointers to memory of a GPU.

Every buffer is contiguous, and no stream uses it; when a method returns, the result is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpistrategy.mpi.interface import buffers
from mpistrategy.objects.later import later

if TYPE_CHECKING:
    from mpistrategy.mpi.over_mpi.operations import operation
else:
    later(globals(), "mpistrategy.mpi.over_mpi.operations", "operation")


class DeviceMemory:
    """The part of a `Communicator` for memory of a GPU."""

    _comm: MPI.Intracomm
    rank: int
    max_count: int

    def allreduce_device_memory(self, buffer: Any, op: str) -> None:
        """Do `allreduce`."""
        for piece in buffers.pieces(buffer, self.max_count):
            self._comm.Allreduce(MPI.IN_PLACE, piece, operation(op, buffer.dtype))

    def reduce_device_memory(self, buffer: Any, root: int, op: str) -> None:
        """Do `reduce`."""
        for piece in buffers.pieces(buffer, self.max_count):
            if self.rank == root:
                self._comm.Reduce(MPI.IN_PLACE, piece, operation(op, buffer.dtype), root)
            else:
                self._comm.Reduce(piece, None, operation(op, buffer.dtype), root)

    def bcast_device_memory(self, buffer: Any, root: int) -> None:
        """Do `bcast`; any dtype."""
        for piece in buffers.pieces(buffers.as_bytes(buffer), self.max_count):
            self._comm.Bcast(piece, root)

    def allgather_device_memory(self, counts: Sequence[int], together: Any) -> None:
        """Do `allgatherv`; any dtype, and the own block is in its place."""
        sizes = [count * together.itemsize for count in counts]
        begins = [stop - size for stop, size in zip(accumulate(sizes), sizes, strict=True)]
        whole = buffers.as_bytes(together)
        for start in range(0, whole.size, self.max_count):
            stop = min(start + self.max_count, whole.size)
            first = np.clip(begins, start, stop)
            parts = np.clip(np.add(begins, sizes), start, stop) - first
            self._comm.Allgatherv(MPI.IN_PLACE, [whole[start:stop], parts, first - start, MPI.BYTE])
