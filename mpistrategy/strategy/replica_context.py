"""ReplicaContext: how a step function talks to the other replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import numpy as np

from mpistrategy.arrays.values import Reducible
from mpistrategy.context import (
    Frame,
    Mode,
    Strategy,
    call_in,
    check_call,
    check_strategy,
    cross_replica,
    current_frame,
    current_strategy,
    in_words,
    require_same_strategy,
    warn_if_alone,
)
from mpistrategy.errors import ContextError, OptionError
from mpistrategy.mpi.contract.public_calls import collective, declared
from mpistrategy.objects.settings import NotPickled
from mpistrategy.options import CommunicationOptions, Op
from mpistrategy.reduction.asynchronous import AllReduceHandle, start_all_reduce
from mpistrategy.reduction.collectives import Gather, Scan, Scattered
from mpistrategy.reduction.inputs import unpacked
from mpistrategy.reduction.reducer import AllReduce

T = TypeVar("T")


class ReplicaContext(NotPickled):
    """What a step function knows about its replica, and how it talks to the others.

    `get_replica_context()` returns it inside `strategy.run`; entering one with `with` puts the thread into replica
    context.

    Args:
        strategy: the strategy.
        replica_id_in_sync_group: the number of this replica; None when it is not known.

    Raises:
        OptionError: for a replica id that is not an int.
    """

    _instead_of_pickling = "Call get_replica_context() where it is needed; send replica_id_in_sync_group."

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int | None) -> None:
        check_strategy(strategy, "ReplicaContext")
        if replica_id_in_sync_group is not None and not isinstance(replica_id_in_sync_group, (int, np.integer)):
            raise OptionError.at("ReplicaContext", found=f"{replica_id_in_sync_group=}", expected="an int or None")
        self._strategy = strategy
        self._replica_id = None if replica_id_in_sync_group is None else int(replica_id_in_sync_group)

    def __enter__(self) -> Self:
        require_same_strategy(current_frame(), self._strategy, "ReplicaContext.__enter__")
        Frame(self._strategy, Mode.REPLICA, self).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Frame(self._strategy, Mode.REPLICA, self).__exit__(kind, error, trace)

    @property
    def strategy(self) -> Any:
        """The strategy whose step function this is."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, from 0 on; the rank in the strategy's communicator."""
        if self._replica_id is None:
            raise OptionError.at(
                "ReplicaContext.replica_id_in_sync_group", found="no id", expected="a context made with an id"
            )
        return self._replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """This replica's device: a tuple of one device string."""
        return tuple(self._strategy.extended.worker_devices)

    @overload
    def all_reduce(
        self,
        reduce_op: Op,
        value: Reducible[T],
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
        out: Any = None,
        weight: Any = None,
    ) -> T: ...
    @overload
    def all_reduce(
        self,
        reduce_op: Op,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
        out: Any = None,
        weight: Any = None,
    ) -> T: ...
    @collective("allreduce", outside="strategy.reduce", may_skip_check=True)
    def all_reduce(
        self,
        reduce_op: Any,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
        out: Any = None,
        weight: Any = None,
    ) -> Any:
        """Reduce a nested structure over all replicas.  Collective.

        Args:
            reduce_op: a ReduceOp, or its name in any letter case: "SUM", "MEAN", "MIN", "MAX", "PROD".
            value: arrays, numbers, variables or IndexedSlices, alone or in any nest of dict, list, tuple, namedtuple
                and dataclass; structure, dtypes and shapes are equal on all ranks.  None stays None.
            options: hints; None for the strategy's own.
            name: is compared between the ranks instead of the call site; for branches that differ by rank.
            weight: for MEAN, the weight of this replica's values, e.g. its number of rows; the result is
                sum(weight * value) / sum(weight).
            out: a structure like `value` of arrays to write the result into; may be `value` itself.  An array in GPU
                memory takes the result of one in GPU memory.

        Returns:
            A structure like `value`, equal on every rank: a NumPy scalar for a scalar or a number, else an ndarray
            (`out`, where it is given).  A MEAN of integers is float32 (8 and 16 bits) or float64.

        Raises:
            ContextError: outside this context's step function.
            ReduceOpError, DTypeError, LeafError, EmptyBatchError: for bad input on any rank, raised on every rank.
            CollectiveMismatchError: on every rank, before data moves, when structures, dtypes, shapes or calls differ.

        >>> import numpy as np, mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> def step():
        ...     return ms.get_replica_context().all_reduce("SUM", {"loss": 2.0, "grads": [np.ones(2)]})
        >>> strategy.run(step)
        {'loss': np.float64(2.0), 'grads': [array([1., 1.])]}
        """
        return self._in_step(where := "ReplicaContext.all_reduce")(
            where, AllReduce, reduce_op, value, options, name, out, weight
        )

    @overload
    def all_reduce_async(
        self,
        reduce_op: Op,
        value: Reducible[T],
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
        out: Any = None,
    ) -> AllReduceHandle[T]: ...
    @overload
    def all_reduce_async(
        self,
        reduce_op: Op,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
        out: Any = None,
    ) -> AllReduceHandle[T]: ...
    @collective("allreduce_async", outside="strategy.reduce")
    def all_reduce_async(
        self,
        reduce_op: Any,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
        out: Any = None,
    ) -> AllReduceHandle[Any]:
        """Start `all_reduce` and return at once; the handle's `wait` returns the result.  Collective.

        On several nodes the values travel while the step goes on computing.  Several may be under way; every rank
        starts them, and waits for them, in the same order.  On a single node, and where the MPI was not started for
        several threads, the reduction is done before this returns, or raises: the ranks have no core to spare for it.
        Arrays in GPU memory are reduced on a stream of their own; `wait` makes the current stream wait, not the host.

        Args:
            reduce_op: as in `all_reduce`.
            value: as in `all_reduce`; leave its arrays and variables as they are until `wait` has returned.
            options: hints; None for the strategy's own.
            name: is compared between the ranks instead of the call site.
            out: a structure like `value` of arrays to write the result into; may be `value` itself.  Not to be read
                before `wait` has returned.

        Returns:
            A handle; where the reduction goes on in the background, `wait` also raises what `all_reduce` would have
            raised, on every rank.

        Raises:
            ContextError: outside this context's step function.
            CollectiveMismatchError: on every rank, when this is the first such call and another rank makes another;
                where the reduction is done here, when the calls differ in anything.
            MpiStrategyError: where the reduction is done here, as `all_reduce`.

        >>> import numpy as np, mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> def step():
        ...     total = ms.get_replica_context().all_reduce_async("SUM", np.ones(2))
        ...     other_work = 6 * 7
        ...     return total.wait()
        >>> strategy.run(step)
        array([1., 1.])
        """
        frame, reducer = current_frame(), self._strategy.extended._reducer
        if frame is not None and frame.replica_context is self:
            return start_all_reduce(reducer, reduce_op, value, options, name, out)
        with self._outside_steps(frame, "ReplicaContext.all_reduce_async"):
            return start_all_reduce(reducer, reduce_op, value, options, name, out)

    @collective("gather", outside="strategy.gather")
    def all_gather(
        self, value: T, axis: int, options: CommunicationOptions | None = None, *, name: str | None = None
    ) -> T:
        """Concatenate the replicas' arrays along `axis`, in rank order.  Collective.

        Args:
            value: an array or a nest of arrays; the length along `axis` may differ between ranks, and may be 0.
            axis: an int; negative counts from the end.
            options: hints; None for the strategy's own.
            name: is compared between the ranks instead of the call site.

        Returns:
            A structure like `value`; the same on every rank.

        Raises:
            ContextError: outside this context's step function.
            ShapeError: for scalars and for an axis out of range.
            CollectiveMismatchError: when dtypes, structures or the other axes differ between the ranks.
        """
        return self._in_step(where := "ReplicaContext.all_gather")(where, Gather, axis, value, options, name)  # type: ignore[no-any-return]

    @collective("reduce_scatter", outside="strategy.reduce", may_skip_check=True)
    def reduce_scatter(
        self,
        reduce_op: Op,
        value: T,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
    ) -> T:
        """Reduce arrays over all replicas, and return this rank's part along `axis`.  Collective.

        The parts are contiguous, in rank order, and as those of a dataset's batch: of `length` elements each rank has
        ceil(length / ranks), the last ranks fewer or none.  `all_gather` of the parts along the axis gives what
        `all_reduce` of the value gives, with the same bits.

        Args:
            reduce_op: as in `all_reduce`.
            value: an array or a nest of arrays with one axis or more; dtypes and shapes are equal on all ranks.
            axis: an int; negative counts from the end.
            options: hints; None for the strategy's own.
            name: is compared between the ranks instead of the call site.

        Returns:
            A structure like `value` of this rank's parts, in memory of their own.  A MEAN of integers is float32 (8 and
            16 bits) or float64.

        Raises:
            ContextError: outside this context's step function.
            ShapeError, OptionTypeError: for scalars, an axis out of range, and one that is not an int.
            UnsupportedError: for IndexedSlices.
            ReduceOpError, DTypeError, LeafError, EmptyBatchError: as `all_reduce`, on every rank.
            CollectiveMismatchError: on every rank, when structures, dtypes, shapes, axes or calls differ.

        >>> import numpy as np, mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> strategy.run(lambda: ms.get_replica_context().reduce_scatter("SUM", np.arange(4.0)))
        array([0., 1., 2., 3.])
        """
        run = self._in_step(where := "ReplicaContext.reduce_scatter")
        return run(where, Scattered, reduce_op, value, options, name, axis)  # type: ignore[no-any-return]

    @collective("scan", outside="strategy.gather", may_skip_check=True)
    def scan(
        self,
        reduce_op: Op,
        value: T,
        exclusive: bool = False,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
    ) -> T:
        """Combine the values of replicas 0 to this one, in rank order: a prefix reduction, MPI's Scan.  Collective.

        Args:
            reduce_op: "SUM", "MIN", "MAX" or "PROD", or the ReduceOp.
            value: as in `all_reduce`, without IndexedSlices and arenas.
            exclusive: leave out this replica's own value, as MPI's Exscan does.  Replica 0 gets what changes nothing:
                0 for SUM, 1 for PROD, for MIN and MAX the infinity or the end of the range of an integer.
            options: hints; None for the strategy's own.
            name: is compared between the ranks instead of the call site.

        Returns:
            A structure like `value`; each result has its value's dtype and shape.  The 16-bit floats are combined in
            float32 and rounded once.  Equal runs have equal bits.  Arrays in GPU memory go through the host.

        Raises:
            ContextError: outside this context's step function.
            ReduceOpError: for a MEAN, too, whose divisor would be another one on each rank.
            OptionTypeError, DTypeError, LeafError, UnsupportedError: on every rank, for bad input.
            CollectiveMismatchError: on every rank, when structures, dtypes, shapes, operations or calls differ.

        >>> import mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> strategy.run(lambda: ms.get_replica_context().scan("SUM", 3, exclusive=True))
        np.int64(0)
        """
        argument = reduce_op, exclusive, type(exclusive)  # a plan is found by it: 1 and True are equal
        return self._in_step(where := "ReplicaContext.scan")(where, Scan, argument, value, options, name)  # type: ignore[no-any-return]

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context and return what it returns.

        Every rank calls its own merge_fn once, with its own arguments; nothing communicates unless merge_fn does.

        Returns:
            What merge_fn returned.  A PerReplica or a Mirrored, alone or in a nest, is replaced by this rank's plain
            value; a Mirrored that lives on other ranks only stays as it is.

        Raises:
            ContextError: outside this context's step function.
            OptionTypeError: when merge_fn cannot be called, or args is not a sequence.
        """
        frame = current_frame()
        if frame is None or frame.replica_context is not self:
            self._outside_steps(frame, "ReplicaContext.merge_call", is_collective=False)
        check_call("ReplicaContext.merge_call", merge_fn, args, kwargs)
        with cross_replica(self._strategy):
            return unpacked(merge_fn(self._strategy, *args, **(kwargs or {})))

    def _in_step(self, where: str) -> Callable[..., Any]:
        """Return `Reducer.run`, for a collective of this context."""
        frame, run = current_frame(), self._strategy.extended._reducer.run
        if frame is not None and frame.replica_context is self:
            return run  # type: ignore[no-any-return]
        outside = self._outside_steps(frame, where)
        return lambda *call: call_in(outside, run, call, {})

    def _outside_steps(self, frame: Frame | None, where: str, *, is_collective: bool = True) -> Frame:
        """Return what must be entered to communicate in `frame`, this thread's, which is not of this context.

        Raises:
            ContextError: in any context but none, and for a collective whose declaration names no call outside steps.
        """
        if frame is None and self._strategy is current_strategy():
            call = declared.get(where)
            if call is not None and call.outside:
                warn_if_alone(
                    self._strategy,
                    where,
                    "was called outside every step",
                    f"Call it in the function given to strategy.run; outside a step use {call.outside}.",
                )
            elif is_collective:
                raise ContextError.at(
                    where,
                    found="a call outside every step",
                    expected="a call in replica context (inside a step function)",
                    fix="Call it in the function given to `strategy.run`.",
                )
            return Frame(self._strategy, Mode.REPLICA, self)
        raise ContextError.at(
            where,
            found=f"a call in {in_words(frame)} through a replica context that this thread is not in",
            expected="a call through the context of the running step function",
            fix="Call get_replica_context() anew in each step, in the function given to `strategy.run`; outside steps, "
            "use strategy.reduce or strategy.extended.",
        )

    def __repr__(self) -> str:
        return f"ReplicaContext(replica {self._replica_id} of {self.num_replicas_in_sync})"
