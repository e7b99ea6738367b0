"""The direct path: MPI gets the pointer to the device's memory, and reduces what is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.mpi.gpu.transports import ordered_keys
from mpistrategy.mpi.gpu.transports.staged import StagedPath
from mpistrategy.mpi.interface.gpu_transport import DevicePath, PathName, own_part
from mpistrategy.mpi.multi_node.reduced_precision import between_nodes


class DirectPath(DevicePath):
    """See `gpu_transport.DevicePath`; for a CUDA-aware MPI only: any other fails on the first pointer."""

    name: PathName = "mpi"

    def __init__(self) -> None:
        self._cupy = cupy_for("an array in GPU memory")
        self._staged = StagedPath()
        ordered_keys.compile_for(self._cupy)

    def make_room(self, nbytes: int) -> None:
        """Take what the staged path needs, which serves some operations; for all others MPI works in the buffer."""
        self._staged.make_room(nbytes)

    def by_host(self, ranks: Any, dtype: np.dtype[Any], op: str, wire: str | None = None) -> str:
        """Return why arrays of a dtype are combined on the host; "" where they are not."""
        return "" if between_nodes(ranks, wire, dtype, op) is None else "the wire's dtype is made on the host"

    def allreduce(
        self, ranks: Any, buffer: DeviceArray, op: str, wire: str | None = None, room: DeviceArray | None = None
    ) -> None:
        """Replace `buffer` by its combination over the ranks."""
        if self.by_host(ranks, buffer.dtype, op, wire):
            self._staged.allreduce(ranks, buffer, op, wire)
        else:
            self._combine(ranks, buffer, op, partial(ranks.allreduce_device_memory, op=op))

    def reduce(self, ranks: Any, buffer: DeviceArray, root: int, op: str) -> None:
        """Replace `buffer` on `root` by its combination over the ranks."""
        if self.by_host(ranks, buffer.dtype, op):
            self._staged.reduce(ranks, buffer, root, op)
        else:
            self._combine(ranks, buffer, op, partial(ranks.reduce, root=root, op=op))

    def bcast(self, ranks: Any, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by that of `root`."""
        self._wait(ranks)
        ranks.bcast(buffer, root)

    def allgather(self, ranks: Any, block: DeviceArray, counts: Sequence[int], together: DeviceArray) -> None:
        """Write all ranks' blocks into `together`."""
        place = together[own_part(ranks, counts)]
        if place.data.ptr != block.data.ptr:
            place[...] = block
        self._wait(ranks)
        ranks.allgatherv(None, counts, together)

    def _combine(self, ranks: Any, buffer: DeviceArray, op: str, combine: Callable[[DeviceArray], None]) -> None:
        """Call `combine` with the buffer; as keys for MIN and MAX of floats, of which MPI's may lose a NaN."""

        def waited(values: DeviceArray) -> None:
            self._wait(ranks)
            combine(values)

        if ordered_keys.are_for(buffer.dtype, op):
            ordered_keys.combine(self._cupy, buffer, op, waited)
        else:
            waited(buffer)

    def _wait(self, ranks: Any) -> None:
        """Wait until nothing on the current stream writes any buffer: MPI knows no streams."""
        event = self._cupy.cuda.Event(disable_timing=True)
        self._cupy.cuda.get_current_stream().record(event)
        with ranks.guard.own_gpu():
            event.synchronize()

    def free(self) -> None:
        """Give back the pinned memory."""
        self._staged.free()
