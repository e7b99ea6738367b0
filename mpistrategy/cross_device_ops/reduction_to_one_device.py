"""ReductionToOneDevice: everything meets on one rank and is sent out again from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays import devices
from mpistrategy.arrays.dtypes import Array, divide_by, dtype_name
from mpistrategy.cross_device_ops.built_in import PackedCrossDeviceOps, Packs, by_one_rank
from mpistrategy.errors import DTypeError, OptionTypeError, ShapeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.objects.settings import Fixed
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.destinations import Destination, ranks_of
from mpistrategy.reduction.layout.packing import Pack
from mpistrategy.reduction.plan import ChooseRoute
from mpistrategy.reduction.routes.base import Description, Route, Targets, grouped
from mpistrategy.reduction.routes.communicator import described


class ReductionToOneDevice(PackedCrossDeviceOps):
    """Sums on one rank with MPI Reduce, then sends the result where it is wanted with MPI Bcast.

    Args:
        reduce_to_device: the rank that sums, as a device string such as ``"task:1"``; None means the destination
            where that is a single rank, the same for all values of a batch, else rank 0.
        accumulation_fn: called once for each value on the summing rank, with the list of all ranks' values in rank
            order; returns one array of the same shape.  None means the sum, in the order that the MPI chooses.
            MEAN divides by the number of replicas afterwards, whatever the function did.

    Raises:
        DeviceError: for a reduce_to_device that cannot be read.
        OptionTypeError: for an accumulation_fn that cannot be called.
    """

    _device_path: str | None = None
    _to_every_rank: ChooseRoute | None = None

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

    def _route(self, communicator: Communicator, packs: Packs, op: ReduceOp, destination: Destination) -> Route:
        """Return the route of packs: combined by MPI, or by the accumulation function."""
        root = destination.only_rank or 0
        if self.reduce_to_device is not None:
            root = ranks_of(self.reduce_to_device, communicator, "ReductionToOneDevice(reduce_to_device=...)")[0]
        if self.accumulation_fn is None:
            return by_one_rank(communicator, packs, op, root, destination)
        return _Accumulation(communicator, packs, op, self.accumulation_fn, root, destination)


class _Accumulation:
    """The route of values that a function of the program's puts together; see `mpistrategy.reduction.routes.base`."""

    def __init__(
        self,
        communicator: Communicator,
        packs: Packs,
        op: ReduceOp,
        function: Callable[[list[Array]], Any],
        root: int,
        destination: Destination,
    ) -> None:
        self.packs = packs
        self._communicator, self._op, self._function = communicator, op, function
        self._root, self._is_sent = root, destination.only_rank != root

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> None:
        """Pack this rank's arrays."""
        self._buffers = [pack.fill(arrays) for pack in self.packs]

    def run(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return what the function has made of all ranks' arrays."""
        communicator, results = self._communicator, [np.empty(0)] * len(arrays)
        ranks = range(communicator.size if communicator.rank == self._root else 0)
        with Call(communicator.guard, "ReductionToOneDevice") as call:
            for pack, buffer in zip(self.packs, self._buffers, strict=True):
                everyone = [np.empty_like(buffer) for _ in ranks]
                communicator.gatherv(buffer, everyone or None, self._root)
                # The function is the user's: if it raises on the summing rank, the others must not wait for its result.
                call.expect_more()
                if everyone:
                    self._accumulate(pack, everyone, buffer, arrays, call.where)
                call.agree("accumulated")
                if self._is_sent:
                    communicator.bcast(buffer, self._root)
                with np.errstate(all="ignore"):
                    divide_by(self._op._divisor(buffer.dtype, communicator.size), buffer)
                for index, view in pack.views(buffer):
                    results[index] = view
        return results

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        return [described(ranks, *group) for group in grouped(self.packs, ["root"] * len(self.packs), arrays)]

    def _accumulate(
        self, pack: Pack, everyone: list[Array], buffer: Array, arrays: Sequence[Array], where: str
    ) -> None:
        by_rank = [pack.views(theirs) for theirs in everyone]
        for position, (index, target) in enumerate(pack.views(buffer)):
            values = [views[position][1].astype(arrays[index].dtype, copy=False) for views in by_rank]
            result = np.asarray(self._function(values))
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
