"""The algorithms that leave sums to the communicator, and the pipeline that every built-in algorithm shares.

The pipeline: convert, agree, pack, sum, unpack, divide, wrap.  A subclass only chooses the routes of its packs,
unless it takes the usual routes, as MpiAllReduce does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import layout_of, to_host
from mpistrategy.arrays.values import IndexedSlices, Mirrored, event_of_reads
from mpistrategy.cross_device_ops.base import CrossDeviceOps, mirrored
from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node import reduced_precision
from mpistrategy.options import CommunicationOptions, ReduceOp, path_word
from mpistrategy.reduction.collectives import concatenate
from mpistrategy.reduction.inputs import checked_value, in_kind, layout_of_slices, own_component
from mpistrategy.reduction.layout import destinations as placing
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.destinations import EVERY_RANK, Destination
from mpistrategy.reduction.layout.packing import Layout, Pack
from mpistrategy.reduction.plan import Plan, summed, usual_route
from mpistrategy.reduction.routes.base import Description, Transfer
from mpistrategy.reduction.routes.communicator import CommunicatorRoute
from mpistrategy.reduction.routes.gpu import GpuRoute, gpu_packs

#: What a subclass may override; its values have no plans then.
_OVERRIDABLE = ("reduce", "reduce_implementation", "batch_reduce", "batch_reduce_implementation")


class PackedCrossDeviceOps(CrossDeviceOps):
    """Base of the algorithms that reduce packs of arrays."""

    #: Whether arrays in GPU memory are combined on the host.
    _by_host: bool = False

    @property
    def num_packs(self) -> float:
        """About how many packs values are split into; 0 leaves it to bytes_per_pack.  Set by the constructor."""
        return self._num_packs

    def _set_num_packs(self, num_packs: Any) -> None:
        is_number = isinstance(num_packs, (int, float)) and not isinstance(num_packs, bool)
        if not is_number or not 0 <= num_packs < math.inf:
            error = OptionError if is_number else OptionTypeError
            raise error.at(type(self).__name__, found=f"num_packs={num_packs!r}", expected="an int >= 0")
        self._num_packs = num_packs

    @cached_property
    def _configuration(self) -> str:
        """The settings that must be equal on all ranks for their messages to fit together."""
        return f"{type(self).__name__}, num_packs={self._num_packs}"

    def _plan(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Plan:
        """Return how arrays on the host are reduced; the results count on the destination's ranks."""
        reduced_precision.check(options.wire)
        self._check_dtypes((dtype for dtype, _ in layouts), op)
        return Plan(ranks, layouts, op, self._route(ranks, summed(layouts, op), op, options, destination))

    def _route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Transfer:
        """Return the route of arrays: by MPI's Reduce to the rank that combines, else the fastest to every rank."""
        root = self._root(ranks, destination)
        if root is None:
            return usual_route(ranks, layouts, op, options.bytes_per_pack, options.wire)
        reduce_pair = partial(_by_one_rank, ranks, op._on_the_wire, root, is_sent=destination.only_rank != root)
        return CommunicatorRoute(ranks, self._packs(layouts, options.bytes_per_pack), op, "root", reduce_pair)

    def _root(self, ranks: Ranks, destination: Destination) -> int | None:
        """Return the rank that combines; None: all ranks combine."""
        return destination.only_rank

    def _packs(self, layouts: tuple[Layout, ...], bytes_per_pack: float) -> tuple[Pack, ...]:
        return packing.plan(layouts, bytes_per_pack, self._num_packs)

    def _gpu_route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> GpuRoute | None:
        """Return how arrays in GPU memory are reduced there; None where the host does it."""
        if self._by_host:
            return None
        reduced_precision.check(options.wire)
        packs, root = gpu_packs(layouts, options.bytes_per_pack, self.num_packs), self._root(ranks, destination)
        word, sends = path_word(options, self._device_path), destination.only_rank != root
        return GpuRoute(ranks, packs, op, word, options.wire, root, sends=sends)

    def _check_dtypes(self, dtypes: Iterable[np.dtype[Any]], op: ReduceOp) -> None:
        """Raise for dtypes that this algorithm, unlike others, cannot reduce; before the ranks agree on the call."""

    def _reduce_slices(self, ranks: Ranks, slices: IndexedSlices, op: ReduceOp) -> IndexedSlices:
        """Return the reduction of IndexedSlices, on every rank: all ranks' rows in rank order."""
        return concatenate(ranks, slices, op)

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
        communicator, call = self._call("batch_reduce")
        with call:
            values = [value for value, _ in value_destination_pairs]
            targets = [placing.resolve(d, communicator, call.where) for _, d in value_destination_pairs]
            results = self._reduce(call, communicator, reduce_op, values, targets, options)
            return [mirrored(result, target, communicator) for result, target in zip(results, targets, strict=True)]

    def _all_reduce_values(
        self,
        call: Call,
        communicator: Ranks,
        op: ReduceOp,
        values: Sequence[Any],
        options: CommunicationOptions,
        outs: Sequence[Any] | None = None,
        *,
        is_batch: bool = True,
    ) -> list[Any]:
        """Reduce to every rank; calls a subclass's own methods."""
        if not self._has_plans:
            return super()._all_reduce_values(call, communicator, op, values, options, is_batch=is_batch)
        return self._reduce(call, communicator, op, values, [EVERY_RANK] * len(values), options, outs)

    @property
    def _has_plans(self) -> bool:
        """Whether no subclass has overridden a method that reduces."""
        return all(getattr(type(self), name) is getattr(PackedCrossDeviceOps, name) for name in _OVERRIDABLE)

    def _parts(
        self,
        ranks: Ranks,
        op: ReduceOp,
        values: Sequence[Any],
        target: Destination,
        options: CommunicationOptions,
        where: str,
    ) -> tuple[list[tuple[Any, list[int]]], list[Any]]:
        """Return transfers, with the indices of the values that each transfer reduces; and the values as they travel.

        Data in the mailboxes last until the next exchange, and a GPU path may begin with one: the plan is first.
        """
        gpu_indices = [i for i, value in enumerate(values) if is_on_device(value)]
        operands = list(values)
        parts: list[tuple[Any, list[int]]] = []
        if gpu_indices:
            arrays = [values[i] for i in gpu_indices]
            route = self._gpu_route(ranks, packing.layouts_of(arrays), op, options, target)
            if route is None:
                operands = [to_host(value) if is_on_device(value) else value for value in values]
            else:
                parts = [(route, gpu_indices)]
        dense = [i for i, value in enumerate(operands) if isinstance(value, np.ndarray)]
        plan = self._plan(ranks, packing.layouts_of([operands[i] for i in dense]), op, options, target)
        return [(plan, dense), *parts], operands

    def _explanation(
        self, ranks: Ranks, op: ReduceOp, leaves: Sequence[Any], options: CommunicationOptions
    ) -> tuple[list[Description], list[str]]:
        """Return the buffers' descriptions for `Strategy.explain`, and lines about values in no buffer."""
        where = "Strategy.explain"
        values = [checked_value(own_component(value, op, where), op, where) for value in leaves]
        parts, operands = self._parts(ranks, op, values, EVERY_RANK, options, where)
        descriptions = [
            description
            for transfer, indices in parts
            for description in transfer.describe([operands[i] for i in indices])
        ]
        by_host = [is_on_device(value) and not is_on_device(to) for value, to in zip(values, operands, strict=True)]
        counts = {
            "IndexedSlices: gathered on all ranks": sum(isinstance(value, IndexedSlices) for value in values),
            "Mirrored: the same everywhere, nothing is sent": sum(isinstance(value, Mirrored) for value in values),
            "on a GPU: copied to the host, reduced as others are, and copied back": sum(by_host),
        }
        return descriptions, [f"{count} {note}" for note, count in counts.items() if count]

    def _reduce(
        self,
        call: Call,
        ranks: Ranks,
        op: ReduceOp,
        components: Sequence[Any],
        targets: Sequence[Destination],
        options: CommunicationOptions,
        outs: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return the reductions in the kinds of the inputs; None on ranks that are no destination.

        Args:
            outs: for each value an array that its result may be written to; used only where that saves a copy.
        """
        components = [own_component(value, op, call.where) for value in components]
        values = [checked_value(value, op, call.where) for value in components]
        layouts, texts = tuple(map(_layout, values)), [place.text for place in targets]
        # Values that go to different ranks are sent to all of them.
        is_one = len(set(targets)) == 1
        target, destination = (targets[0], texts[0]) if is_one else (EVERY_RANK, "; ".join(texts))
        parts, values = self._parts(ranks, op, values, target, options, call.where)
        memory = []
        for transfer, indices in parts:
            arrays = [values[i] for i in indices]
            if outs is None or isinstance(transfer, Plan):
                memory.append(transfer.bring(arrays))
            else:
                memory.append(transfer.bring(arrays, transfer.own_results(arrays, [outs[i] for i in indices])))
        read = event_of_reads(component for component in components if is_on_device(component))
        # MPI and NCCL get pointers to GPU memory only from ranks that are known to make the same call.
        is_on_host = len(parts) == 1
        settings = self._settings(options)
        call.agree(
            "reduce", op=op.value, values=layouts, destination=destination, options=settings, sparingly=is_on_host
        )
        results: list[Any] = [None] * len(values)
        for (transfer, indices), room in zip(parts, memory, strict=True):
            for i, total in zip(indices, transfer.run([values[i] for i in indices], room), strict=True):
                results[i] = total if target.includes(ranks.rank) else None
        for i, value in enumerate(values):
            if isinstance(value, IndexedSlices):
                results[i] = self._reduce_slices(ranks, value, op)
                read = event_of_reads([components[i]]) or read  # an event behind all
            elif isinstance(value, Mirrored):
                results[i] = value.values[0] if value.values else None
        ranks.guard.wait_for_gpu(read)
        return [in_kind(result, like) for result, like in zip(results, components, strict=True)]


class MpiAllReduce(PackedCrossDeviceOps):
    """Sums with MPI Allreduce, or with MPI Reduce where only one rank wants the result.

    Small values are packed by dtype into buffers of at most `CommunicationOptions.bytes_per_pack` bytes.
    """

    _in_rank_order = True


def _by_one_rank(ranks: Ranks, op: str, root: int, source: Array, target: Array, *, is_sent: bool) -> None:
    """Combine a pack on `root` by MPI's Reduce; send it to the others where they want it."""
    if target is not source:
        target[...] = source
    ranks.reduce(target, root, op)
    if is_sent:
        ranks.bcast(target, root)


def _layout(value: Any) -> tuple[str, tuple[int, ...]]:
    if isinstance(value, IndexedSlices):
        return layout_of_slices(value)
    return ("Mirrored", ()) if isinstance(value, Mirrored) else layout_of(value)


class NcclAllReduce(PackedCrossDeviceOps):
    """Sums arrays in GPU memory with NCCL, on CuPy's current stream; all others as `MpiAllReduce` does.

    The call returns when the work is on the stream; later work on the stream sees the result.  MIN and MAX
    of floats travel as integers of the same order, since a NaN must win.  Products of complex numbers, which NCCL does
    not know, go by way of the host.  Where NCCL cannot be used (CuPy finds none, or two ranks share a GPU) the ranks
    take the next best way, and rank 0 says so with a FallbackWarning.

    Args:
        num_packs: arrays in GPU memory are split into about so many packs for each dtype, whatever bytes_per_pack says;
            0 leaves it to bytes_per_pack.

    Raises:
        OptionError: for a negative num_packs.
        OptionTypeError: for a num_packs that is not a number.
    """

    _in_rank_order = True
    _device_path: str = "nccl"

    def __init__(self, num_packs: int = 1) -> None:
        self._set_num_packs(num_packs)


class HierarchicalCopyAllReduce(PackedCrossDeviceOps):
    """Sums within each node, then between the nodes, and returns the result within each node.

    Every rank of a node has a slice, and MPI's Allreduce combines the slices of counterparts on the nodes.  Over the
    network goes no more than must.  `MpiAllReduce` does the like with large values; this one does it with all.  Right
    for any number of ranks on any node.  Arrays in GPU memory go as with `MpiAllReduce`.

    Args:
        num_packs: the values are split into about so many packs, whatever bytes_per_pack says; 0 leaves it to
            bytes_per_pack.

    Raises:
        OptionError: for a negative num_packs.
    """

    _in_rank_order = True

    def __init__(self, num_packs: int = 1) -> None:
        self._set_num_packs(num_packs)

    def _route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Transfer:
        """Return the route of arrays: on several nodes the same for all sizes, if MPI's sums have the same bits."""
        packs, text = self._packs(layouts, options.bytes_per_pack), op._on_the_wire
        by_one = any(ranks.route(pack.nbytes, pack.dtype, text) == "root" for pack in packs)
        if destination.only_rank is not None or ranks.nodes == 1 or by_one:
            return super()._route(ranks, layouts, op, options, destination)
        return CommunicatorRoute(ranks, packs, op, "lanes", wire=options.wire)
