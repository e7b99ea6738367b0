"""What becomes of a buffer in GPU memory: who combines it, and who gets the result."""

from __future__ import annotations

from collections.abc import Callable
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
        run: combines a buffer on agreed ranks: ``run(path, ranks, buffer, op, wire)``.
        text: what is special about it, for `Strategy.explain`.
    """

    run: Callable[[DevicePath, Communicator, DeviceArray, str, str | None], None]
    text: str = ""


def _all_reduce(path: DevicePath, ranks: Communicator, buffer: DeviceArray, op: str, wire: str | None) -> None:
    path.allreduce(ranks, buffer, op, wire)


#: To every rank, as the path does it best.
ALL_REDUCE: GpuOperation = GpuOperation(_all_reduce)


def on_one_rank(root: int, destination: Destination) -> GpuOperation:
    """Return the operation that combines buffers on `root`, and sends them to others that want them."""
    sends = destination.only_rank != root

    def run(path: DevicePath, ranks: Communicator, buffer: DeviceArray, op: str, wire: str | None) -> None:
        path.reduce(ranks, buffer, root, op)
        if sends:
            path.bcast(ranks, buffer, root)

    return GpuOperation(run, f"combined on rank {root}{' and sent from there' if sends else ''}")
