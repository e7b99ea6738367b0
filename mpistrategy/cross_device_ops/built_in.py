"""The pipeline that every built-in algorithm shares: convert, agree, pack, sum, unpack, divide, wrap.

A subclass says only how one contiguous buffer is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, dtype_name, host_wire_dtype
from mpistrategy.arrays.gpu import layout_of
from mpistrategy.arrays.values import IndexedSlices, Mirrored
from mpistrategy.cross_device_ops.base import CrossDeviceOps, current_communicator, mirrored
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node import reduced_precision
from mpistrategy.mpi.tuning.thresholds import RouteName
from mpistrategy.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpistrategy.reduction import sparse
from mpistrategy.reduction.inputs import checked_value, own_component
from mpistrategy.reduction.layout import destinations as placing
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.destinations import EVERY_RANK, Destination
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.plan import ChooseRoute, Plan, plan_of
from mpistrategy.reduction.routes.communicator import CommunicatorRoute
from mpistrategy.reduction.routes.gpu_batch import DeviceBatch, in_kind


class PackedCrossDeviceOps(CrossDeviceOps):
    """Base of the algorithms that sum one buffer at a time."""

    is_built_in = True
    num_packs: float = 0
    #: Whether arrays in GPU memory are reduced on the strategy's path for them; else they travel by way of the host.
    reduces_on_devices = False
    #: The path to ask for; "" leaves it to the options.
    device_path = ""

    @property
    def configuration(self) -> str:
        """What must be equal on all ranks for their messages to fit together."""
        return f"{type(self).__name__}, num_packs={self.num_packs}"

    def settings(self, options: CommunicationOptions) -> str:
        """Return the configuration and the options of one call, as far as they shape the messages."""
        shown = f"{self.configuration}, bytes_per_pack={options.bytes_per_pack}, wire={options.wire}"
        chosen: Any = options.implementation
        return shown if chosen is CommunicationImplementation.AUTO else f"{shown}, implementation={chosen.name}"

    def route(self, communicator: Communicator, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return the route that `reduce_buffer` takes with a buffer for every rank."""
        return communicator.route(nbytes, dtype, op)

    def choose_route(self) -> ChooseRoute | None:
        """Return what chooses the route to every rank; None leaves it to `reduce_buffer`."""
        return None

    def plan(
        self,
        communicator: Communicator,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
        call: Call | None = None,
    ) -> Plan:
        """Return how arrays on the host with these layouts are reduced; their results count on the destination's ranks.

        Args:
            call: the call that they are reduced in; None when nothing is sent.
        """
        if destination is EVERY_RANK and (choose := self.choose_route()) is not None:
            return plan_of(communicator, layouts, op, options.bytes_per_pack, choose)
        packs = packing.plan(layouts, options.bytes_per_pack, self.num_packs, host_wire_dtype)
        names = [self.route(communicator, pack.nbytes, pack.dtype, op.on_the_wire) for pack in packs]

        def reduce_pair(source: Array, target: Array) -> None:
            brought = None if source is target else source
            self.reduce_buffer(communicator, target, op.on_the_wire, destination, brought)

        return Plan(communicator, layouts, op, CommunicatorRoute(communicator, packs, op, names, reduce_pair))

    def reduce_buffer(
        self, communicator: Communicator, buffer: Array, op: str, destination: Destination, source: Array | None = None
    ) -> None:
        """Replace `buffer` by its combination over the ranks, at least on the destination's ranks.

        Args:
            communicator: the ranks.
            buffer: flat and contiguous, in the wire dtype.
            op: "SUM", "MIN", "MAX" or "PROD".
            destination: the ranks that want the result.
            source: what this rank brings, flat, where that is not in `buffer`; stays as it is.
        """
        raise NotImplementedError

    def check_values(self, values: Sequence[Any], op: ReduceOp, where: str) -> None:
        """Raise for what this algorithm, unlike others, cannot reduce; before the ranks agree on the call."""

    def reduce_slices(
        self, communicator: Communicator, slices: IndexedSlices, op: ReduceOp, call: Call
    ) -> IndexedSlices:
        """Return the reduction of IndexedSlices, on every rank: all ranks' rows in rank order."""
        return sparse.concatenate(communicator, slices, op, call)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduce one value as a batch of one."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values: one check for all of them, then one message for each pack."""
        communicator = current_communicator(f"{type(self).__name__}.batch_reduce")
        with Call(communicator.guard, f"{type(self).__name__}.batch_reduce") as call:
            values = [value for value, _ in value_destination_pairs]
            targets = [placing.resolve(d, communicator, call.where) for _, d in value_destination_pairs]
            results = self._reduce(call, communicator, reduce_op, values, targets, options)
            return [mirrored(result, target, communicator) for result, target in zip(results, targets, strict=True)]

    def all_reduce_values(
        self, call: Call, communicator: Communicator, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Reduce to every rank; what a subclass has overridden is called."""
        mine, usual = type(self), PackedCrossDeviceOps
        if (mine.batch_reduce, mine.batch_reduce_implementation) != (
            usual.batch_reduce,
            usual.batch_reduce_implementation,
        ):
            return super().all_reduce_values(call, communicator, op, values, options)
        return self._reduce(call, communicator, op, values, [EVERY_RANK] * len(values), options)

    def _reduce(
        self,
        call: Call,
        ranks: Communicator,
        op: ReduceOp,
        given: Sequence[Any],
        targets: Sequence[Destination],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Return the reductions in the kinds of array that were given; None on ranks that are no destination."""
        reduced_precision.check(options.wire)
        communicator: Communicator = reduced_precision.on(ranks, options.wire)
        given = [own_component(value, op, call.where) for value in given]
        values = [checked_value(value, op, call.where) for value in given]
        self.check_values(values, op, call.where)
        layouts = tuple(map(_layout, values))
        batch = None
        if any(map(is_on_device, values)):
            everywhere = all(target is EVERY_RANK for target in targets)
            path = self.device_path if self.reduces_on_devices and everywhere else None
            batch = DeviceBatch(ranks, values, op, options, path, self.num_packs, call.where)
            values = batch.values
        plans = []
        for target in dict.fromkeys(targets):
            dense = [i for i, v in enumerate(values) if targets[i] == target and isinstance(v, np.ndarray)]
            if dense:
                arrays = [values[i] for i in dense]
                plan = self.plan(communicator, packing.layouts_of(arrays), op, options, target, call)
                plan.bring(arrays)
                plans.append((target, dense, arrays, plan))
        destination, settings = _in_words(targets), self.settings(options)
        call.agree("reduce", op=op.value, values=layouts, destination=destination, options=settings, sparingly=True)
        results: list[Any] = [None] * len(values)
        # Plans first: what is in the mailboxes is there until the next exchange, and a GPU path may begin with one.
        for target, dense, arrays, plan in plans:
            totals = plan.run(arrays)
            if target.includes(communicator.rank):
                for i, total in zip(dense, totals, strict=True):
                    results[i] = total
        if batch is not None:
            on_devices = batch.run(communicator, call)
            results = [total if found is None else found for total, found in zip(results, on_devices, strict=True)]
        for i, value in enumerate(values):
            if isinstance(value, IndexedSlices):
                results[i] = self.reduce_slices(communicator, value, op, call)
            elif isinstance(value, Mirrored):
                results[i] = value.values[0] if value.values else None
        return [in_kind(result, like) for result, like in zip(results, given, strict=True)]


def _layout(value: Any) -> tuple[str, tuple[int, ...]]:
    if isinstance(value, IndexedSlices):
        return sparse.layout(value)
    if isinstance(value, Mirrored):
        return ("Mirrored", ())
    return layout_of(value) if is_on_device(value) else (dtype_name(value.dtype), value.shape)


def _in_words(targets: Sequence[Destination]) -> str:
    distinct = dict.fromkeys(targets)
    return next(iter(distinct)).text if len(distinct) == 1 else "; ".join(target.text for target in targets)
