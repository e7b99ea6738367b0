"""The direct path: MPI gets the pointer to the device's memory, and reduces what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.mpi.gpu.transports import ordered_keys
from mpistrategy.mpi.interface.gpu_transport import DevicePath, PathName


class DirectPath(DevicePath):
    """See `gpu_transport.DevicePath`; for a CUDA-aware MPI only: any other fails on the first pointer.

    A wire has no effect: MPI sends all digits.
    """

    name: PathName = "mpi"

    def __init__(self) -> None:
        self._cupy = cupy_for("an array in GPU memory")
        ordered_keys.compile_for(self._cupy)

    def reduce(
        self,
        ranks: Any,
        buffer: DeviceArray,
        op: str,
        root: int | None = None,
        wire: str | None = None,
    ) -> None:
        """Replace `buffer` by its combination over the ranks, on `root` or on all."""
        with ordered_keys.in_order(self._cupy, buffer, op) as values:
            self._wait(ranks)
            ranks.reduce(values, root, op)

    def bcast(self, ranks: Any, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by that of `root`."""
        self._wait(ranks)
        ranks.bcast(buffer, root)

    def allgather(self, ranks: Any, block: DeviceArray, counts: Sequence[int], together: DeviceArray) -> None:
        """Write all ranks' blocks into `together`."""
        super().allgather(ranks, block, counts, together)
        self._wait(ranks)
        ranks.allgatherv(None, counts, together)

    def _wait(self, ranks: Any) -> None:
        """Wait until nothing on the current stream writes any buffer: MPI knows no streams."""
        event = self._cupy.cuda.Event(disable_timing=True)
        self._cupy.cuda.get_current_stream().record(event)
        with ranks.guard.own_gpu():
            event.synchronize()
