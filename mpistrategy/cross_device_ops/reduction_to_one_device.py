"""ReductionToOneDevice: everything meets on one rank and is sent out again from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays import devices
from mpistrategy.arrays.dtypes import Array, dtype_name, host_wire_dtype
from mpistrategy.cross_device_ops.built_in import PackedCrossDeviceOps
from mpistrategy.errors import DTypeError, OptionTypeError, ShapeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.tuning.thresholds import Route
from mpistrategy.options import CommunicationOptions
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.destinations import Destination, ranks_of


class ReductionToOneDevice(PackedCrossDeviceOps):
    """Sums on one rank with MPI Reduce, then sends the result where it is wanted with MPI Bcast.

    Args:
        reduce_to_device: the rank that sums, as a device string such as ``"task:1"``; None means the destination
            where that is a single rank, else rank 0.
        accumulation_fn: called once for each value on the summing rank, with the list of all ranks' values in rank
            order; returns one array of the same shape.  None means the sum, in the order that the MPI chooses.
            MEAN divides by the number of replicas afterwards, whatever the function did.

    Raises:
        DeviceError: for a reduce_to_device that cannot be read.
        OptionTypeError: for an accumulation_fn that cannot be called.
    """

    def __init__(
        self, reduce_to_device: str | None = None, accumulation_fn: Callable[[list[Array]], Any] | None = None
    ) -> None:
        where = "ReductionToOneDevice"
        if reduce_to_device is not None:
            if not isinstance(reduce_to_device, str):
                raise OptionTypeError.at(
                    where, found=f"reduce_to_device={reduce_to_device!r}", expected="a device string"
                )
            devices.parse(reduce_to_device)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise OptionTypeError.at(
                where, found=f"accumulation_fn={accumulation_fn!r}", expected="a function of a list"
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    @property
    def configuration(self) -> str:
        """What must be equal on all ranks for their messages to fit together."""
        how = "sum" if self.accumulation_fn is None else "accumulation_fn"
        return f"{super().configuration}, {how} on {self.reduce_to_device}"

    def route(self, communicator: Communicator, nbytes: int, dtype: np.dtype[Any], op: str) -> Route:
        """Return "root", whatever the size."""
        return "root"

    def reduce_buffer(
        self, communicator: Communicator, buffer: Array, op: str, destination: Destination, source: Array | None = None
    ) -> None:
        """Replace `buffer` by its combination over the ranks."""
        if source is not None:
            buffer[...] = source
        root = self._root(communicator, destination)
        communicator.reduce(buffer, root, op)
        _send_out(communicator, buffer, root, destination)

    def reduce_arrays(
        self,
        communicator: Communicator,
        arrays: Sequence[Array],
        op: str,
        destination: Destination,
        options: CommunicationOptions,
        call: Call,
    ) -> list[Array]:
        """Return the sums, or what the accumulation function makes of the values."""
        if self.accumulation_fn is None:
            return super().reduce_arrays(communicator, arrays, op, destination, options, call)
        root = self._root(communicator, destination)
        results: list[Array] = [np.empty(0)] * len(arrays)
        for pack in packing.plan(arrays, options.bytes_per_pack, wire=host_wire_dtype):
            buffer = pack.fill(arrays)
            everyone = [np.empty_like(buffer) for _ in range(communicator.size)] if communicator.rank == root else None
            communicator.gatherv(buffer, everyone, root)
            # The function is the user's: if it raises on the summing rank, the others must not wait for its result.
            call.expect_more()
            if everyone is not None:
                self._accumulate(pack, everyone, buffer, arrays, call.where)
            call.agree("accumulated")
            _send_out(communicator, buffer, root, destination)
            for index, view in pack.views(buffer):
                results[index] = view
        return results

    def _root(self, communicator: Communicator, destination: Destination) -> int:
        if self.reduce_to_device is not None:
            return ranks_of(self.reduce_to_device, communicator, "ReductionToOneDevice(reduce_to_device=...)")[0]
        return destination.only_rank or 0

    def _accumulate(
        self, pack: packing.Pack, everyone: list[Array], buffer: Array, arrays: Sequence[Array], where: str
    ) -> None:
        assert self.accumulation_fn is not None
        by_rank = [pack.views(theirs) for theirs in everyone]
        for position, (index, target) in enumerate(pack.views(buffer)):
            values = [views[position][1].astype(arrays[index].dtype, copy=False) for views in by_rank]
            result = np.asarray(self.accumulation_fn(values))
            if result.shape != target.shape:
                raise ShapeError.at(
                    where,
                    found=f"shape {result.shape} returned by accumulation_fn",
                    expected=f"the shape {target.shape} of each value",
                )
            if not np.can_cast(result.dtype, target.dtype, "same_kind"):
                raise DTypeError.at(
                    where,
                    found=f"dtype {dtype_name(result.dtype)} returned by accumulation_fn",
                    expected=f"the dtype of each value, {dtype_name(arrays[index].dtype)}",
                )
            target[...] = result


def _send_out(communicator: Communicator, buffer: Array, root: int, destination: Destination) -> None:
    if destination.only_rank != root:
        communicator.bcast(buffer, root)
