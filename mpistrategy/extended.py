"""StrategyExtended: what library authors use below `Strategy`: destinations, updates, placement."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

import numpy as np

from mpistrategy import context, nest
from mpistrategy.arena import Arena, has_arenas
from mpistrategy.arrays import Array, dtype_name, is_python_number, mean_dtype
from mpistrategy.context import Frame, Mode
from mpistrategy.cross_device_ops import CrossDeviceOps, MpiAllReduce
from mpistrategy.cross_device_ops.destinations import EVERY_RANK
from mpistrategy.cross_device_ops.device_batch import in_kind, write
from mpistrategy.cross_device_ops.gathering import gather
from mpistrategy.cross_device_ops.mean import WeightedMean
from mpistrategy.device_arrays import as_target, check_device, check_places, hand_back, is_on_device, reducible
from mpistrategy.devices import gpu_of
from mpistrategy.errors import (
    DeviceError,
    EmptyBatchError,
    MpiStrategyError,
    OptionTypeError,
    PlacementError,
    ShapeError,
    StructureError,
    UnsupportedError,
)
from mpistrategy.mpi.call import Call
from mpistrategy.mpi.faults import collective, own_mirrored
from mpistrategy.mpi.transport import Communicator, SingleCommunicator
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.placement import Placement
from mpistrategy.quick_all_reduce import QuickAllReduce
from mpistrategy.replica_context import ReplicaContext
from mpistrategy.values import (
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    contribution,
    local_component,
)
from mpistrategy.variables import Variable

if TYPE_CHECKING:
    from mpistrategy.strategy import Strategy


class StrategyExtended(Placement):
    """The part of a strategy that algorithms and other libraries build on; found as `strategy.extended`.

    Args:
        container_strategy: the strategy it belongs to.
        communicator: the ranks; None means this rank alone.
        cross_device_ops: the reduction algorithm; None means `MpiAllReduce`.
        options: the default communication options.
    """

    def __init__(
        self,
        container_strategy: Strategy,
        communicator: Communicator | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__(container_strategy)
        self.communicator: Communicator = communicator or SingleCommunicator()
        self.cross_device_ops = cross_device_ops or MpiAllReduce()
        self.options = options or CommunicationOptions()
        #: The common all-reduces, worked out.
        self.quick = QuickAllReduce(self.communicator, self.cross_device_ops, self.options)
        #: Whether variables belong to this rank alone (one replica, no synchronization).
        self.is_local = communicator is None or isinstance(communicator, SingleCommunicator)
        self.default_replica_context = ReplicaContext(container_strategy, self.communicator.rank)
        #: How gradients were cut into buckets, each way once: the numbers of the variables in each bucket.
        self.bucket_orders: dict[tuple[tuple[int, ...], ...], None] = {}

    def copy_for(self, container_strategy: Strategy) -> Self:
        """Return the same for another strategy: the ranks and the algorithm are shared, the variables are not."""
        result = copy.copy(self)
        result._container_strategy = container_strategy
        result._colocated_with = []
        result._variables = WeakValueDictionary()
        result.bucket_orders = {}
        result.default_replica_context = ReplicaContext(container_strategy, self.communicator.rank)
        return result

    # ------------------------------------------------------------------------------------------- reductions

    @collective("reduce", own=own_mirrored("value"))
    def reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce one value over the replicas to `destinations`.  Collective; cross-replica context.

        Args:
            reduce_op: a ReduceOp, or "SUM" / "MEAN".
            value: this rank's value; containers in a nest are reduced leaf by leaf.  Of an `Arena` the result is in
                place, on every rank, and its `values` are returned.
            destinations: a value or a variable (result on every rank; a variable is not changed), a device string
                such as ``"task:0"`` (result on that rank), or a list of device strings.
            options: hints.

        Returns:
            A Mirrored; on ranks that are no destination, reading it raises PlacementError.

        Raises:
            ContextError: in a step function.
            ReduceOpError, DestinationError, DeviceError, DTypeError, LeafError, CollectiveMismatchError: on every rank.
        """
        self._require_cross_replica("reduce_to")
        with self._entered(), self.communicator.guard.call("StrategyExtended.reduce_to") as call:
            if isinstance(value, Arena):
                return value.reduce_to(self, reduce_op, destinations, call, options)
            chosen = self.options.merge(options)
            leaves, structure = nest.flatten(value)
            if structure is nest.LEAF or not any(isinstance(leaf, DistributedValues) for leaf in leaves):
                return self.cross_device_ops.reduce(reduce_op, value, destinations, chosen)
            call.structure = structure.text
            pairs = [(leaf, leaf if destinations is value else destinations) for leaf in leaves]
            return structure.pack(self.cross_device_ops.batch_reduce(reduce_op, pairs, chosen))

    @collective("reduce", own=own_mirrored("value_destination_pairs", "pairs"))
    def batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: CommunicationOptions | None = None
    ) -> list[Any]:
        """Reduce several values at once; as `reduce_to` for each (value, destinations) pair, with fewer messages."""
        self._require_cross_replica("batch_reduce_to")
        with self._entered(), self.communicator.guard.call("StrategyExtended.batch_reduce_to"):
            pairs = value_destination_pairs
            if has_arenas(pairs):
                return [self.reduce_to(reduce_op, value, where, options) for value, where in pairs]
            return self.cross_device_ops.batch_reduce(reduce_op, pairs, self.options.merge(options))

    @collective("broadcast", own=own_mirrored("tensor"))
    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Send replica 0's value to `destinations`.  Collective; cross-replica context.

        Returns:
            A Mirrored, as in `reduce_to`.
        """
        self._require_cross_replica("broadcast_to")
        with self._entered(), self.communicator.guard.call("StrategyExtended.broadcast_to") as call:
            if isinstance(tensor, Arena):
                return tensor.broadcast(self, destinations, call)
            return self.cross_device_ops.broadcast(tensor, destinations)

    def all_reduce_leaves(
        self,
        where: str,
        op: ReduceOp,
        leaves: list[Any],
        paths: Callable[[], list[str]],
        *,
        options: CommunicationOptions | None = None,
        weight: Any = None,
        targets: list[Any] | None = None,
    ) -> list[Any]:
        """Reduce the leaves of a structure to every rank, as one batch; the caller has entered the guard's call.

        `paths` says how each leaf is reached; it is called for errors only.
        """
        if not leaves and self.is_local:
            return []  # alone, a structure without leaves is its own reduction
        if not leaves:
            raise EmptyBatchError.at(where, found="an empty structure", expected="at least one array to reduce")
        chosen = self.options.merge(options)
        values = [leaf if isinstance(leaf, Mirrored) else PerReplica((contribution(leaf),)) for leaf in leaves]
        places: list[Any] = []
        dense = weight is not None or targets is not None
        arrays = checked_leaves(values, paths, dense, where)
        if targets is not None:
            if len({id(target) for target in targets}) < len(targets):
                raise StructureError.at(f"{where}: out", found="one array twice", expected="one for each leaf")
            places = [as_target(target, where, "out") for target in targets]
            for place, array, path in zip(places, arrays, paths(), strict=True):
                _check_target(place, array, op, f"{where}: out{path}")
        if weight is None:
            reduced = self.cross_device_ops.batch_reduce(op, [(v, v) for v in values], chosen)
            results = [local_component(result) for result in reduced]
        else:
            mine = gpu_of(self.communicator.devices, self.communicator.rank)
            check_device([array for array in arrays if is_on_device(array)], mine, where)
            mean = WeightedMean(weight, op, where)
            parts = [PerReplica((part,)) for part in mean.contributions(arrays)]
            reduced = self.cross_device_ops.batch_reduce(ReduceOp.SUM, [(part, part) for part in parts], chosen)
            means = mean.finish([local_component(total) for total in reduced], arrays)
            results = [in_kind(result, local_component(value)) for result, value in zip(means, values, strict=True)]
        if targets is None:
            return [as_given(result, leaf) for result, leaf in zip(results, leaves, strict=True)]
        write(results, places)
        for place, target in zip(places, targets, strict=True):
            hand_back(place, target)
        return list(targets)

    def sum_or_mean(self, reduce_op: Any, array: Array) -> Array:
        """Return the reduction of one array on every rank, in any context."""
        with self._entered():
            value = PerReplica((array,))
            reduced = self.cross_device_ops.reduce(reduce_op, value, value, self.options)
            result = local_component(reduced)
            return result if is_on_device(result) else np.asarray(result)

    def gather_nest(self, value: Any, axis: Any, call: Call) -> Any:
        """Return all ranks' arrays along `axis`, leaf by leaf; the caller has entered the guard's call."""
        leaves, structure = nest.flatten(value)
        call.structure = structure.text
        return structure.pack(gather(self.communicator, [contribution(leaf) for leaf in leaves], axis, call))

    @collective("barrier")
    def barrier(self, name: str = "") -> None:
        """Wait until every rank has come here with the same `name`.  Collective.

        Raises:
            CollectiveMismatchError: on every rank, when another rank makes another call.
        """
        with self.communicator.guard.call("barrier", name=name, anywhere=bool(name)) as call:
            call.agree("barrier")

    # ---------------------------------------------------------------------------------------------- updates

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)`` in update context, where writes to `var` are local.

        Args:
            var: a variable of this strategy.
            fn: the function.
            args: Mirrored and PerReplica values are unwrapped to this rank's component.
            kwargs: likewise.
            group: False puts every leaf of the result into a tuple of one: this rank's.

        Returns:
            What fn returned, arrays wrapped in Mirrored.

        Raises:
            ContextError: in another strategy's context.
            OptionTypeError: when `var` is no variable of this strategy.
        """
        frame = context.current_frame()
        if frame is not None:
            context.require_same_strategy(frame, self._container_strategy, "StrategyExtended.update")
        context.check_call("StrategyExtended.update", fn, args, kwargs)
        if not self.variable_created_in_scope(var):
            raise OptionTypeError.at(
                "StrategyExtended.update", found=f"var={var!r}", expected="a variable created in this strategy's scope"
            )
        return self._in_update(lambda *a, **k: fn(var, *a, **k), args, kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` in update context, on the devices that `non_slot_devices` returned.

        Raises:
            ContextError: in a step function.
            DeviceError: when `colocate_with` is not what `non_slot_devices` returned.
        """
        self._require_cross_replica("update_non_slot")
        context.check_call("StrategyExtended.update_non_slot", fn, args, kwargs)
        devices = isinstance(colocate_with, tuple) and all(isinstance(device, str) for device in colocate_with)
        if not self._container_strategy.is_default and not (devices and colocate_with == self.worker_devices):
            raise DeviceError.at(
                "StrategyExtended.update_non_slot",
                found=f"colocate_with={colocate_with!r}",
                expected=f"what non_slot_devices returned, {self.worker_devices}",
            )
        return self._in_update(fn, args, kwargs, group)

    def _in_update(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None, group: bool
    ) -> Any:
        plain_args, plain_kwargs = _unwrapped(args, kwargs)
        with Frame(self._container_strategy, Mode.UPDATE):
            result = fn(*plain_args, **plain_kwargs)
        if not group:
            return nest.map_structure(lambda leaf: (leaf,), result)
        return nest.map_structure(lambda leaf: Mirrored((leaf,)) if _is_array(leaf) else leaf, result)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` once on every replica, in replica context; `Strategy.run` is this."""
        self._require_cross_replica("call_for_each_replica")
        context.check_call("StrategyExtended.call_for_each_replica", fn, args, kwargs)
        plain_args, plain_kwargs = _unwrapped(args, kwargs)
        on_gpu = self.communicator.guard.on_gpu
        with ReplicaContext(self._container_strategy, self.communicator.rank):
            if on_gpu is None:
                return fn(*plain_args, **plain_kwargs)
            with on_gpu():  # whatever thread this is
                return fn(*plain_args, **plain_kwargs)

    def _require_cross_replica(self, method: str) -> None:
        context.require_cross_replica(self._container_strategy, f"StrategyExtended.{method}")

    def _entered(self) -> Frame:
        return context.cross_replica(self._container_strategy)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or is_on_device(leaf)


def checked_leaves(
    values: Sequence[DistributedValues], paths: Callable[[], list[str]], dense: bool, where: str
) -> list[Any]:
    """Return the array of every leaf, or its IndexedSlices unless `dense` ones are needed.

    Raises:
        LeafError, DTypeError, UnsupportedError: for what cannot be reduced; names the leaf.
    """
    try:
        return [_checked(value, "", dense, where) for value in values]
    except MpiStrategyError:
        pass  # once more, to say which leaf it is
    return [_checked(value, path, dense, where) for value, path in zip(values, paths(), strict=True)]


def _checked(value: DistributedValues, path: str, dense: bool, where: str) -> Any:
    """Return the array of a leaf; IndexedSlices as they are, unless `dense` ones are needed."""
    component = local_component(value)
    if not isinstance(component, IndexedSlices):
        return reducible(component, where, path)
    if dense:
        raise UnsupportedError.at(
            where, found=f"IndexedSlices at leaf {path} with out= or weight=", expected="arrays", fix="Use to_dense()."
        )
    return component


def _unwrapped(args: Sequence[Any], kwargs: dict[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """Replace the containers among the arguments by this rank's components; leave arguments without any alone."""

    def component(argument: Any) -> Any:
        leaves, structure = nest.flatten(argument)
        for leaf in leaves:
            if isinstance(leaf, Mirrored) and leaf.lives_on != EVERY_RANK.text:
                raise PlacementError.at(
                    "an argument", found=f"a value that lives on {leaf.lives_on} only", expected="one on every rank"
                )
        if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
            return argument
        return structure.pack([local_component(leaf) for leaf in leaves])

    return [component(argument) for argument in args], {key: component(value) for key, value in (kwargs or {}).items()}


def _check_target(target: Any, value: Any, op: ReduceOp, where: str) -> None:
    if is_on_device(target) or is_on_device(value):
        check_places([value, target], where)
    dtype = mean_dtype(value.dtype) if op is ReduceOp.MEAN else value.dtype
    if target.shape != value.shape or target.dtype.newbyteorder("=") != dtype:
        raise ShapeError.at(
            where,
            found=f"{dtype_name(target.dtype)}{list(target.shape)}",
            expected=f"{dtype_name(dtype)}{list(value.shape)}, as the result",
        )


def as_given(result: Any, value: Any) -> Any:
    """Return a 0-d result as a NumPy scalar where the input was a scalar or a number."""
    scalar = isinstance(value, np.generic) or is_python_number(value)
    return result[()] if scalar and isinstance(result, np.ndarray) and result.ndim == 0 else result
