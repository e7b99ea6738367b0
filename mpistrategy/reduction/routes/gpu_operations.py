"""What becomes of a buffer in GPU memory: who combines it, and who gets the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.options import ReduceOp
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


def _by_shares(path: DevicePath, ranks: Communicator, buffer: DeviceArray, op: str, wire: str | None) -> None:
    if path.name.startswith("ipc+"):  # it combines shares and gathers them, in each node
        path.allreduce(ranks, buffer, op, wire)
        return
    counts = [buffer.size // ranks.size + (rank < buffer.size % ranks.size) for rank in range(ranks.size)]
    first = sum(counts[: ranks.rank])
    path.reduce_scatter(ranks, buffer, counts, op)
    path.allgather(ranks, buffer[first : first + counts[ranks.rank]], counts, buffer)


#: To every rank, as the path does it best.
ALL_REDUCE: GpuOperation = GpuOperation(_all_reduce)
#: To every rank: each combines one share of the values, and all shares are gathered.
BY_SHARES: GpuOperation = GpuOperation(_by_shares, "each rank combines one share, and all gather them")


def combination(
    path: DevicePath, ranks: Communicator, op: ReduceOp, dtype: np.dtype[Any], wire: str | None = None
) -> tuple[str, int]:
    """Return as what a path combines buffers of a dtype (of the wire), and what is left to divide them by."""
    averages = getattr(path, "averages", None)
    if op is ReduceOp.MEAN and averages is not None and averages(ranks, dtype, wire):
        return "AVG", 1
    return op._on_the_wire, op._divisor(dtype, ranks.size)


def on_one_rank(root: int, destination: Destination) -> GpuOperation:
    """Return the operation that combines buffers on `root`, and sends them to others that want them."""
    sends = destination.only_rank != root

    def run(path: DevicePath, ranks: Communicator, buffer: DeviceArray, op: str, wire: str | None) -> None:
        path.reduce(ranks, buffer, root, op)
        if sends:
            path.bcast(ranks, buffer, root)

    return GpuOperation(run, f"combined on rank {root}{' and sent from there' if sends else ''}")
