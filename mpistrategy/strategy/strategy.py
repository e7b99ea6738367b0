"""Strategy: the object that a program holds, and the default strategy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from mpistrategy import context
from mpistrategy.arrays import nest
from mpistrategy.arrays.values import DistributedValues, PerReplica, ValueContext, local_component
from mpistrategy.context import Scope
from mpistrategy.errors import OptionError, OptionTypeError, RemoteError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.guard import CLOSE
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.objects.nearest import NamesOurs
from mpistrategy.objects.settings import Fixed, cannot_be_set
from mpistrategy.options import Mean, Op, ReduceOp
from mpistrategy.reduction.arena import Arena
from mpistrategy.reduction.broadcast import Broadcast
from mpistrategy.reduction.gather import Gather
from mpistrategy.reduction.reducer import Reduce
from mpistrategy.strategy.along_axis import reduce_along
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.strategy.input_methods import InputMethods
from mpistrategy.strategy.legacy_names import OldNames
from mpistrategy.strategy.outside_steps import warn_if_alone
from mpistrategy.strategy.random_streams import Streams
from mpistrategy.strategy.services import Services

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mpistrategy.strategy.overloads import Axis, Floats, Integers, Named, S, T, Ts, WithWeight
    from mpistrategy.variables.variable import Variable


class Strategy(NamesOurs, InputMethods, OldNames, Services):
    """Runs one program on all replicas and keeps their variables together.

    Args:
        extended: what does the work; see `StrategyExtended`.

    Attributes:
        extended: as given: the part for library authors, with destinations, updates and placement.

    Raises:
        OptionTypeError: when `extended` is none.
    """

    extended: Fixed[StrategyExtended] = Fixed(cannot_be_set)
    _words_of = "Strategy"
    _is_default = False

    def __init__(self, extended: StrategyExtended) -> None:
        if not isinstance(extended, StrategyExtended):
            raise OptionTypeError.at("Strategy", found=f"extended={extended!r}", expected="a StrategyExtended")
        self.extended = extended
        self._scope = Scope(self)  # of the strategy as a context manager

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part: the number of ranks."""
        return self.extended.communicator.size

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this rank's replica, in any context.  Not in tf.distribute."""
        return self.extended.communicator.rank

    @property
    def rank(self) -> int:
        """The number of this rank in the strategy: `replica_id_in_sync_group`."""
        return self.replica_id_in_sync_group

    @property
    def size(self) -> int:
        """How many ranks the strategy has: `num_replicas_in_sync`."""
        return self.num_replicas_in_sync

    @property
    def local_rank(self) -> int:
        """The number of this rank among the strategy's ranks on its node, from 0 on."""
        return self.extended.communicator.local_rank

    @property
    def devices_by_rank(self) -> tuple[str, ...]:
        """The device of every replica, in rank order."""
        return tuple(str(device) for device in self.extended.communicator.devices)

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Return a context manager that puts the thread into this strategy's cross-replica context.

        Variables created inside belong to the strategy.  May be nested in itself, not in another strategy's scope.

        Raises:
            ContextError: on entering, in a step function or in another strategy's scope.
        """
        return Scope(self)

    @overload
    def run(self, fn: Callable[[], T]) -> T: ...
    @overload
    def run(self, fn: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = None) -> T: ...
    @overload
    def run(self, fn: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T: ...
    @overload
    def run(self, fn: Callable[..., T], args: Sequence[Any] = (), *, kwargs: Mapping[str, Any]) -> T: ...
    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call ``fn(*args, **kwargs)`` once on every replica, in replica context; return this rank's result.

        Args:
            fn: the step function.
            args: PerReplica and Mirrored values, in any nest, are replaced by this rank's component; dataset elements
                are this rank's part already.
            kwargs: likewise.

        Raises:
            ContextError: inside a step function, or in another strategy's scope.
            OptionTypeError: when fn cannot be called, or args is not a sequence.
        """
        context.check_call("Strategy.run", fn, args, kwargs)
        context.require_cross_replica(self, "Strategy.run")
        return self.extended.call_for_each_replica(fn, args, kwargs)

    @overload  # a MEAN matches this overload and the next one
    def reduce(self, reduce_op: Mean, value: int, axis: Axis = None, **more: Unpack[WithWeight]) -> np.float64: ...  # type: ignore[overload-overlap]
    @overload
    def reduce(self, reduce_op: Mean, value: Integers, axis: Axis = None, **more: Unpack[WithWeight]) -> Floats: ...
    @overload
    def reduce(self, reduce_op: Op, value: int, axis: Axis = None, **more: Unpack[WithWeight]) -> np.int64: ...
    @overload
    def reduce(self, reduce_op: Op, value: float, axis: Axis = None, **more: Unpack[WithWeight]) -> np.float64: ...
    @overload
    def reduce(self, reduce_op: Op, value: NDArray[S], axis: Axis = None, **more: Unpack[WithWeight]) -> NDArray[S]: ...
    @overload
    def reduce(self, reduce_op: Op, value: Variable, axis: Axis = None, **more: Unpack[WithWeight]) -> NDArray[Any]: ...
    @overload
    def reduce(self, reduce_op: Op, value: Arena[T], axis: Axis = None, **more: Unpack[WithWeight]) -> T: ...
    @overload
    def reduce(self, reduce_op: Op, value: T, axis: Axis = None, **more: Unpack[WithWeight]) -> T: ...
    @collective("reduce")
    def reduce(
        self, reduce_op: Any, value: Any, axis: Any = None, *, weight: Any = None, name: str | None = None
    ) -> Any:
        """Reduce a value over the replicas, and along `axis` of each replica's array.  Collective.

        Args:
            reduce_op: a ReduceOp, or its name: "SUM", "MEAN", "MIN", "MAX", "PROD".
            value: this rank's value, e.g. what `run` returned; without axis also a nest of values, or an `Arena`,
                which is reduced in place.  None stays None; it must be None on every rank.
            axis: None reduces over the replicas only, and shapes must be equal.  An int (or a tuple of ints) also
                reduces along that axis, whose length may differ between ranks: SUM adds, MEAN divides by the total
                number of elements along it over all ranks.
            weight: for MEAN without axis, the weight of this rank's value.
            name: is compared between the ranks instead of the call site; for branches that differ by rank.

        Returns:
            The result, equal on every rank; NumPy scalars for scalars.

        Raises:
            ContextError: in a step function.
            ShapeError, OptionTypeError: for an axis that does not exist, or is not an int.
            ReduceOpError, DTypeError, LeafError, CollectiveMismatchError: on every rank.
        """
        context.require_cross_replica(self, "Strategy.reduce")
        if self._is_default:
            warn_if_alone(self, "Strategy.reduce")
        extended = self.extended
        if axis is None:
            return extended._reducer.run("Strategy.reduce", Reduce, reduce_op, value, name=name, weight=weight)
        with context.cross_replica(self), Call(extended.communicator.guard, "Strategy.reduce", called=name) as call:
            if isinstance(value, Arena):
                raise OptionError.at(call.where, found=f"axis={axis!r} with an arena", expected="axis=None")
            structure = nest.flatten_without_none(value)[1]
            call.structure = structure.text
            op = ReduceOp._parse(reduce_op, call.where)
            if extended._reducer.agrees_on_none(call, op, structure):
                return structure.pack([])
            if weight is not None:
                raise OptionError.at(call.where, found="weight= with axis=", expected="one of the two")
            return reduce_along(extended.cross_device_ops, extended.options, op, value, axis, call)

    @overload
    def gather(self, value: NDArray[S], axis: int, **more: Unpack[Named]) -> NDArray[S]: ...
    @overload
    def gather(self, value: Variable, axis: int, **more: Unpack[Named]) -> NDArray[Any]: ...
    @overload
    def gather(self, value: T, axis: int, **more: Unpack[Named]) -> T: ...
    @collective("gather")
    def gather(self, value: Any, axis: int, *, name: str | None = None) -> Any:
        """Concatenate the replicas' arrays along `axis`, in rank order.  Collective; cross-replica context.

        Args:
            value: this rank's array, or a nest of arrays; the length along `axis` may differ and may be 0.  None in a
                nest stays None.
            axis: an int; negative counts from the end.
            name: is compared between the ranks instead of the call site.

        Returns:
            The same on every rank.

        Raises:
            ContextError: in a step function.
            ShapeError: for scalars and an axis out of range.
            UnsupportedError: for IndexedSlices.
        """
        context.require_cross_replica(self, "Strategy.gather")
        if self._is_default:
            warn_if_alone(self, "Strategy.gather")
        return self.extended._reducer.run("Strategy.gather", Gather, axis, value, name=name)

    @overload
    def broadcast(self, value: int, root: int = 0, **more: Unpack[Named]) -> np.int64: ...
    @overload
    def broadcast(self, value: float, root: int = 0, **more: Unpack[Named]) -> np.float64: ...
    @overload
    def broadcast(self, value: NDArray[S], root: int = 0, **more: Unpack[Named]) -> NDArray[S]: ...
    @overload
    def broadcast(self, value: Variable, root: int = 0, **more: Unpack[Named]) -> NDArray[Any]: ...
    @overload
    def broadcast(self, value: T | None, root: int = 0, **more: Unpack[Named]) -> T: ...
    @collective("broadcast")
    def broadcast(self, value: Any, root: int = 0, *, name: str | None = None) -> Any:
        """Give every rank the value that rank `root` has.  Collective; in any context.

        Args:
            value: arrays, numbers, variables or containers, alone or in any nest; structure, dtypes and shapes are
                equal on all ranks.  Any dtype of fixed size, also bool and fixed-length strings.  A rank that is not
                the root may give None: structure, dtypes and shapes are sent to it first, which takes a message more,
                for NumPy arrays and numbers in dict, list and tuple.  In a nest None stays None.
            root: whose value it is.
            name: is compared between the ranks instead of the call site.

        Returns:
            A structure like `value`, equal on every rank, of plain values: a NumPy scalar for a number, an array for
            a variable.  The memory is its own.

        Raises:
            OptionTypeError, OptionError: for a root that is not a rank.
            LeafError, DTypeError, UnsupportedError, CollectiveMismatchError: on every rank.

        >>> import numpy as np, mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> strategy.broadcast({"seed": 7, "w": np.ones(2)})
        {'seed': np.int64(7), 'w': array([1., 1.])}
        """
        if self._is_default:
            warn_if_alone(self, "Strategy.broadcast")
        return self.extended._reducer.run("Strategy.broadcast", Broadcast, root, value, name=name)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return this rank's components of a value: a tuple of one (empty where the value does not live)."""
        if isinstance(value, DistributedValues):
            return value.values
        return (nest.map_structure(local_component, value),)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Call `value_fn` for this rank's replica and wrap what it returns in PerReplica, leaf by leaf; in any context.

        Raises:
            OptionTypeError: when `value_fn` is not a function.
        """
        context.check_call("Strategy.experimental_distribute_values_from_function", value_fn)
        communicator = self.extended.communicator
        value = value_fn(ValueContext(communicator.rank, communicator.size))
        return nest.map_structure(lambda leaf: PerReplica((leaf,), communicator), value)

    def rng(self, seed: int) -> Streams:
        """Return this replica's random streams for `seed`: a shared one, its own, and numbered ones; see `Streams`."""
        if self._is_default:
            warn_if_alone(self, "Strategy.rng")
        return Streams(seed, self.extended.communicator.rank)

    @collective("barrier")
    def barrier(self, name: str = "") -> None:
        """Wait until every rank has come here with the same `name`.  Collective.

        Raises:
            CollectiveMismatchError: on every rank, when another rank makes another call.
        """
        self.extended.barrier(name)

    def expect_long(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Announce that this rank will work for a long time while the others wait.  Rank-local; sends nothing.

        A rank that waits in a collective ends the job after `CommunicationOptions.timeout_seconds`.  While any rank is
        in this block, the others wait `seconds` longer.

        Args:
            seconds: how long the work may take.

        Raises:
            OptionError: for anything but a number of seconds above 0.

        >>> import mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> with strategy.expect_long(1800):
        ...     pass  # rank 0 writes a large file
        """
        from mpistrategy.mpi.watchdog import watchdog  # here, for the quick import

        return watchdog.expect_long(seconds, "Strategy.expect_long")

    @collective("close")
    def close(self) -> None:
        """Give the communicator back.  Collective; the strategy cannot be used afterwards.

        Done at the end of the program, too, and by ``with MirroredStrategy() as strategy:``.

        While an exception is handled (in ``except``, ``finally``, or by ``contextlib.closing``) it does not wait for
        the other ranks: this rank takes no more calls, and the others raise RemoteError.  After a failure of another
        rank it returns.  With ``on_error="raise"``, ranks that make another call meanwhile raise RemoteError.
        """
        communicator = self.extended.communicator
        guard = communicator.guard
        if (error := sys.exception()) is not None and not isinstance(error, SystemExit):
            guard.break_off(CLOSE, error)
        if guard.closed:
            guard.tell_of_failure()
            communicator.free()
        else:
            with Call(guard, CLOSE, anywhere=True) as call:
                try:
                    call.agree("close")
                except RemoteError:
                    if not guard.is_broken:  # else it takes no more calls
                        raise
                communicator.free()
        while guard.at_close:
            guard.at_close.pop()()

    def __enter__(self) -> Self:
        """Enter the `scope`; the outermost `with` block closes the strategy at its end.

        After an error it waits for nobody: this rank takes no more calls, and the other ranks raise RemoteError.
        """
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, trace)
        if self._scope.is_entered:
            return
        if error is None or self.size == 1:
            self.close()
        elif not isinstance(error, SystemExit):  # the end of the program tells the other ranks
            self.extended.communicator.guard.break_off("its with block", error)

    def __repr__(self) -> str:
        device = self.extended.worker_devices[0]
        return f"<{type(self).__name__} replica {self.rank} of {self.num_replicas_in_sync} on {device}>"


class _DefaultStrategy(Strategy):
    """The strategy of a thread that has entered none: one replica, on this rank."""

    _is_default = True

    def __init__(self) -> None:
        super().__init__(StrategyExtended(self))

    def close(self) -> None:
        """Do nothing: the default strategy is always there."""


@cache
def _default_strategy() -> Strategy:
    return _DefaultStrategy()


context.set_default_strategy_factory(_default_strategy)
