"""CrossDeviceOps, the public interface of every reduction algorithm, and the algorithms.

The built-in algorithms share a pipeline: convert, agree, pack, sum, unpack, divide, wrap.  A subclass only chooses the
routes of its packs, unless it takes the usual routes, as MpiAllReduce does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np

from mpistrategy.arrays import devices, nest
from mpistrategy.arrays.convert import host_array, is_on_device, layout_of
from mpistrategy.arrays.dtypes import COMBINE, Array, divide_by, dtype_name, host_wire_dtype, quietly, sum_dtype_of_mean
from mpistrategy.arrays.values import IndexedSlices, Mirrored, PerReplica, event_of_reads, local_component
from mpistrategy.context import current_communicator, working_on
from mpistrategy.errors import (
    ContextError,
    DTypeError,
    EmptyBatchError,
    OptionError,
    OptionTypeError,
    ShapeError,
    StructureError,
    UnsupportedError,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node import two_level
from mpistrategy.mpi.shared_memory.node_sum import piece_elements
from mpistrategy.objects.settings import Fixed, checked_number, checked_type
from mpistrategy.objects.shown import in_words
from mpistrategy.options import CommunicationOptions, Op, ReduceOp, path_word
from mpistrategy.reduction.collectives import broadcast, by_shares, concatenate, room_for_shares
from mpistrategy.reduction.gpu import GpuRoute, gpu_packs
from mpistrategy.reduction.inputs import (
    EVERY_RANK,
    Destination,
    checked_value,
    for_value,
    in_kind,
    layout_of_slices,
    own_component,
    ranks_of,
    resolve,
)
from mpistrategy.reduction.plan import plan_of, summed, usual_route
from mpistrategy.reduction.reducer import Algorithm
from mpistrategy.reduction.transfer import (
    CommunicatorRoute,
    Layout,
    Transfer,
    finish,
    layouts_of,
    packs_of,
    ways_in_words,
)


class CrossDeviceOps(Algorithm):
    """Reduces values of all replicas, and broadcasts values to them.

    Give an instance to `MirroredStrategy(cross_device_ops=...)`, or call its methods directly while a strategy's
    scope is entered.  All methods are collective.  To write an algorithm of your own, override
    `reduce_implementation` and `batch_reduce_implementation` (and `broadcast_implementation` where the default, rank
    0's value by MPI Bcast, does not do).
    """

    def _call(self, method: str, value: Any = None, name: str | None = None) -> tuple[Ranks, Call]:
        """Return the communicator of this thread's strategy, else of `value`, and the call of a method.

        Raises:
            ContextError: outside every strategy, for a value that belongs to no strategy.
        """
        where = f"{type(self).__name__}.{method}"
        communicator = current_communicator() or _group_of(value)
        if communicator is None:
            raise ContextError.at(
                where,
                found="a call outside every strategy",
                expected="a call inside `with strategy.scope():` or through a strategy",
                fix="Enter the scope first: the strategy says which ranks take part.",
            )
        return communicator, Call(communicator.guard, where, called=name)

    @collective("reduce")
    def reduce(
        self,
        reduce_op: Op,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
    ) -> Any:
        """Reduce one value over the replicas.

        Args:
            reduce_op: a ReduceOp, or "SUM" / "MEAN".
            per_replica_value: this rank's value: a PerReplica, an array, a number or IndexedSlices; shape and dtype
                are equal on all ranks.
            destinations: where the result goes; see `mpistrategy.reduction.inputs.resolve`.
            options: hints; None for the defaults.
            name: is compared between the ranks instead of the call site.

        Returns:
            A Mirrored; on ranks that are no destination, reading it raises PlacementError.

        Raises:
            ReduceOpError, DestinationError, DeviceError, DTypeError, LeafError: for bad input, on every rank.
            CollectiveMismatchError: when the ranks' calls differ.
        """
        communicator, call = self._call("reduce", per_replica_value, name)
        with working_on(communicator), call:
            pairs = [(per_replica_value, destinations)]
            op, [pair], settings = _checked(communicator, call, reduce_op, pairs, options)
            return self.reduce_implementation(op, *pair, settings)

    @collective("reduce")
    def batch_reduce(
        self,
        reduce_op: Op,
        value_destination_pairs: Any,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
    ) -> list[Any]:
        """Reduce several values in one go; the same as `reduce` for each pair, with fewer messages.

        Args:
            reduce_op: a ReduceOp, or "SUM" / "MEAN".
            value_destination_pairs: a sequence or an iterator of (value, destinations) tuples.
            options: hints; None for the defaults.
            name: is compared between the ranks instead of the call site.

        Returns:
            A list of Mirrored, in the order of the pairs.

        Raises:
            EmptyBatchError: when there are no pairs.
            OptionTypeError, OptionError: when `value_destination_pairs` is not a sequence of pairs.
        """
        pairs = (
            list(value_destination_pairs)
            if isinstance(value_destination_pairs, Iterable) and getattr(value_destination_pairs, "shape", 0) != ()
            else None
        )
        communicator, call = self._call("batch_reduce", pairs, name)
        with working_on(communicator), call:
            if pairs is None or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
                error = OptionTypeError if pairs is None else OptionError
                raise error.at(
                    call.where,
                    found=f"value_destination_pairs={value_destination_pairs!r}",
                    expected="an iterable of (value, destinations) tuples",
                )
            if not pairs:
                raise EmptyBatchError.at(call.where, found="no values at all", expected="at least one value to reduce")
            op, pairs, settings = _checked(communicator, call, reduce_op, pairs, options)
            results: Any = self.batch_reduce_implementation(op, pairs, settings)
            if not isinstance(results, (list, tuple)) or len(results) != len(pairs):
                raise StructureError.at(
                    f"{type(self).__name__}.batch_reduce_implementation",
                    found=f"{results!r} returned for {len(pairs)} values",
                    expected="a list with one result for each value",
                )
            return list(results)

    def _all_reduce_values(
        self,
        call: Call,
        communicator: Ranks,
        op: ReduceOp,
        components: Sequence[Any],
        values: Sequence[Any],
        options: CommunicationOptions,
        outs: Sequence[Any] | None = None,
        *,
        is_batch: bool = True,
    ) -> list[Any]:
        """Reduce to every rank, for the library's own calls; see `mpistrategy.reduction.reducer.Algorithm`."""
        kinds = (Mirrored, IndexedSlices)
        containers = [value if isinstance(value, kinds) else PerReplica((value,)) for value in components]
        if len(containers) == 1 and not is_batch:
            return [local_component(self.reduce(op, containers[0], containers[0], options))]
        return [local_component(r) for r in self.batch_reduce(op, [(value, value) for value in containers], options)]

    @collective("broadcast")
    def broadcast(self, tensor: Any, destinations: Any, *, name: str | None = None) -> Any:
        """Send rank 0's value to the destinations.

        Args:
            tensor: an array or a number, of equal shape and dtype on all ranks.
            destinations: where the result goes, as in `reduce`.
            name: is compared between the ranks instead of the call site.

        Returns:
            A Mirrored.
        """
        communicator, call = self._call("broadcast", name=name)
        with call:
            destinations = for_value(tensor, destinations)
            resolve(destinations, communicator, call.where)
            return self.broadcast_implementation(tensor, destinations)

    def __repr__(self) -> str:
        return in_words(self)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Override: reduce one value, by default as a batch of one.  The arguments have been checked.

        Args:
            reduce_op: the operation.
            per_replica_value: a PerReplica with this rank's value, a Mirrored, or IndexedSlices.
            destinations: where the result goes, as in `reduce`.
            options: the strategy's options, merged with the call's.

        Returns:
            A Mirrored of the result, with a component on the ranks of the destinations.
        """
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Override: reduce several values.  The arguments have been checked.

        Args:
            reduce_op: the operation.
            value_destination_pairs: tuples of a value and its destinations, as in `reduce_implementation`.
            options: the strategy's options, merged with the call's.

        Returns:
            What `reduce_implementation` returns for each pair, in their order.
        """
        raise UnsupportedError.at(
            f"{type(self).__name__}.batch_reduce",
            found="no batch_reduce_implementation",
            expected="one in your subclass",
        )

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Override: send rank 0's value to the destinations.

        Args:
            tensor: this rank's value, which matters on rank 0 alone.
            destinations: where it goes, as in `reduce`.
        """
        communicator, call = self._call("broadcast")
        with call:
            destination = resolve(destinations, communicator, call.where)
            (mirrored,) = destination.mirrored(broadcast(communicator, [tensor], 0, call, destination.text))
            return mirrored


def _group_of(value: Any) -> Ranks | None:
    """Return the ranks to which a value, or a value in a nest, belongs."""
    groups = [leaf._group for leaf in nest.flatten(value)[0] if isinstance(leaf, PerReplica)]
    return next(filter(None, groups), None)


def _checked(
    ranks: Ranks, call: Call, reduce_op: Any, pairs: Sequence[tuple[Any, Any]], options: Any
) -> tuple[ReduceOp, list[tuple[Any, Any]], CommunicationOptions]:
    """Return the operation, values with destinations that name ranks, and the options."""
    op = ReduceOp._parse(reduce_op, call.where)
    resolved_pairs = [(value, for_value(value, destinations)) for value, destinations in pairs]
    for _, destinations in resolved_pairs:
        resolve(destinations, ranks, call.where)
    given, expected = CommunicationOptions() if options is None else options, "a CommunicationOptions or None"
    settings = checked_type(call.where, "options", given, CommunicationOptions, expected)
    call.wait_as(settings.timeout_seconds)
    return op, resolved_pairs, settings


# ------------------------------------------------------------------------------------------------- built-in algorithms

#: What a subclass may override; its values have no plans then.
_OVERRIDABLE = ("reduce", "reduce_implementation", "batch_reduce", "batch_reduce_implementation")


class PackedCrossDeviceOps(CrossDeviceOps):
    """Base of the algorithms that reduce packs of arrays."""

    #: Whether arrays in GPU memory are combined on the host.
    _by_host: bool = False
    #: What combines all ranks' copies of a value where one rank combines; None: MPI's Reduce does.
    _function: Callable[[list[Array]], object] | None = None
    _num_packs: float = 0

    @property
    def num_packs(self) -> float:
        """About how many packs values are split into; 0 leaves it to bytes_per_pack.  Set by the constructor."""
        return self._num_packs

    def _set_num_packs(self, num_packs: Any) -> None:
        checked_number(type(self).__name__, "num_packs", num_packs, "an int >= 0")
        self._num_packs = num_packs

    @cached_property
    def _configuration(self) -> str:
        """The settings that must be equal on all ranks for their messages to fit together."""
        return f"{type(self).__name__}, num_packs={self._num_packs}"

    def _transfer(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
        *,
        on_gpu: bool,
    ) -> Transfer | None:
        """Return how arrays are reduced; None where arrays in GPU memory are reduced on the host."""
        two_level.check_wire(options.wire)
        if not on_gpu:
            return plan_of(ranks, layouts, op, self._route(ranks, summed(layouts, op), op, options, destination))
        if self._by_host:
            return None
        packs = gpu_packs(layouts, options.bytes_per_pack, self.num_packs)
        word = path_word(options, self._device_path)
        return GpuRoute(ranks, packs, op, word, options.wire, root=destination.only_rank)

    def _route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Transfer:
        """Return the route of arrays: to the one rank that combines, else the fastest to every rank.

        Raises:
            MpiStrategyError: for arrays that this algorithm, unlike others, cannot reduce.
        """
        root = self._root(ranks, destination)
        if root is None:
            return usual_route(ranks, layouts, op, options.bytes_per_pack, options.wire)
        function, is_sent = self._function, destination.only_rank != root
        alone_bytes = None if function is None else 0  # it gets each value by itself
        packs = packs_of(layouts, options.bytes_per_pack, self._num_packs, alone_bytes=alone_bytes)
        reduce_pair = partial(_by_one_rank, ranks, op._on_the_wire, root, function, is_sent=is_sent)
        return CommunicatorRoute(ranks, packs, op, "root", reduce_pair)

    def _root(self, ranks: Ranks, destination: Destination) -> int | None:
        """Return the rank that combines; None: all ranks combine."""
        return destination.only_rank

    def _reduce_slices(self, ranks: Ranks, slices: IndexedSlices, op: ReduceOp, call: Call) -> IndexedSlices:
        """Return the reduction of IndexedSlices, on every rank: all ranks' rows in rank order."""
        return concatenate(ranks, slices, op, call)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values: one check for all of them, then one message for each pack."""
        communicator, call = self._call("batch_reduce")
        with call:
            parts = [own_component(value, reduce_op, call.where) for value, _ in value_destination_pairs]
            values = [p if isinstance(p, Mirrored) else checked_value(p, call.where, reduce_op) for p in parts]
            targets = [resolve(d, communicator, call.where) for _, d in value_destination_pairs]
            results = self._reduce(call, communicator, reduce_op, parts, values, targets, options)
            results = [*map(in_kind, results, parts)]
            return [m for result, target in zip(results, targets, strict=True) for m in target.mirrored([result])]

    def _all_reduce_values(
        self,
        call: Call,
        communicator: Ranks,
        op: ReduceOp,
        components: Sequence[Any],
        values: Sequence[Any],
        options: CommunicationOptions,
        outs: Sequence[Any] | None = None,
        *,
        is_batch: bool = True,
    ) -> list[Any]:
        """Reduce to every rank; calls a subclass's own methods."""
        if not self._has_plans:
            return super()._all_reduce_values(call, communicator, op, components, values, options, is_batch=is_batch)
        return self._reduce(call, communicator, op, components, values, [EVERY_RANK] * len(values), options, outs)

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
    ) -> list[tuple[Any, list[int], list[Any]]]:
        """Return transfers, with the indices of the values that each transfer reduces, and with their arrays.

        Data in the mailboxes last until the next exchange, and a GPU path may begin with one: the plan is first.
        """
        on_gpu = [i for i, value in enumerate(values) if is_on_device(value)]
        arrays = [values[i] for i in on_gpu]
        route = self._transfer(ranks, layouts_of(arrays), op, options, target, on_gpu=True) if on_gpu else None
        gpu_part = [] if route is None else [(route, on_gpu, arrays)]
        on_host = [
            i
            for i, value in enumerate(values)
            if isinstance(value, np.ndarray) or (not gpu_part and is_on_device(value))
        ]
        arrays = [host_array(values[i]) for i in on_host]
        plan = self._transfer(ranks, layouts_of(arrays), op, options, target, on_gpu=False)
        return [(plan, on_host, arrays), *gpu_part]

    def _lines(self, ranks: Ranks, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions) -> list[str]:
        """Return the lines of `Strategy.explain` for these values."""
        parts = self._parts(ranks, op, values, EVERY_RANK, options)
        ways = [way for transfer, _, arrays in parts for way in transfer.describe(arrays)]
        counts = {
            "IndexedSlices: gathered on all ranks": sum(isinstance(value, IndexedSlices) for value in values),
            "Mirrored: the same everywhere, nothing is sent": sum(isinstance(value, Mirrored) for value in values),
            "on a GPU: copied to the host, reduced as others are, and copied back": (
                sum(map(is_on_device, values)) if len(parts) == 1 else 0
            ),
        }
        return [*ways_in_words(ways), *(f"{count} {note}" for note, count in counts.items() if count)]

    def _reduce(
        self,
        call: Call,
        ranks: Ranks,
        op: ReduceOp,
        components: Sequence[Any],
        values: Sequence[Any],
        targets: Sequence[Destination],
        options: CommunicationOptions,
        outs: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return the reductions: arrays and slices; None on ranks that are no destination.

        Args:
            outs: for each value an array that its result may be written to; used only where that saves a copy.
        """
        layouts, texts = tuple(map(_layout, values)), [place.text for place in targets]
        # Values that go to different ranks are sent to all of them.
        is_one = len(set(targets)) == 1
        target, destination = (targets[0], texts[0]) if is_one else (EVERY_RANK, "; ".join(texts))
        parts = self._parts(ranks, op, values, target, options)
        memory = []
        for transfer, indices, arrays in parts:
            targets_here = None if outs is None else transfer.direct(arrays, [outs[i] for i in indices])
            memory.append(transfer.bring(arrays, targets_here))
        read = event_of_reads(component for component in components if is_on_device(component))
        # MPI and NCCL get pointers to GPU memory only from ranks that are known to make the same call.
        is_on_host = len(parts) == 1
        settings = self._settings(options)
        call.agree(
            "reduce", op=op.value, values=layouts, destination=destination, options=settings, sparingly=is_on_host
        )
        # A Mirrored value is its own result.
        results: list[Any] = [
            value.values[0] if isinstance(value, Mirrored) and value.values else None for value in values
        ]
        for (transfer, indices, arrays), room in zip(parts, memory, strict=True):
            for i, total in zip(indices, transfer.run(arrays, room), strict=True):
                results[i] = total if target.is_here else None
        for i, value in enumerate(values):
            if isinstance(value, IndexedSlices):
                results[i] = self._reduce_slices(ranks, value, op, call)
                read = event_of_reads([components[i]]) or read  # an event behind all
        ranks.guard.wait_for_gpu(read)
        return results


class MpiAllReduce(PackedCrossDeviceOps):
    """Sums with MPI Allreduce, or with MPI Reduce where only one rank wants the result.

    Small values are packed by dtype into buffers of at most `CommunicationOptions.bytes_per_pack` bytes.
    """

    _in_rank_order = True


def _by_one_rank(
    ranks: Ranks,
    op: str,
    root: int,
    function: Callable[[list[Array]], object] | None,
    source: Array,
    target: Array,
    *,
    is_sent: bool,
) -> None:
    """Combine a pack on `root` by MPI's Reduce, or by a function; send it to the others where they want it.

    The function gets all ranks' copies of a value in rank order, in the dtype of the value, and may keep them.
    """
    flat = target.reshape(-1)
    if function is None:
        flat[...] = source
        ranks.reduce(flat, root, op)
    else:
        shape = (ranks.size if ranks.rank == root else 0, *target.shape)
        # If the function raises, the other ranks must not wait for its result.
        copies = ranks.guard.on_all(partial(np.empty, shape, target.dtype))
        ranks.gatherv(source, [source.size] * ranks.size, copies, root)
        ranks.guard.on_all(partial(_accumulate, function, copies, target))
    if is_sent:
        ranks.bcast(flat, root)


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
        packs, text = packs_of(layouts, options.bytes_per_pack, self._num_packs), op._on_the_wire
        by_one = any(ranks.route(pack.nbytes, pack.dtype, text) == "root" for pack in packs)
        if destination.only_rank is not None or ranks.nodes == 1 or by_one:
            return super()._route(ranks, layouts, op, options, destination)
        return CommunicatorRoute(ranks, packs, op, "lanes", wire=options.wire)


class ReductionToOneDevice(PackedCrossDeviceOps):
    """Sums on one rank with MPI Reduce, then sends the result where it is wanted with MPI Bcast.

    Arrays in GPU memory go as with `MpiAllReduce`, unless there is an accumulation_fn.

    Args:
        reduce_to_device: the rank that sums, as a device string such as ``"task:1"``; None means the destination
            where that is a single rank, the same for all values of a batch, else rank 0.
        accumulation_fn: called once for each value on the summing rank, with the list of all ranks' values in rank
            order, 16-bit floats as float32; returns one array of the same shape.  None means the sum, in the order
            that the MPI chooses.  MEAN divides by the number of replicas afterwards, whatever the function did.  The
            summing rank holds all ranks' copies of one value at a time.

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
            checked_type(where, "reduce_to_device", reduce_to_device, str, "a device string")
            devices.parse(reduce_to_device, where, "reduce_to_device")
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise OptionTypeError.at(
                where, found=f"accumulation_fn={accumulation_fn!r}", expected="a function of a list"
            )
        self.reduce_to_device, self.accumulation_fn = reduce_to_device, accumulation_fn
        self._function, self._by_host = accumulation_fn, accumulation_fn is not None

    @property
    def _configuration(self) -> str:
        """The settings that must be equal on all ranks for their messages to fit together."""
        how = "sum" if self.accumulation_fn is None else "accumulation_fn"
        return f"{super()._configuration}, {how} on {self.reduce_to_device}"

    def _root(self, ranks: Ranks, destination: Destination) -> int:
        """Return the rank that combines."""
        if self.reduce_to_device is None:
            return destination.only_rank or 0
        return ranks_of(self.reduce_to_device, ranks, "ReductionToOneDevice(reduce_to_device=...)")[0]


def _accumulate(function: Callable[[list[Array]], object], copies: Array, target: Array) -> None:
    """Write the function's result for these copies, if there are any, into `target`."""
    if not len(copies):
        return
    result = np.asarray(function([copies[rank, ...] for rank in range(len(copies))]))
    if result.shape != target.shape or not np.can_cast(result.dtype, target.dtype, "same_kind"):
        raise (ShapeError if result.shape != target.shape else DTypeError).at(
            "ReductionToOneDevice",
            found=f"{dtype_name(result.dtype)}{list(result.shape)} returned by accumulation_fn",
            expected=f"{dtype_name(target.dtype)}{list(target.shape)}, as each value",
        )
    target[...] = result


# ------------------------------------------------------------------------------------------------- ordered sums


#: So many rows are put in order by minima and maxima: 4 rows of float32 take 4 ns an element so, 150 by `numpy.sort`.
_FEW_ROWS = 8


class OrderedAllReduce(PackedCrossDeviceOps):
    """Sums each element in an order that its values give, so that the bits depend on the values alone.

    It sums each element in sorted order, so the result does not depend on rank order, packing, the number of nodes or
    the MPI.  Further ranks with zeros (under PROD, ones) do not change it.  Only the reduction is reproducible: sums
    inside a rank still depend on how rows are split, and MEAN divides by the number of ranks.

    Method: each rank gets all ranks' values of its share of the elements, sorts the values of each element, and adds
    them from the least to the greatest.  Let n be the number of values, S their exact sum and A the sum of their
    magnitudes.  Without overflow, the result differs from S by no more than

        float64, complex128    (n-1) u / (1 - (n-1) u) A,  u = 2^-53: the bound of a sum in any order (Higham, Accuracy
                               and Stability of Numerical Algorithms, 4.2)
        float32, complex64     2^-24 |S| + (n-1) 2^-52 A + 2^-150: added in float64, rounded once
        float16, bfloat16      as float32, and rounded once more
        integers               0, modulo 2^bits

    Complex numbers are sums of their parts.  A pre-rounded (binned) summation as of Demmel and Nguyen (Parallel
    Reproducible Summation, 2015) would need less memory traffic between nodes, but a bound on the ranks, a first pass
    for the maxima, and several sums; it loses values far below the maximum; this method does not.

    A zero is +0.0 always; NaN has one pattern of bits: NaN anywhere, or both infinities, give it.  Values are finite
    as long as the partial sums from the least to the greatest are.  PROD (sorted alike) obeys the same; for MIN and
    MAX, -0.0 is less than +0.0.

    Cost: on one node as `MpiAllReduce` for two ranks; with n > 2 also sorting the n values of each element.
    Between nodes each rank sends all its values once and gets all results once, with no sums on the way:
    `CommunicationOptions.wire` is not followed, and with many ranks on a node this is more than the other algorithms
    send.  Of IndexedSlices rows with the same index are added, and rows are in the order of the indices.
    """

    _by_host = True

    def _route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Transfer:
        """Return the route of arrays: through memory of the node, or share by share from rank to rank.

        Raises:
            UnsupportedError: for a PROD of complex numbers, which cannot be combined part by part.
        """
        for dtype, _ in layouts:
            if op is ReduceOp.PROD and dtype.kind == "c":
                raise UnsupportedError.at(
                    "OrderedAllReduce",
                    found=f"PROD of {dtype_name(dtype)} by OrderedAllReduce",
                    expected="PROD of real numbers, or SUM or MEAN",
                    fix="Use MpiAllReduce(), or multiply the magnitudes and add the angles.",
                )
        packs, text = (
            packs_of(layouts, options.bytes_per_pack, alone_bytes=ranks.thresholds.pack_bytes),
            op._on_the_wire,
        )
        nbytes = sum(pack.nbytes for pack in packs)
        names = {ranks.route(nbytes, pack.dtype, text) for pack in packs}
        if names == {"node_sum"}:
            return CommunicatorRoute(ranks, packs, op, "node_sum", combination=combine_ordered)
        shown = "alltoallv" if names.isdisjoint(("none", "threads")) else names.pop()
        return CommunicatorRoute(ranks, packs, op, shown, partial(combine_by_shares, ranks, text))

    def _reduce_slices(self, ranks: Ranks, slices: IndexedSlices, op: ReduceOp, call: Call) -> IndexedSlices:
        """Return all ranks' rows in the order of their indices, rows with equal indices added up; on the host."""
        slices = IndexedSlices(host_array(slices.values), host_array(slices.indices), slices.dense_shape)
        gathered = concatenate(ranks, slices, ReduceOp.SUM, call)
        dtype = gathered.values.dtype
        indices, counts = np.unique(gathered.indices, return_counts=True)
        order, starts = np.argsort(gathered.indices, kind="stable"), np.cumsum(counts) - counts
        summed = host_wire_dtype(sum_dtype_of_mean(dtype) if op is ReduceOp.MEAN else dtype)
        total = np.empty((indices.size, *gathered.values.shape[1:]), summed)
        for count in np.unique(counts):
            positions = np.flatnonzero(counts == count)
            rows = [gathered.values[order[starts[positions] + number]].astype(summed) for number in range(count)]
            combine_ordered([row.reshape(-1) for row in rows], [rows[0].reshape(-1)], "SUM", 1)
            total[positions] = rows[0]
        return IndexedSlices(finish(total, dtype, op, ranks.size), indices, slices.dense_shape)


def combine_by_shares(ranks: Ranks, op: str, source: Array, target: Array) -> None:
    """Write the combination of all ranks' `source` into `target`, which may be the same."""
    flat = target.reshape(-1)
    memory = ranks.guard.on_all(partial(room_for_shares, ranks, reals(flat)))
    flat[...] = source
    by_shares(ranks, reals(flat), memory, lambda rows: combine_ordered([*rows], [*rows], op, 1))


@quietly
def combine_ordered(arrays: Sequence[Array], targets: Sequence[Array], op: str, divisor: int) -> None:
    """Do what `node_sum.in_rank_order` does, with the same bits whatever the order of `arrays`.

    The values of an element are sorted, and added from the least to the greatest.  The order of the ranks does not
    matter then, nor do zeros: they are added exactly, wherever they stand.

    Args:
        arrays: flat, one of each rank, in a dtype of the wire.
        targets: flat, of the same size and dtype; may be the arrays themselves.
        op: "SUM", "MIN", "MAX" or "PROD"; no PROD of complex numbers.
        divisor: the result is divided by it; floating and complex dtypes only.
    """
    # The real and the imaginary parts are numbers of their own.
    numbers, results = [*map(reals, arrays)], [*map(reals, targets)]
    dtype, adds = numbers[0].dtype, op in ("SUM", "PROD")
    # Two values are combined alike either way, and MIN, MAX and integers in any order.
    sorts = len(numbers) > 2 and dtype.kind == "f" and adds
    step = piece_elements(len(numbers), dtype.itemsize) & ~1  # no complex number is cut in two
    for start in range(0, numbers[0].size, step):
        rows = [number[start : start + step] for number in numbers]
        if sorts:
            rows = [row.astype(np.float64 if dtype == np.float32 else dtype) for row in _in_order(rows)]
        total = reduce(COMBINE[op], rows[1:], rows[0].copy()).astype(dtype, copy=False)
        use_one_pattern(total, zeros=adds)  # of zeros with different signs MIN and MAX take the same one in any order
        divide_by(divisor, total.view(arrays[0].dtype))
        for result in results:
            result[start : start + step] = total


def _in_order(rows: list[Array]) -> list[Array]:
    """Return rows with the values of each element in order; a NaN in an element may fill all its rows."""
    if len(rows) > _FEW_ROWS:
        return [*np.sort(rows, axis=0)]
    for turn in range(len(rows)):  # odd-even transposition
        for low in range(turn % 2, len(rows) - 1, 2):
            pair = rows[low : low + 2]
            rows[low : low + 2] = np.minimum(*pair), np.maximum(*pair)
    return rows


def reals(array: Array) -> Array:
    """Return a flat complex array as its real and imaginary parts; other arrays as they are."""
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def use_one_pattern(total: Array, *, zeros: bool) -> None:
    """Give NaN, and with `zeros` also zeros, bits that do not depend on the order: NumPy's NaN, and +0.0."""
    if total.dtype.kind == "f":
        if zeros:
            np.add(total, total.dtype.type(0), out=total)
        np.copyto(total, total.dtype.type(np.nan), where=np.isnan(total))
