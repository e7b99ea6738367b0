"""The direct path: MPI gets the pointer to the device's memory, and reduces what is there."""

from __future__ import annotations

from typing import Any

from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.mpi.gpu.transports.staged import StagedPath
from mpistrategy.mpi.interface.gpu_transport import PathName


class DirectPath:
    """See `gpu_transport.DevicePath`; for a CUDA-aware MPI only: any other fails on the first pointer."""

    name: PathName = "mpi"

    def __init__(self) -> None:
        self._cupy = cupy_for("an array in GPU memory")
        self._staged = StagedPath()

    def make_room(self, nbytes: int) -> None:
        """Take what the staged path needs, which serves some operations; for all others MPI works in the buffer."""
        self._staged.make_room(nbytes)

    def allreduce(self, ranks: Any, buffer: DeviceArray, op: str) -> None:
        """Replace `buffer` by its combination over the ranks.

        MPI's MIN and MAX may lose a NaN, and an operation of ours would get pointers that it cannot follow; a
        communicator that rounds what travels works on the host, too.
        """
        if (op in ("MIN", "MAX") and buffer.dtype.kind == "f") or getattr(ranks, "rounds", False):
            self._staged.allreduce(ranks, buffer, op)
            return
        # MPI knows no streams: whatever still writes the buffer must be done first.  When a blocking call returns, the
        # result is there.
        event = self._cupy.cuda.Event(disable_timing=True)
        self._cupy.cuda.get_current_stream().record(event)
        with ranks.guard.own_gpu():
            event.synchronize()
        ranks.allreduce_device_memory(buffer, op)

    def free(self) -> None:
        """Give back the pinned memory."""
        self._staged.free()
