"""StrategyExtended: what library authors use below `Strategy`: destinations, updates, placement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np

from mpistrategy import context
from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, is_python_number
from mpistrategy.arrays.values import ArrayLike, Mirrored
from mpistrategy.context import Frame, Mode
from mpistrategy.cross_device_ops.algorithms import CrossDeviceOps, MpiAllReduce
from mpistrategy.errors import ContextError, DeviceError, OptionError, OptionTypeError
from mpistrategy.mpi.contract import call_sites, observers
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.mpi.interface.ranks import Alone, Ranks
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.settings import NotPickled, Settable, checked_type
from mpistrategy.options import CommunicationOptions, Op, ReduceOp
from mpistrategy.reduction.arena import Arena
from mpistrategy.reduction.inputs import Destination, for_value, resolve, unpacked, unwrapped
from mpistrategy.reduction.reducer import AllReduce, Reducer
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.variables.variable import Variable

T = TypeVar("T")

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


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
        context.check_strategy(container_strategy, "StrategyExtended")
        self.communicator: Ranks = communicator or Alone()
        algorithm, defaults = cross_device_ops or MpiAllReduce(), options or CommunicationOptions()
        self._belong_to(container_strategy, Reducer(self.communicator, algorithm, defaults))
        context.note_strategy(container_strategy, self.communicator)
        #: How many datasets of global batches were distributed.
        self._datasets_made = 0

    def _belong_to(self, strategy: Any, reducer: Reducer) -> None:
        self._container_strategy = strategy
        #: Reduces the values of this strategy.
        self._reducer: Reducer = reducer
        self._reducer.entered = partial(context.cross_replica, strategy)
        #: The variables that are still in use on this rank, by number, in order of creation; weak, so that they can be
        #: collected.  A number means the same variable on all ranks, whose dictionaries may differ.
        self._variables: WeakValueDictionary[int, Variable] = WeakValueDictionary()
        #: How many have been created; the same on every rank.
        self._variables_made = 0
        self._default_replica_context: ReplicaContext = ReplicaContext(strategy, self.communicator.rank)
        #: How gradients were cut into buckets, each way once: the numbers of the variables in each bucket.
        self._bucket_orders: dict[tuple[tuple[int, ...], ...], None] = {}

    def __repr__(self) -> str:
        return f"<extended of {self._container_strategy!r}>"

    def _copy_for(self, container_strategy: Any) -> Self:
        """Return a copy for another strategy: the ranks and the algorithm are shared, the variables are not."""
        result = object.__new__(type(self))
        vars(result).update(vars(self))
        reducer = self._reducer
        result._belong_to(container_strategy, Reducer(reducer.communicator, reducer.algorithm, reducer.options))
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
        checked_type(
            "StrategyExtended.cross_device_ops",
            "cross_device_ops",
            algorithm,
            CrossDeviceOps,
            "a CrossDeviceOps",
            fix="Assign an instance, such as MpiAllReduce().",
        )
        self._reducer.use(algorithm, self.options)

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
        checked_type(
            "StrategyExtended.options",
            "options",
            options,
            CommunicationOptions,
            "a CommunicationOptions",
            fix="Assign an instance; CommunicationOptions() has the defaults.",
        )
        self._reducer.use(self.cross_device_ops, options)

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
        where, values, destinations = "StrategyExtended.batch_reduce_to", value_destination_pairs, None
        self._require_collective(where)
        if isinstance(values, Iterable) and getattr(values, "shape", None) != ():
            values = list(values)
            if all(issubclass(kind, tuple) for kind in {*map(type, values)}) and {*map(len, values)} == {2}:
                values, destinations = map(list, zip(*values, strict=True))
        return self._reducer.run(where, _BatchReduceTo, reduce_op, values, options, name, destinations)  # type: ignore[no-any-return]

    @collective("broadcast")
    def broadcast_to(self, tensor: Any, destinations: Any, *, name: str | None = None) -> Any:
        """Send replica 0's value to `destinations`.  Collective; cross-replica context.

        Args:
            tensor: an array or a number, of equal shape and dtype on all ranks, or an `Arena`.  For a nest there is
                `Strategy.broadcast`.
            destinations: as in `reduce_to`.
            name: is compared between the ranks instead of the call site.

        Returns:
            A Mirrored, as in `reduce_to`.
        """
        self._require_collective("StrategyExtended.broadcast_to")
        with (
            self._reducer.entered(),
            Call(self.communicator.guard, "StrategyExtended.broadcast_to", called=name) as call,
        ):
            if isinstance(tensor, Arena):
                return tensor._broadcast(self._reducer, destinations, call)
            return self.cross_device_ops.broadcast(tensor, destinations)

    @collective("barrier")
    def barrier(self, name: str = "") -> None:
        """Wait until every rank has come here with the same `name`.  Collective.

        Raises:
            CollectiveMismatchError: on every rank, when another rank makes another call.
        """
        context.warn_if_alone(self._container_strategy, "barrier")
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
        context.require_same_strategy(frame, self._container_strategy, "StrategyExtended.update")
        context.check_call("StrategyExtended.update", fn, args, kwargs)
        if not self.variable_created_in_scope(var):
            raise OptionTypeError.at(
                "StrategyExtended.update",
                found=f"var={var!r}",
                expected="a variable created in this strategy's scope",
                fix="Create the variable inside `with strategy.scope():`.",
            )
        var._refuse_drift([*args, *(kwargs or {}).values()], "StrategyExtended.update")
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
        context.require_cross_replica(self._container_strategy, "StrategyExtended.update_non_slot")
        context.check_call("StrategyExtended.update_non_slot", fn, args, kwargs)
        is_worker = isinstance(colocate_with, tuple) and colocate_with == self.worker_devices
        if not is_worker and not self._container_strategy._is_default:
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
        return nest.map_structure(
            lambda leaf: Mirrored((leaf,)) if isinstance(leaf, np.ndarray) or is_on_device(leaf) else leaf, result
        )

    def call_for_each_replica(
        self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Call ``fn(*args, **kwargs)`` once on every replica, in replica context; `Strategy.run` is this."""
        refuse_in_jax_trace("Strategy.run")
        strategy, on_gpu = self._container_strategy, self.communicator.guard.on_gpu
        context.require_cross_replica(strategy, "Strategy.run")
        context.check_call("Strategy.run", fn, args, kwargs)
        step: contextlib.AbstractContextManager[Any] = _NOTHING
        if observers.observers:
            step = observers.interval("step", getattr(fn, "__name__", type(fn).__name__))
        frame = Frame(strategy, Mode.REPLICA, ReplicaContext(strategy, self.communicator.rank))
        with step, _NOTHING if on_gpu is None else on_gpu():  # whatever thread this is
            return context.call_in(frame, fn, *unwrapped(args, kwargs))

    # ---------------------------------------------------------------------------------- variables and devices

    def colocate_vars_with(self, colocate_with_variable: Variable) -> contextlib.AbstractContextManager[None]:
        """Colocate the variables created in the ``with`` block with another variable; only inside scope().

        Every replica has a copy of every variable, so there is nothing to do.

        Args:
            colocate_with_variable: a variable of this strategy.

        Raises:
            ContextError: outside scope().
            OptionError: when the argument is not a variable of this strategy.
        """
        where, frame = "StrategyExtended.colocate_vars_with", context.current_frame()
        if frame is None or frame.strategy is not self._container_strategy:
            raise ContextError.at(where, found="a call outside scope()", expected="a call inside strategy.scope()")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise OptionError.at(
                where, found=repr(colocate_with_variable), expected="a variable created in this strategy's scope"
            )
        return contextlib.nullcontext()

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

    #: The device of this rank's copies of the variables.
    parameter_devices = worker_devices

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
        """Whether this rank writes checkpoints, logs and summaries: rank 0 does."""
        return self.communicator.rank == 0

    should_save_summary = should_checkpoint

    def read_var(self, v: Variable, *, name: str | None = None) -> Array:
        """Return the value of a variable: of an ON_READ one, in cross-replica context, the aggregate (collective).

        Args:
            v: the variable.
            name: is compared between the ranks instead of the call site.

        Raises:
            OptionTypeError: when `v` is not a variable.
        """
        return checked_type("StrategyExtended.read_var", "v", v, Variable, "a Variable").read_value(name=name)

    def _require_collective(self, where: str) -> None:
        context.require_cross_replica(self._container_strategy, where)
        context.warn_if_alone(self._container_strategy, where)


call_sites.calls_steps(StrategyExtended.call_for_each_replica)


def _is_one_array(value: Any) -> bool:
    """Return whether a list or a tuple is one array: of numbers, in lists of any depth."""
    leaves, structure = nest.flatten_without_none(value)
    is_list = type(value) in (list, tuple) and {*structure.text} <= {*"[](),*"}
    return is_list and all(isinstance(leaf, (bool, str)) or is_python_number(leaf) for leaf in leaves)


def _leaves_of(value: Any) -> tuple[list[Any], nest.Structure]:
    """Return the leaves but None of a nest of values, and its structure."""
    return ([value], nest.LEAF) if _is_one_array(value) else nest.flatten_without_none(value)


class _ReduceTo(AllReduce):
    """`StrategyExtended.reduce_to`; the `out` of its calls are the destinations."""

    @staticmethod
    def kind_of_out(value: Any, out: Any) -> Any:
        """Return a key that tells destinations apart: device strings, or a value.

        Raises:
            TypeError: for destinations that must be examined in each call.
        """
        if out is value or isinstance(out, (np.ndarray, ArrayLike)):
            return np.ndarray
        if type(out) is str:
            return out
        raise TypeError

    def leaves_of(self, value: Any, out: Any) -> nest.Structure | None:
        """Return how to reach the arrays of a value; None for a list of numbers, which is one array."""
        return None if _is_one_array(value) else nest.leaves_of(value)

    def destination(self, value: Any, out: Any, where: str) -> Destination | None:
        """Return which ranks get the result."""
        return resolve(for_value(value, out), self.reducer.communicator, where)

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        reducer, algorithm = self.reducer, cast(CrossDeviceOps, self.reducer.algorithm)
        with reducer.entered():
            if isinstance(value, Arena):
                return value._all_reduce(self, call, destination=value._destination(out, call.where))
            call.structure = _leaves_of(value)[1].text
            if call.structure == nest.LEAF.text:
                return algorithm.reduce(self.argument, value, out, self.merged_options)
            return self.batch(call, [value], [out])[0]

    def batch(self, call: Call, values: list[Any], outs: list[Any]) -> list[Any]:
        """Return the reductions of values and nests of values, each to its destinations, in one batch."""
        nests = [*map(_leaves_of, values)]
        single = [
            (leaf, for_value(value, to))
            for value, to, (leaves, _) in zip(values, outs, nests, strict=True)
            for leaf in leaves
        ]
        if not single:
            call.agree("reduce", op=ReduceOp._parse(self.argument, call.where).value)
            return [structure.pack([]) for _, structure in nests]
        algorithm = cast(CrossDeviceOps, self.reducer.algorithm)
        results = iter(algorithm.batch_reduce(self.argument, single, self.merged_options))
        return [structure.rebuild(results) for _, structure in nests]


class _BatchReduceTo(_ReduceTo):
    """`StrategyExtended.batch_reduce_to`: a list of values, and a list of destinations as `out`."""

    @staticmethod
    def kind_of_out(value: Any, out: Any) -> Any:
        """Return a key that tells calls with one destination apart; see `_ReduceTo.kind_of_out`."""
        (where,) = {*map(_ReduceTo.kind_of_out, value, out)}
        return where

    def leaves_of(self, value: Any, out: Any) -> nest.Structure | None:
        """Return how to reach the arrays of all values; see `_ReduceTo.leaves_of`."""
        return None if out is None or any(map(_is_one_array, value)) else nest.leaves_of(value)

    def destination(self, value: Any, out: Any, where: str) -> Destination | None:
        """Return which ranks get the results."""
        return super().destination(value[0], out[0], where)

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reductions; see `CallPlan.run`."""
        with self.reducer.entered():
            if out is None:  # no pairs, which is refused
                return cast(CrossDeviceOps, self.reducer.algorithm).batch_reduce(self.argument, value)
            call.structure = f"[{','.join(_leaves_of(each)[1].text for each in value)}]"  # as that of a list
            return self.batch(call, value, out)
