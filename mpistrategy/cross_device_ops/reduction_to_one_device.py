"""ReductionToOneDevice: everything meets on one rank and is sent out again from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrategy.arrays import devices
from mpistrategy.arrays.dtypes import Array, host_wire_dtype
from mpistrategy.cross_device_ops.accumulation import AccumulationRoute
from mpistrategy.cross_device_ops.built_in import PackedCrossDeviceOps, by_one_rank
from mpistrategy.errors import OptionTypeError
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.objects.settings import Fixed
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.destinations import Destination, ranks_of
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.plan import Plan
from mpistrategy.reduction.routes.base import Route

if TYPE_CHECKING:
    from mpistrategy.reduction.routes.gpu_operations import GpuOperation


class ReductionToOneDevice(PackedCrossDeviceOps):
    """Sums on one rank with MPI Reduce, then sends the result where it is wanted with MPI Bcast.

    Args:
        reduce_to_device: the rank that sums, as a device string such as ``"task:1"``; None means the destination
            where that is a single rank, the same for all values of a batch, else rank 0.
        accumulation_fn: called once for each value on the summing rank, with the list of all ranks' values in rank
            order; returns one array of the same shape.  None means the sum, in the order that the MPI chooses.
            MEAN divides by the number of replicas afterwards, whatever the function did.  The summing rank holds all
            ranks' copies of one value at a time.

    Raises:
        DeviceError: for a reduce_to_device that cannot be read.
        OptionTypeError: for an accumulation_fn that cannot be called.
    """

    reduce_to_device: Fixed[str | None] = Fixed()
    accumulation_fn: Fixed[Callable[[list[Array]], Any] | None] = Fixed()

    def __init__(
        self, reduce_to_device: str | None = None, accumulation_fn: Callable[[list[Array]], Any] | None = None
    ) -> None:
        where = "ReductionToOneDevice"
        if reduce_to_device is not None:
            if not isinstance(reduce_to_device, str):
                raise OptionTypeError.at(
                    where, found=f"reduce_to_device={reduce_to_device!r}", expected="a device string"
                )
            devices.parse(reduce_to_device, where, "reduce_to_device")
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise OptionTypeError.at(
                where, found=f"accumulation_fn={accumulation_fn!r}", expected="a function of a list"
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    @property
    def _configuration(self) -> str:
        """What must be equal on all ranks for their messages to fit together."""
        how = "sum" if self.accumulation_fn is None else "accumulation_fn"
        return f"{super()._configuration}, {how} on {self.reduce_to_device}"

    def _plan_for(
        self,
        ranks: Communicator,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Plan | None:
        """Return how arrays on the host are reduced; None for an accumulation, the program's own code."""
        return None if self.accumulation_fn is not None else super()._plan_for(ranks, layouts, op, options, destination)

    def _gpu_operation(self, communicator: Communicator, destination: Destination) -> GpuOperation | None:
        """Return how arrays in GPU memory are combined; None for an accumulation function: on the host."""
        from mpistrategy.reduction.routes.gpu_operations import on_one_rank  # here, for the quick import

        if self.accumulation_fn is not None:
            return None
        return on_one_rank(self._root(communicator, destination), destination)

    def _root(self, communicator: Communicator, destination: Destination) -> int:
        """Return the rank that sums."""
        if self.reduce_to_device is None:
            return destination.only_rank or 0
        return ranks_of(self.reduce_to_device, communicator, "ReductionToOneDevice(reduce_to_device=...)")[0]

    def _route(
        self,
        ranks: Communicator,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        bytes_per_pack: float,
        wire: str | None,
        destination: Destination,
    ) -> Route:
        """Return the route of arrays: combined by MPI, or one by one by the accumulation function."""
        root = self._root(ranks, destination)
        if self.accumulation_fn is None:
            return by_one_rank(ranks, self._packs(layouts, bytes_per_pack), op, root, destination)
        one_by_one = tuple(
            pack for index in range(len(layouts)) for pack in packing.plan(layouts, 0, 0, host_wire_dtype, (index,))
        )
        return AccumulationRoute(ranks, one_by_one, op, self.accumulation_fn, root, destination)
