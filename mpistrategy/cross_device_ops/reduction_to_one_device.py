"""ReductionToOneDevice: everything meets on one rank and is sent out again from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays import devices
from mpistrategy.arrays.dtypes import Array, divide_by, dtype_name
from mpistrategy.cross_device_ops.built_in import PackedCrossDeviceOps
from mpistrategy.errors import DTypeError, OptionTypeError, ShapeError
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.settings import Fixed
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.destinations import Destination, ranks_of
from mpistrategy.reduction.layout.packing import Layout, Pack
from mpistrategy.reduction.routes.base import Transfer
from mpistrategy.reduction.routes.communicator import CommunicatorRoute


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
        self.reduce_to_device, self.accumulation_fn = reduce_to_device, accumulation_fn
        self._by_host = accumulation_fn is not None

    @property
    def _configuration(self) -> str:
        """The settings that must be equal on all ranks for their messages to fit together."""
        how = "sum" if self.accumulation_fn is None else "accumulation_fn"
        return f"{super()._configuration}, {how} on {self.reduce_to_device}"

    @property
    def _has_plans(self) -> bool:
        """Whether arrays are reduced by a plan; an accumulation is the program's own code."""
        return self.accumulation_fn is None and super()._has_plans

    def _root(self, ranks: Ranks, destination: Destination) -> int:
        """Return the rank that combines."""
        if self.reduce_to_device is None:
            return destination.only_rank or 0
        return ranks_of(self.reduce_to_device, ranks, "ReductionToOneDevice(reduce_to_device=...)")[0]

    def _route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Transfer:
        """Return the route of arrays: combined by MPI, or one by one by the accumulation function."""
        if self.accumulation_fn is None:
            return super()._route(ranks, layouts, op, options, destination)
        one_by_one, root = packing.plan(layouts, alone_bytes=0), self._root(ranks, destination)
        return AccumulationRoute(
            ranks, one_by_one, op, self.accumulation_fn, root, is_sent=destination.only_rank != root
        )


class AccumulationRoute(CommunicatorRoute):
    """All ranks' copies of a value meet on one rank, where a function of the program's puts them together.

    Args:
        ranks: the ranks that take part.
        packs: the buffers, one for each value.
        op: MEAN divides the function's result.
        function: gets all ranks' arrays in rank order, and returns an array.
        root: the rank that calls it.
        is_sent: whether others want the results.
    """

    def __init__(
        self,
        ranks: Ranks,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        function: Callable[[list[Array]], object],
        root: int,
        *,
        is_sent: bool,
    ) -> None:
        super().__init__(ranks, packs, op, "root")
        self._function, self._root, self._is_sent = function, root, is_sent

    def run(self, arrays: Sequence[Array], memory: list[tuple[Array, Array]]) -> list[Array]:
        """Return the function's results for all ranks' arrays, value after value."""
        for array, (source, result) in zip(arrays, memory, strict=True):
            result.reshape(-1)[...] = source
            self._combine_at_root(array.dtype, result)
        return [result for _, result in memory]

    def _combine_at_root(self, dtype: np.dtype[Any], result: Array) -> None:
        ranks = self._ranks
        # The function may keep its arguments.  If it raises, the other ranks must not wait for its result.
        gathered = ranks.guard.on_all(partial(self._room, result))
        ranks.gatherv(result.reshape(-1), [result.size] * ranks.size, gathered, self._root)
        dtype = result.dtype if result.dtype.kind in "iu" else dtype
        ranks.guard.on_all(partial(self._accumulate, gathered, dtype, result))
        if self._is_sent:
            ranks.bcast(result.reshape(-1), self._root)
        with np.errstate(all="ignore"):
            divide_by(self._divisors[result.dtype], result)

    def _room(self, array: Array) -> Array | None:
        is_root = self._ranks.rank == self._root
        return np.empty((self._ranks.size, *array.shape), array.dtype) if is_root else None

    def _accumulate(self, gathered: Array | None, dtype: np.dtype[Any], target: Array) -> None:
        """Write the function's result for all ranks' copies, which it gets in `dtype`, into `target`."""
        if gathered is None:
            return
        copies = gathered.astype(dtype, copy=False)
        result = np.asarray(self._function([copies[rank, ...] for rank in range(len(copies))]))
        where = "ReductionToOneDevice"
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
                expected=f"the dtype of each value, {dtype_name(dtype)}",
            )
        target[...] = result
