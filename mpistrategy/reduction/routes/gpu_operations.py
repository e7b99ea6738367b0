"""What becomes of a buffer in GPU memory: who combines it, and who gets the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpistrategy.reduction.layout.destinations import Destination

if TYPE_CHECKING:
    from mpistrategy.arrays.gpu import DeviceArray
    from mpistrategy.mpi.interface.communicator import Communicator
    from mpistrategy.mpi.interface.gpu_transport import DevicePath


@dataclass(frozen=True)
class GpuOperation:
    """An operation of a path.

    Attributes:
        root: the rank that combines buffers; None: all ranks do, as the path does it best, and all get the result.
        sends: whether `root` sends the result to the others.
    """

    root: int | None = None
    sends: bool = False

    def run(
        self,
        path: DevicePath,
        ranks: Communicator,
        buffer: DeviceArray,
        op: str,
        wire: str | None,
        room: DeviceArray | None,
    ) -> None:
        """Combine a buffer, on agreed ranks; `wire` and `room` are those of `DevicePath.allreduce`."""
        if self.root is None:
            path.allreduce(ranks, buffer, op, wire, room)
            return
        path.reduce(ranks, buffer, self.root, op)
        if self.sends:
            path.bcast(ranks, buffer, self.root)

    @property
    def text(self) -> str:
        """What is special about it, for `Strategy.explain`."""
        if self.root is None:
            return ""
        return f"combined on rank {self.root}{' and sent from there' if self.sends else ''}"


ALL_REDUCE: GpuOperation = GpuOperation()


def on_one_rank(root: int, destination: Destination) -> GpuOperation:
    """Return the operation that combines buffers on `root`, and sends them to others that want them."""
    return GpuOperation(root, sends=destination.only_rank != root)
