"""StrategyExtended: what library authors use below `Strategy`: destinations, updates, placement."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any, Self, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np

from mpistrategy import context
from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, is_python_number
from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.arrays.values import ArrayLike, Mirrored
from mpistrategy.context import Frame, Mode
from mpistrategy.cross_device_ops.base import CrossDeviceOps
from mpistrategy.cross_device_ops.built_in import MpiAllReduce
from mpistrategy.errors import ContextError, DeviceError, OptionError, OptionTypeError
from mpistrategy.mpi.contract import call_sites, observers
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.mpi.interface.ranks import Alone, Ranks
from mpistrategy.objects.copies import NotPickled
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.settings import Settable
from mpistrategy.options import CommunicationOptions, Op, ReduceOp
from mpistrategy.reduction.arena import Arena
from mpistrategy.reduction.inputs import unpacked, unwrapped
from mpistrategy.reduction.layout.destinations import Destination, for_value, resolve
from mpistrategy.reduction.plans import kind_of
from mpistrategy.reduction.reducer import AllReduce, Reducer
from mpistrategy.strategy.outside_steps import warn_if_alone
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.variables.storage import VariableSlot, VariableStorage
from mpistrategy.variables.variable import Variable
from mpistrategy.variables.writes import refuse_drift

T = TypeVar("T")


class StrategyExtended(NotPickled, Settable):
    """The part of a strategy that algorithms and other libraries build on; found as `strategy.extended`.

    Args:
        container_strategy: the strategy it belongs to.
        communicator: the ranks; None means this rank alone.
        cross_device_ops: the reduction algorithm; None means `MpiAllReduce`.
        options: the default communication options.
    """

    _instead_of_pickling = "Make a strategy there: this is a part of one."

    def __init__(
        self,
        container_strategy: Any,
        communicator: Ranks | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        self._container_strategy = container_strategy
        self._colocated_with: list[Variable] = []
        self._unnamed_variables = 0
        #: How many variables have been created; the same on every rank.
        self._variables_made: int = 0
        # By number; weak, so a variable can be collected.
        self._variables: WeakValueDictionary[int, Variable] = WeakValueDictionary()
        self.communicator: Ranks = communicator or Alone()
        context.note_strategy(container_strategy, self.communicator)
        #: What everything of this strategy is reduced with.
        self._reducer: Reducer = Reducer(
            self.communicator, cross_device_ops or MpiAllReduce(), options or CommunicationOptions()
        )
        self._reducer.entered = self._entered
        #: Whether variables belong to this rank alone (one replica, no synchronization).
        self._is_local: bool = self._reducer.is_alone
        self._default_replica_context: ReplicaContext = ReplicaContext(container_strategy, self.communicator.rank)
        #: How many datasets of global batches were distributed.
        self._datasets_made = 0
        #: How gradients were cut into buckets, each way once: the numbers of the variables in each bucket.
        self._bucket_orders: dict[tuple[tuple[int, ...], ...], None] = {}

    def __repr__(self) -> str:
        return f"<extended of {self._container_strategy!r}>"

    def _copy_for(self, container_strategy: Any) -> Self:
        """Return the same for another strategy: the ranks and the algorithm are shared, the variables are not."""
        result = copy.copy(self)
        result._container_strategy = container_strategy
        result._reducer = self._reducer.copy()
        result._reducer.entered = result._entered
        result._colocated_with = []
        result._variables = WeakValueDictionary()
        result._bucket_orders = {}
        result._default_replica_context = ReplicaContext(container_strategy, self.communicator.rank)
        return result

    # -------------------------------------------------------------------------------------------- settings

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The reduction algorithm.  May be set, on all ranks alike; it holds from the next call on.

        Raises:
            OptionTypeError: when it is set to something that is no CrossDeviceOps.
        """
        return cast(CrossDeviceOps, self._reducer.algorithm)

    @cross_device_ops.setter
    def cross_device_ops(self, algorithm: CrossDeviceOps) -> None:
        if not isinstance(algorithm, CrossDeviceOps):
            raise OptionTypeError.at(
                "StrategyExtended.cross_device_ops",
                found=f"{algorithm!r}",
                expected="a CrossDeviceOps",
                fix="Assign an instance, such as MpiAllReduce().",
            )
        self._reducer.algorithm = algorithm

    @property
    def options(self) -> CommunicationOptions:
        """The default communication options.  May be set, on all ranks alike; they hold from the next call on.

        A `timeout_seconds` of None leaves the timeout as it is.

        Raises:
            OptionTypeError: when they are set to something that is no CommunicationOptions.
        """
        return self._reducer.options

    @options.setter
    def options(self, options: CommunicationOptions) -> None:
        if not isinstance(options, CommunicationOptions):
            raise OptionTypeError.at(
                "StrategyExtended.options",
                found=f"{options!r}",
                expected="a CommunicationOptions",
                fix="Assign an instance; CommunicationOptions() has the defaults.",
            )
        self._reducer.options = options

    # ------------------------------------------------------------------------------------------- reductions

    @collective("reduce")
    def reduce_to(
        self,
        reduce_op: Op,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
    ) -> Any:
        """Reduce one value over the replicas to `destinations`.  Collective; cross-replica context.

        Args:
            reduce_op: a ReduceOp, or "SUM" / "MEAN".
            value: this rank's value: an array, a number, a list of numbers (one array), or a nest, which is reduced
                leaf by leaf.  None stays None.  Of an `Arena` the result is in place, on every rank, and its `values`
                are returned.
            destinations: the value itself, another value or a variable (result on every rank; a variable is not
                changed), a device string such as ``"task:0"`` (result on that rank), or a list of device strings.
            options: hints.
            name: is compared between the ranks instead of the call site.

        Returns:
            A Mirrored, or a nest of them; on ranks that are no destination, reading one raises PlacementError.

        Raises:
            ContextError: in a step function.
            ReduceOpError, DestinationError, DeviceError, DTypeError, LeafError, CollectiveMismatchError: on every rank.
        """
        self._require_collective("StrategyExtended.reduce_to")
        return self._reducer.run(
            "StrategyExtended.reduce_to", _ReduceTo, reduce_op, value, options, name=name, out=destinations
        )

    @collective("reduce")
    def batch_reduce_to(
        self,
        reduce_op: Op,
        value_destination_pairs: Any,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
    ) -> list[Any]:
        """Reduce several values at once; as `reduce_to` for each (value, destinations) pair, with fewer messages."""
        self._require_collective("StrategyExtended.batch_reduce_to")
        where, pairs = "StrategyExtended.batch_reduce_to", value_destination_pairs
        results: list[Any] = self._reducer.run(where, _BatchReduceTo, reduce_op, pairs, options, name=name)
        return results

    @collective("broadcast")
    def broadcast_to(self, tensor: Any, destinations: Any, *, name: str | None = None) -> Any:
        """Send replica 0's value to `destinations`.  Collective; cross-replica context.

        Args:
            tensor: an array, a number, a nest of them, of equal shapes and dtypes on all ranks, or an `Arena`.
            destinations: as in `reduce_to`.
            name: is compared between the ranks instead of the call site.

        Returns:
            A Mirrored, as in `reduce_to`.
        """
        self._require_collective("StrategyExtended.broadcast_to")
        with self._entered(), Call(self.communicator.guard, "StrategyExtended.broadcast_to", called=name) as call:
            if isinstance(tensor, Arena):
                return tensor._broadcast(self._reducer, destinations, call)
            found = _leaves_of(tensor)
            if found is None:
                return self.cross_device_ops.broadcast(tensor, destinations)
            leaves, structure = found
            call.structure = structure.text
            where, results = for_value(tensor, destinations), []
            for leaf in leaves:
                call.expect_more()
                results.append(self.cross_device_ops.broadcast(leaf, where))
            if not leaves:
                call.agree("broadcast")
            return structure.pack(results)

    @collective("barrier")
    def barrier(self, name: str = "") -> None:
        """Wait until every rank has come here with the same `name`.  Collective.

        Raises:
            CollectiveMismatchError: on every rank, when another rank makes another call.
        """
        if self._container_strategy._is_default:
            warn_if_alone(self._container_strategy, "barrier")
        with Call(self.communicator.guard, "barrier", called=name) as call:
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
            args: Mirrored values are unwrapped; of an ON_READ variable PerReplica values are, too, to this rank's
                component.
            kwargs: likewise.
            group: False puts every leaf of the result into a tuple of one: this rank's.

        Returns:
            What fn returned, arrays wrapped in Mirrored.  In a step function: plain, as from `merge_call`.

        Raises:
            ContextError: in another strategy's context.
            OptionTypeError: when `var` is not a variable of this strategy, and for a PerReplica among the arguments of
                an ON_WRITE variable, whose copies would differ.
        """
        frame = context.current_frame()
        if frame is not None:
            context.require_same_strategy(frame, self._container_strategy, "StrategyExtended.update")
        context.check_call("StrategyExtended.update", fn, args, kwargs)
        if not self.variable_created_in_scope(var):
            raise OptionTypeError.at(
                "StrategyExtended.update",
                found=f"var={var!r}",
                expected="a variable created in this strategy's scope",
                fix="Create the variable inside `with strategy.scope():`.",
            )
        refuse_drift(var, [*args, *(kwargs or {}).values()], "StrategyExtended.update")
        result = self._in_update(lambda *a, **k: fn(var, *a, **k), args, kwargs, group)
        return unpacked(result) if frame is not None and frame.mode is Mode.REPLICA else result

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` in update context, on the devices that `non_slot_devices` returned.

        Args:
            colocate_with: what `non_slot_devices` returned.
            fn: changes state that belongs to no variable.
            args: for `fn`.
            kwargs: for `fn`.
            group: whether this rank's result is returned; False returns a tuple of it.

        Raises:
            ContextError: in a step function.
            DeviceError: when `colocate_with` is not what `non_slot_devices` returned.
        """
        self._require_cross_replica("update_non_slot")
        context.check_call("StrategyExtended.update_non_slot", fn, args, kwargs)
        devices = isinstance(colocate_with, tuple) and all(isinstance(device, str) for device in colocate_with)
        if not self._container_strategy._is_default and not (devices and colocate_with == self.worker_devices):
            raise DeviceError.at(
                "StrategyExtended.update_non_slot",
                found=f"colocate_with={colocate_with!r}",
                expected=f"what non_slot_devices returned, {self.worker_devices}",
                fix="Pass extended.non_slot_devices(var_list).",
            )
        return self._in_update(fn, args, kwargs, group)

    def _in_update(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None, group: bool
    ) -> Any:
        plain_args, plain_kwargs = unwrapped(args, kwargs)
        result = context.call_in(Frame(self._container_strategy, Mode.UPDATE), fn, plain_args, plain_kwargs)
        if not group:
            return nest.map_structure(lambda leaf: (leaf,), result)
        return nest.map_structure(lambda leaf: Mirrored((leaf,)) if _is_array(leaf) else leaf, result)

    def call_for_each_replica(
        self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Call ``fn(*args, **kwargs)`` once on every replica, in replica context; `Strategy.run` is this."""
        if not observers.observers:
            return self._call(fn, args, kwargs)
        with observers.interval("step", getattr(fn, "__name__", type(fn).__name__)):
            return self._call(fn, args, kwargs)

    def _call(self, fn: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> T:
        refuse_in_jax_trace("Strategy.run")
        self._require_cross_replica("call_for_each_replica")
        context.check_call("StrategyExtended.call_for_each_replica", fn, args, kwargs)
        plain_args, plain_kwargs = unwrapped(args, kwargs)
        on_gpu = self.communicator.guard.on_gpu
        replica_context = ReplicaContext(self._container_strategy, self.communicator.rank)
        frame = Frame(self._container_strategy, Mode.REPLICA, replica_context)
        if on_gpu is None:
            return context.call_in(frame, fn, plain_args, plain_kwargs)
        with on_gpu():  # whatever thread this is
            return context.call_in(frame, fn, plain_args, plain_kwargs)

    # ---------------------------------------------------------------------------------- variables and devices

    def colocate_vars_with(self, colocate_with_variable: Variable) -> contextlib.AbstractContextManager[None]:
        """Colocate the variables created in the ``with`` block with another variable; only inside scope().

        Every replica has a copy of every variable, so this only records the relation.

        Args:
            colocate_with_variable: a variable of this strategy.

        Raises:
            ContextError: outside scope().
            OptionError: when the argument is not a variable of this strategy.
        """
        frame = context.current_frame()
        if frame is None or frame.strategy is not self._container_strategy:
            raise ContextError.at(
                "StrategyExtended.colocate_vars_with",
                found="a call outside scope()",
                expected="a call inside strategy.scope()",
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise OptionError.at(
                "StrategyExtended.colocate_vars_with",
                found=repr(colocate_with_variable),
                expected="a variable created in this strategy's scope",
            )
        return self._colocating(colocate_with_variable)

    @contextlib.contextmanager
    def _colocating(self, variable: Variable) -> Iterator[None]:
        self._colocated_with.append(variable)
        try:
            yield
        finally:
            self._colocated_with.pop()

    def _next_variable_name(self) -> str:
        """Return the name of a variable created without one; the same on every rank, since creation is collective."""
        return f"Variable_{self._unnamed_variables}"

    @property
    def _variable_storage(self) -> VariableStorage:
        """Where variables lie: shared by all copies of a strategy, which have the same ranks."""
        return self.communicator.once("variables", VariableStorage)

    def _storage_for(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Array, VariableSlot | None]:
        """Return memory for a variable, and its slot where the ranks share it.  Collective, in an agreed call."""
        return self._variable_storage.allocate(self.communicator, dtype, shape)

    def _device_memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray | None:
        """Return GPU memory for a variable; None for a variable on the host.

        Those are the variables on CPUs, and variables without axes (counters, totals, rates): Python reads them often,
        and each read would wait for the GPU.
        """
        if not shape or not self._drives_gpu:
            return None
        cupy = cupy_for("a variable on a GPU")
        with cupy.cuda.Device(self.communicator.devices[self.communicator.rank].index):
            return cupy.empty(shape, dtype)

    @property
    def _drives_gpu(self) -> bool:
        """Whether this rank's device is a GPU."""
        return gpu_of(self.communicator.devices, self.communicator.rank) is not None

    def _register_variable(self, variable: Variable) -> None:
        """Record a variable that was created for this strategy."""
        # Counted only after all ranks have created it: a refused creation must leave the numbers equal.
        self._variables[self._variables_made] = variable
        self._variables_made += 1
        self._unnamed_variables += variable.name == self._next_variable_name()
        variable._colocated_with = self._colocated_with[-1] if self._colocated_with else None

    def _variables_alive(self) -> list[tuple[int, Variable]]:
        """Return the variables that are still in use on this rank, with their numbers, in order of creation.

        A number means the same variable on all ranks.  The ranks' lists may differ: garbage is collected at any time.
        """
        return sorted(self._variables.items(), key=lambda item: item[0])

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether `v` is a variable of this strategy."""
        return isinstance(v, Variable) and v.strategy is self._container_strategy

    def value_container(self, value: Any) -> Any:
        """Return the container of a component: here the value itself."""
        return value

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Return the devices of variables that are no slots of another variable: this rank's device.

        Args:
            var_list: is not looked at; TensorFlow has it.
        """
        return self.worker_devices

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """This rank's device, as a tuple of one full device string."""
        return (str(self.communicator.devices[self.communicator.rank]),)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device of this rank's copies of the variables: the same as `worker_devices`."""
        return self.worker_devices

    # ------------------------------------------------------------------ what other libraries ask of a strategy

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether every step must have arrays of the same shapes: no."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether several processes run this program: with more than one rank."""
        return self.communicator.size > 1

    @property
    def experimental_should_init(self) -> bool:
        """Whether this rank makes the initial values of variables: every rank does, and rank 0's are used."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoint files: rank 0 does."""
        return self.communicator.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank writes logs and summaries: rank 0 does."""
        return self.communicator.rank == 0

    def read_var(self, v: Variable, *, name: str | None = None) -> Array:
        """Return the value of a variable: of an ON_READ one, in cross-replica context, the aggregate (collective).

        Args:
            v: the variable.
            name: is compared between the ranks instead of the call site.

        Raises:
            OptionTypeError: when `v` is not a variable.
        """
        if not isinstance(v, Variable):
            raise OptionTypeError.at("StrategyExtended.read_var", found=f"v={v!r}", expected="a Variable")
        return v.read_value(name=name)

    def _require_cross_replica(self, method: str) -> None:
        context.require_cross_replica(self._container_strategy, f"StrategyExtended.{method}")

    def _require_collective(self, where: str) -> None:
        strategy = self._container_strategy
        context.require_cross_replica(strategy, where)
        if strategy._is_default:
            warn_if_alone(strategy, where)

    def _entered(self) -> Frame:
        return context.cross_replica(self._container_strategy)


call_sites.calls_steps(StrategyExtended._call)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or is_on_device(leaf)


def _leaves_of(value: Any) -> tuple[list[Any], nest.Structure] | None:
    """Return the leaves but None of a nest of values, and its structure; None for one value: a list of numbers, say."""
    if value is None:
        return nest.flatten_without_none(value)
    if not nest.is_container(value):
        return None
    leaves, structure = nest.flatten_without_none(value)
    is_array = isinstance(value, (list, tuple)) and not structure.num_none
    if is_array and all(isinstance(leaf, (bool, str)) or is_python_number(leaf) for leaf in leaves):
        return None
    return leaves, structure


class _ReduceTo(AllReduce):
    """`StrategyExtended.reduce_to`; the `out` of its calls are the destinations."""

    @staticmethod
    def kind(value: Any, out: Any) -> Any:
        """Return what tells the calls apart for which there are plans."""
        return kind_of(value), _kind_of_destinations(value, out)

    def leaves_of(self, value: Any, out: Any) -> nest.Leaves | None:
        """Return how to reach the arrays of a value; None for a list of numbers, which is one array."""
        found = nest.leaves_of(value)
        if found is None or found.single:
            return found and replace(found, text="")
        return None if _leaves_of(value) is None else found

    def destination(self, value: Any, out: Any, where: str) -> Destination | None:
        """Return which ranks get the result."""
        return resolve(for_value(value, out), self.reducer.communicator, where)

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        reducer, algorithm = self.reducer, cast(CrossDeviceOps, self.reducer.algorithm)
        with reducer.entered():
            if isinstance(value, Arena):
                where = value._destination(out, call.where)
                return value._all_reduce(reducer, self.argument, call, options=self.options, destination=where)
            chosen = self.chosen
            found = _leaves_of(value)
            if found is None:
                return algorithm.reduce(self.argument, value, out, chosen)
            leaves, structure = found
            call.structure = structure.text
            if reducer.agrees_on_none(call, ReduceOp._parse(self.argument, call.where), structure):
                return structure.pack([])
            where = for_value(value, out)
            return structure.pack(algorithm.batch_reduce(self.argument, [(leaf, where) for leaf in leaves], chosen))


class _BatchReduceTo(AllReduce):
    """`StrategyExtended.batch_reduce_to`."""

    @staticmethod
    def kind(value: Any, out: Any) -> Any:
        """Return what tells the calls apart for which there are plans: lists of arrays that go to one destination."""
        if type(value) is not list or {*map(type, value)} != {tuple}:
            raise TypeError
        values, destinations = zip(*value, strict=True)
        if all(map(is_, values, destinations)):
            return np.ndarray, kind_of(values)
        (where,) = {*map(_kind_of_destinations, values, destinations)}
        return where, kind_of(values)

    def leaves_of(self, value: Any, out: Any) -> nest.Leaves | None:
        """Return how to reach the arrays; None where some are in nests."""
        if any(map(nest.is_container, chain.from_iterable(value))):
            return None
        return nest.Leaves(_values_of, list, False, "")

    def destination(self, value: Any, out: Any, where: str) -> Destination | None:
        """Return which ranks get the results."""
        return resolve(for_value(*value[0]), self.reducer.communicator, where)

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reductions; see `CallPlan.run`."""
        reducer = self.reducer
        with reducer.entered():
            if _has_arenas(value):
                one, results = _ReduceTo(reducer, self.argument, self.options), []
                for each, destinations in value:
                    call.expect_more()
                    results.append(one.run(call, each, destinations, None))
                return results
            return self._of_pairs(call, value, self.chosen)

    def _of_pairs(self, call: Call, pairs: Any, options: CommunicationOptions) -> list[Any]:
        algorithm, reduce_op = cast(CrossDeviceOps, self.reducer.algorithm), self.argument
        pairs = list(pairs) if isinstance(pairs, Iterable) else pairs
        are_pairs = isinstance(pairs, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
        nests = [_leaves_of(value) for value, _ in pairs] if are_pairs else []
        if all(found is None for found in nests):
            return algorithm.batch_reduce(reduce_op, pairs, options)
        single: list[tuple[Any, Any]] = []
        for (value, destinations), found in zip(pairs, nests, strict=True):
            where = destinations if found is None else for_value(value, destinations)
            single += [(leaf, where) for leaf in ([value] if found is None else found[0])]
        structures = [nest.LEAF if found is None else found[1] for found in nests]
        call.structure = "; ".join(structure.text for structure in structures)
        if not single:
            call.agree("reduce", op=ReduceOp._parse(reduce_op, call.where).value)
        results = iter(algorithm.batch_reduce(reduce_op, single, options) if single else [])
        return [structure.rebuild(results) for structure in structures]


def _values_of(pairs: Any) -> list[Any]:
    return [value for value, _ in pairs]


def _kind_of_destinations(value: Any, destinations: Any) -> Any:
    """Return what tells destinations apart: device strings, or a value.

    Raises:
        TypeError: for those that must be looked at in each call.
    """
    if destinations is value or isinstance(destinations, (np.ndarray, ArrayLike)):
        return np.ndarray
    if type(destinations) is str:
        return destinations
    raise TypeError


def _has_arenas(pairs: Any) -> bool:
    """Return whether `pairs` is a list of (value, destinations) tuples, and some of the values are arenas."""
    are_pairs = isinstance(pairs, (list, tuple)) and all(type(pair) is tuple and len(pair) == 2 for pair in pairs)
    return are_pairs and any(isinstance(value, Arena) for value, _ in pairs)
