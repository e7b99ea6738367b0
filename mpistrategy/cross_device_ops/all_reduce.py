"""MpiAllReduce: one MPI Allreduce for each pack."""

from __future__ import annotations

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cross_device_ops.built_in import PackedCrossDeviceOps
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.plan import ChooseRoute, usual_route


class ByMpi(PackedCrossDeviceOps):
    """Base of the algorithms that leave arrays on the host to MPI as they are."""

    reduces_on_devices = True

    def choose_route(self) -> ChooseRoute:
        """Return what chooses the route to every rank."""
        return usual_route

    def reduce_buffer(
        self, communicator: Communicator, buffer: Array, op: str, destination: Destination, source: Array | None = None
    ) -> None:
        """Replace `buffer` by its combination over the ranks."""
        if destination.only_rank is None:
            communicator.allreduce(buffer, op, source)
        else:
            if source is not None:
                buffer[...] = source
            communicator.reduce(buffer, destination.only_rank, op)


class MpiAllReduce(ByMpi):
    """Sums with MPI Allreduce, or with MPI Reduce where only one rank wants the result.

    Small values are packed by dtype into buffers of at most `CommunicationOptions.bytes_per_pack` bytes.
    """

    in_rank_order = True
    has_plans = True
