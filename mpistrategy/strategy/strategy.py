"""Strategy: the object that a program holds, the default strategy, and the functions that return this thread's."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from types import TracebackType
from typing import (
    Any,
    Literal,
    Self,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    TypeVarTuple,
    cast,
    overload,
)

import numpy as np
from numpy.typing import NDArray

from mpistrategy import context
from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import (
    any_array,
    host_array,
    is_on_device,
    like_given,
    on_device_of,
    placed_as,
    reducible,
)
from mpistrategy.arrays.digests import digest, outliers
from mpistrategy.arrays.dtypes import (
    COMBINE,
    dtype_name,
    host_wire_dtype,
    quietly,
    sum_dtype_of_mean,
    wire_dtype,
)
from mpistrategy.arrays.values import (
    DistributedValues,
    PerReplica,
    Reducible,
    ValueContext,
    contribution,
    event_of_reads,
    local_component,
)
from mpistrategy.context import Scope
from mpistrategy.errors import (
    CopyError,
    EmptyBatchError,
    OptionError,
    OptionTypeError,
    RemoteError,
    ReplicasDivergedError,
    ShapeError,
)
from mpistrategy.input.distributed import DistributedDataset, DistributedDatasetsFromFunction, check_iterable, describe
from mpistrategy.input.first_batches import LEVELS
from mpistrategy.input.iterators import DatasetIterator, DistributedIterator, InputFunctionIterator
from mpistrategy.input.options import InputContext, InputOptions
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.guard import CLOSE
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.kept import Kept, Leaf, ObjectAt, PathOf
from mpistrategy.objects.other_names import NamesOurs
from mpistrategy.objects.settings import Fixed, NotPickled, checked_count, checked_type, one_of
from mpistrategy.options import (
    CommunicationOptions,
    InputReplicationMode,
    Op,
    ReduceOp,
    ReplicationMode,
    VariableSynchronization,
    checked_member,
)
from mpistrategy.reduction.arena import Arena
from mpistrategy.reduction.collectives import Broadcast, Gather, checked_axis, identity
from mpistrategy.reduction.inputs import own_component
from mpistrategy.reduction.reducer import General, Reduce
from mpistrategy.reduction.transfer import finish
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.variables.variable import Variable

T = TypeVar("T")
E = TypeVar("E")
#: The arguments of a step function.
Ts = TypeVarTuple("Ts")
#: The argument that says how first batches are compared.
CheckBatches: TypeAlias = Literal["warn", "raise", "off", "WARN", "RAISE", "OFF"]
#: The types of the argument `options` of datasets.
_OPTIONS = (InputOptions, type(None))
#: The most variables that a report names.
_MOST_ROWS = 10


class Strategy(NotPickled, NamesOurs):
    """Runs one program on all replicas and keeps their variables together.

    Args:
        extended: does the work; see `StrategyExtended`.

    Attributes:
        extended: the argument: the part for library authors, with destinations, updates and placement.

    Raises:
        OptionTypeError: when `extended` is not a StrategyExtended.
    """

    extended: Fixed[StrategyExtended] = Fixed()
    _instead_of_pickling = (
        "Send arrays, such as np.asarray(variable), or the name of a Checkpoint, and make what is needed there."
    )
    _is_default = False

    def __init__(self, extended: StrategyExtended) -> None:
        self.extended = checked_type("Strategy", "extended", extended, StrategyExtended, "a StrategyExtended")
        self._depth = 0  # of `with strategy:` blocks

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part: the number of ranks; short `size`."""
        return self.extended.communicator.size

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this rank's replica, in any context; short `rank`.  Not in tf.distribute."""
        return self.extended.communicator.rank

    #: Short names.
    rank = replica_id_in_sync_group
    size = num_replicas_in_sync

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
        return Scope(self, context.Mode.CROSS_REPLICA)

    @overload
    def run(self, fn: Callable[[], T]) -> T: ...
    @overload
    def run(self, fn: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = None) -> T: ...
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
        return self.extended.call_for_each_replica(fn, args, kwargs)

    #: Its old name.
    experimental_run_v2 = run

    @overload
    def reduce(
        self,
        reduce_op: Op,
        value: Reducible[T],
        axis: int | Sequence[int] | None = None,
        *,
        weight: Any = None,
        name: str | None = None,
    ) -> T: ...
    @overload
    def reduce(
        self,
        reduce_op: Op,
        value: T,
        axis: int | Sequence[int] | None = None,
        *,
        weight: Any = None,
        name: str | None = None,
    ) -> T: ...
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
        self.extended._require_collective("Strategy.reduce")
        if axis is None:
            return self.extended._reducer.run("Strategy.reduce", Reduce, reduce_op, value, None, name, None, weight)
        argument = reduce_op, axis, type(axis)  # checked calls are looked up by the type, too: 1 and True are equal
        return self.extended._reducer.run("Strategy.reduce", ReduceAlong, argument, value, None, name, None, weight)

    @collective("gather")
    def gather(self, value: T, axis: int, *, name: str | None = None) -> T:
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
        self.extended._require_collective("Strategy.gather")
        return self.extended._reducer.run("Strategy.gather", Gather, axis, value, name=name)  # type: ignore[no-any-return]

    @collective("broadcast")
    def broadcast(self, value: T | None, root: int = 0, *, name: str | None = None) -> T:
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
        context.warn_if_alone(self, "Strategy.broadcast")
        return self.extended._reducer.run("Strategy.broadcast", Broadcast, root, value, name=name)  # type: ignore[no-any-return]

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
        context.warn_if_alone(self, "Strategy.rng")
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
            OptionError, OptionTypeError: for anything but a number of seconds above 0.

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
                    if not guard.closed:  # else it takes no more calls
                        raise
                communicator.free()
        while guard.at_close:
            guard.at_close.pop()()

    # ---------------------------------------------------------------------- arenas, routes, comparing variables

    @overload
    def arena(
        self, like: Sequence[Variable], *, shared_result: bool = False, name: str | None = None
    ) -> Arena[Sequence[NDArray[Any]]]: ...
    @overload
    def arena(self, like: T, *, shared_result: bool = False, name: str | None = None) -> Arena[T]: ...
    def arena(self, like: Any, *, shared_result: bool = False, name: str | None = None) -> Arena[Any]:
        """Lay out a nest of arrays so that reducing it copies nothing.  Collective.

        Args:
            like: arrays, numbers or variables in any nest; only structure, shapes and dtypes count.
            shared_result: give all ranks of a node one read-only result, and leave `values` as they are.
            name: is compared between the ranks instead of the call site.

        Returns:
            An `Arena`: fill its `values` in place, then ``context.all_reduce(op, arena)``.

        Raises:
            EmptyBatchError, DTypeError, LeafError, CollectiveMismatchError: on every rank.

        >>> import numpy as np, mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> arena = strategy.arena({"w": np.ones((2, 2)), "b": np.ones(2)})
        >>> arena.values["b"][...] = 1
        >>> strategy.reduce("SUM", arena)["b"]
        array([1., 1.])
        """
        return Arena(self, like, shared_result=shared_result, name=name)

    def explain(self, value: Any, reduce_op: Op = "SUM", options: CommunicationOptions | None = None) -> str:
        """Say which route an all_reduce of `value` would take: in any context, on any number of ranks; nothing is sent.

        Args:
            value: what would be reduced: a nest of arrays, numbers, variables and None, or an `Arena`.
            reduce_op: a ReduceOp, or its name.
            options: hints; None for the strategy's own.

        Returns:
            The text, which replica 0 also prints: the buffers that are made of the value, the way that each takes,
            what is copied, and where the thresholds come from.

        Raises:
            ReduceOpError, DTypeError, LeafError, EmptyBatchError, ContextError: as all_reduce, but on this rank alone.

        >>> import numpy as np, mpistrategy as ms
        >>> text = ms.OneDeviceStrategy("CPU:0").explain([np.ones(3), 2.0])
        all_reduce SUM of 2 arrays, 32 B, on 1 rank of 1 node by MpiAllReduce
          2 arrays in 1 buffer, float64, 32 B: stays here, the only replica
            copies: all into the pack
          thresholds: the defaults
        """
        text = self.extended._reducer.explain(value, reduce_op, options)
        if self.extended._reducer.communicator.rank == 0:
            print(text)
        return text

    def layout(self) -> dict[str, Any]:
        """Return what the bits of sums depend on besides the values: ranks, nodes, algorithm, options, thresholds.

        It also has the buckets of `Optimizer.gradient_buckets` so far: the numbers of the variables in each
        bucket, in the order of reduction.
        Two runs of one version with the same layout give the same bits.  It is the same on all ranks and consists of
        what JSON can hold, to be kept beside results; `source` is for people alone.  Never communicates.
        """
        extended = self.extended
        communicator, algorithm = extended._reducer.communicator, extended._reducer.algorithm
        return {
            "ranks": communicator.size,
            "node_of": list(communicator.node_of),
            "mpi": communicator.library,
            "shared_memory": communicator.shares_memory,
            "algorithm": algorithm._configuration,
            "bytes_per_pack": int(extended._reducer.options.bytes_per_pack),
            "wire": extended._reducer.options.wire,
            "thresholds": communicator.thresholds.sizes(),
            "gradient_buckets": [[list(members) for members in order] for order in extended._bucket_orders],
            "source": communicator.thresholds.source,
        }

    def assert_mirrored(self, variables: Any = None, *, name: str | None = None) -> None:
        """Make sure that mirrored variables have the same bits on all ranks.  Collective; in any context.

        Each rank reads its copies and sends 16 bytes; where the copies differ, 16 more for each variable.  Most of the
        time is hashing: 0.6 to 0.9 GB/s was measured on one core.

        Args:
            variables: a nest of variables, and of objects with an attribute `variables`, such as optimizers.  None
                checks all variables of this strategy that are still in use on every rank, with slots and step
                counters of optimizers.  The copies of ON_READ variables may differ: they are skipped, and refused
                where the nest names them.
            name: is compared between the ranks instead of the call site.

        Raises:
            ReplicasDivergedError: on every rank, with a table of the variables that differ, and the ranks that differ
                from the majority.  -0.0 differs from 0.0, and NaN from NaN with other bits.
            OptionError, OptionTypeError, EmptyBatchError: on every rank, when `variables` has anything but mirrored
                variables of this strategy, or none.
            CollectiveMismatchError: on every rank, when the ranks name different variables.

        >>> import mpistrategy as ms
        >>> strategy = ms.OneDeviceStrategy("CPU:0")
        >>> with strategy.scope():
        ...     weights = ms.Variable([1.0, 2.0])
        >>> strategy.assert_mirrored([weights])
        """
        extended, communicator = self.extended, self.extended.communicator
        with Call(communicator.guard, "Strategy.assert_mirrored", called=name) as call:
            if variables is None:
                variables_by_number = {number: var for number, var in extended._variables.items() if is_mirrored(var)}
                call.structure = f"all of {extended._variables_made} variables"
            else:
                variables_by_number = dict(enumerate(_mirrored_in(extended, variables, call.where)))
                call.structure = ", ".join(var._key for var in variables_by_number.values())
            if communicator.size == 1:
                return
            # A rank that cannot read its copy, for lack of memory, still tells the others.
            call.expect_more()
            own_digests = {number: digest(host_array(var.local_view)) for number, var in variables_by_number.items()}
            call.agree("compare copies")
            if len({*communicator.allgather_text(f"{digest(np.array([*own_digests.items()], np.uint64)):x}")}) == 1:
                return
            texts = communicator.allgather_text(
                " ".join(f"{number}={value:x}" for number, value in own_digests.items())
            )
            of_ranks = [dict(pair.split("=") for pair in text.split()) for text in texts]
            # Variables that some rank has collected are left out.
            digests_by_variable = [
                (var, [rank_digests[str(number)] for rank_digests in of_ranks])
                for number, var in variables_by_number.items()
                if all(str(number) in rank_digests for rank_digests in of_ranks)
            ]
            if differing := [(var, *outliers(digests)) for var, digests in digests_by_variable if len({*digests}) > 1]:
                raise _diverged(call.where, differing, len(variables_by_number))

    # ------------------------------------------------------------------------------------------------ input

    def distribute_dataset(
        self,
        dataset: Iterable[E],
        options: InputOptions | None = None,
        *,
        drop_remainder: bool = False,
        pad: bool = False,
        check_batches: CheckBatches = "warn",
        name: str | None = None,
    ) -> DistributedDataset[E]:
        """Return a dataset that gives each rank its part of every global batch.  Collective.

        Args:
            dataset: a `Dataset`, or any iterable (a list, a generator, an object that can be iterated anew) of global
                batches: arrays or nests of arrays with equal first axes.  Every rank iterates over the same batches.
            options: accepted for TensorFlow's sake.
            drop_remainder: leave out the rows that would make the ranks' parts unequal.
            pad: fill the ranks' parts up with zeros until they are equal.
            check_batches: what to do when the first batch that an iterator takes has other rows on another rank:
                "warn" on rank 0 with a DatasetWarning, "raise", or "off": compare nothing.  The first element of an
                iterator is collective with the former two.  Of a large batch the first rows of each array are
                compared, 1 MiB in all; arrays whose bytes cannot be had (of objects, sparse ones) are left
                out.
            name: is compared between the ranks instead of the call site, for this call and for the iterators.

        Returns:
            An iterable of this rank's contiguous parts, a `DistributedDataset`; for the default strategy `dataset`
            itself.

        Raises:
            OptionTypeError, OptionError, BatchError: on every rank; see `DistributedDataset`.
            CollectiveMismatchError: on every rank, for datasets known to differ; from the first element of an iterator,
                for first batches of another structure, shape or dtype, none on some rank, another number of batches,
                and with "raise" for other rows.
        """
        extended, communicator, where = self.extended, self.extended.communicator, "Strategy.distribute_dataset"
        with Call(communicator.guard, where, called=name) as call:
            checked_type(where, "options", options, _OPTIONS, "an InputOptions or None")
            level, number = one_of(where, "check_batches", check_batches, LEVELS), extended._datasets_made + 1
            first = communicator, level, f"dataset {number} of the strategy", name
            distributed = DistributedDataset(
                dataset, communicator.rank, communicator.size, drop_remainder=drop_remainder, pad=pad, first=first
            )
            call.structure = describe(dataset)
            call.agree("distribute a dataset", op=f"{drop_remainder=}, {pad=}, check_batches={level!r}")
            extended._datasets_made = number  # after the agreement: the ranks' counts must not differ
        context.warn_if_alone(self, where)
        return cast("DistributedDataset[E]", dataset) if self._is_default else distributed

    #: The name that TensorFlow has for it.
    experimental_distribute_dataset = distribute_dataset

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[E]],
        options: InputOptions | None = None,
        *,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> DistributedDatasetsFromFunction[E]:
        """Call `dataset_fn` once on each rank and return what it returns, as an iterable in step with the other ranks.

        Collective, and so is iterating.  The batches are used as they are: `dataset_fn` batches for one replica
        (`context.get_per_replica_batch_size`) and picks the rank's share of the data (`context.input_pipeline_id` of
        `context.num_input_pipelines`).

        Args:
            dataset_fn: gets an `InputContext`, returns an iterable of batches.
            options: accepted for TensorFlow's sake.
            drop_remainder: end with the first rank that has no more batches; otherwise it goes on with empty ones.
            name: is compared between the ranks instead of the call site, for this call and for the iterators.

        Raises:
            OptionTypeError: on every rank, when `dataset_fn` is not a function, or does not return an iterable.
            Exception: what `dataset_fn` raises; RemoteError on the other ranks.
        """
        where, communicator = "Strategy.distribute_datasets_from_function", self.extended.communicator
        with Call(communicator.guard, where, called=name) as call:
            context.check_call(where, dataset_fn)
            checked_type(where, "options", options, _OPTIONS, "an InputOptions or None")
            with call.guard.own_work():
                dataset = dataset_fn(InputContext(communicator.size, communicator.rank, communicator.size))
            check_iterable(dataset, where)
            call.agree("make input")
        context.warn_if_alone(self, where)
        if self._is_default:
            return cast("DistributedDatasetsFromFunction[E]", dataset)  # it acts as a distributed one
        return DistributedDatasetsFromFunction(dataset, communicator, drop_remainder=drop_remainder, name=name)

    #: The name that TensorFlow had for it.
    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def make_dataset_iterator(self, dataset: Iterable[E], *, name: str | None = None) -> DatasetIterator[E]:
        """Return an iterator over this rank's parts of the global batches of `dataset`.  Collective.

        Args:
            dataset: as in `distribute_dataset`.
            name: is compared between the ranks instead of the call site, for this call and for the iterator.

        Returns:
            An iterator with `initialize()`, which starts again, and `get_next()`, which raises OutOfRangeError after
            the last batch; to be given to `experimental_run`.

        Raises:
            OptionTypeError, BatchError: as `distribute_dataset`.
        """
        return DatasetIterator(self.distribute_dataset(dataset, name=name))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Iterable[E]],
        replication_mode: ReplicationMode = InputReplicationMode.PER_WORKER,
        *,
        name: str | None = None,
    ) -> InputFunctionIterator[E]:
        """Return an iterator over what `input_fn`, called once on each rank, returns.  Collective.

        Args:
            input_fn: as `dataset_fn` of `distribute_datasets_from_function`.
            replication_mode: PER_WORKER.
            name: is compared between the ranks instead of the call site, for this call and for the iterator.

        Returns:
            An iterator as that of `make_dataset_iterator`.

        Raises:
            OptionError: for another replication mode.
            OptionTypeError: as `distribute_datasets_from_function`.
        """
        where = "Strategy.make_input_fn_iterator"
        mode = checked_member(InputReplicationMode, replication_mode, where, "replication_mode")
        if mode is not InputReplicationMode.PER_WORKER:
            raise OptionError.at(where, found=f"{replication_mode=}", expected="InputReplicationMode.PER_WORKER")
        return InputFunctionIterator(self.distribute_datasets_from_function(input_fn, name=name))

    # --------------------------------------------------------------------------- names of TensorFlow 1; copies

    def experimental_run(self, fn: Callable[..., T], input_iterator: DistributedIterator[Any] | None = None) -> T:
        """Run ``fn(element)`` on every replica, with this rank's next element of `input_iterator`.

        Args:
            fn: the step function; without an iterator it is called without arguments.
            input_iterator: what `make_dataset_iterator` or `make_input_fn_iterator` returned.

        Raises:
            OutOfRangeError: after the iterator's last element.
            ContextError, OptionTypeError: as `run`.
        """
        if input_iterator is None:
            return self.run(fn, kwargs={})
        checked_type(
            "Strategy.experimental_run",
            "input_iterator",
            input_iterator,
            DistributedIterator,
            "an iterator with get_next()",
            fix="Pass what make_dataset_iterator(dataset) returns.",
        )
        with self.scope():
            element = input_iterator.get_next()
        return self.run(fn, (element,), kwargs={})

    def experimental_initialize(self) -> list[Any]:
        """Return an empty list: nothing must run before the first step, nor after the last one."""
        return []

    experimental_finalize = experimental_initialize

    def update_config_proto(self, config_proto: T) -> T:
        """Return a shallow copy of `config_proto`: a new object with the same attributes, unchanged.

        TensorFlow fits the configuration of its sessions to the strategy here; there is no session to configure.
        """
        return copy.copy(config_proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a strategy of its own with the same ranks: the copy shares the communicator, and its close().

        Variables of the original are not the copy's.

        Raises:
            CopyError: for the default strategy, of which there is one.
        """
        if self._is_default:
            raise CopyError.at("copy.deepcopy(strategy)", found="the default strategy", expected="another strategy")
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.extended, result._depth = self.extended._copy_for(result), 0
        for name in vars(self).keys() - vars(result).keys():
            setattr(result, name, copy.deepcopy(getattr(self, name), memo))
        return result

    # ------------------------------------------------------------------------------- the strategy as a context

    def __enter__(self) -> Self:
        """Enter the `scope`; the outermost `with` block closes the strategy at its end.

        After an error this rank takes no more calls, and closes the strategy for itself; the other ranks raise
        RemoteError.
        """
        self.scope().__enter__()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.scope().__exit__(kind, error, trace)
        self._depth -= 1
        if self._depth or (self.size > 1 and isinstance(error, SystemExit)):  # the program's end tells the other ranks
            return
        if error is not None:
            self.extended.communicator.guard.break_off("its with block", error)
        self.close()

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


context.default_strategy.append(cache(_DefaultStrategy))


# ------------------------------------------------------------------------- the strategy and the context of this thread


def get_strategy() -> Strategy:
    """Return the strategy whose scope or step function this thread is in; the default strategy elsewhere."""
    return context.current_strategy()  # type: ignore[no-any-return]


def strategy_for(strategy: Strategy | None, where: str) -> Strategy:
    """Return `strategy`, or for None `get_strategy()`; warn where that leaves out the other ranks."""
    resolved = get_strategy() if strategy is None else strategy
    context.check_strategy(resolved, where)
    if strategy is None:
        context.warn_if_alone(resolved, where)
    return resolved


def has_strategy() -> bool:
    """Return whether this thread is in the scope, a step function or an update of another than the default strategy."""
    frame = context.current_frame()
    return frame is not None and not frame.strategy._is_default


def get_replica_context() -> ReplicaContext:
    """Return the ReplicaContext of this thread; None in cross-replica and update context.

    (Its type leaves None out, so that step functions need not check for it.)

    Outside every strategy it is the context of the default strategy, which has one replica.  Its reductions and gathers
    stay on this rank, with an OutsideStepWarning once a strategy of several ranks was made.
    """
    frame = context.current_frame()
    return frame.replica_context if frame else get_strategy().extended._default_replica_context


def in_cross_replica_context() -> bool:
    """Return whether this thread is in cross-replica (or update) context."""
    frame = context.current_frame()
    return frame is not None and frame.mode is not context.Mode.REPLICA


# --------------------------------------------------------------------------------------------------- random streams

_SHARED, _REPLICA, _NUMBERED = range(3)


class Streams(Kept):
    """The random generators of one replica; made by `Strategy.rng(seed)`.

    There is one shared by all replicas, one of each replica, and one for anything that has a number.  All come from
    one seed through NumPy's SeedSequence (https://numpy.org/doc/stable/reference/random/parallel.html), so that
    different streams are independent and equal seeds give equal numbers on every machine.

    Make it once, outside the step function: each one made starts its streams from the beginning.

    Args:
        seed: an int from 0 on, equal on every replica.
        replica_id: this replica's number.

    Raises:
        OptionTypeError, OptionError: for a seed that is not an int, or negative.
        ContextError: for every use in a function that JAX traces, where numbers are drawn once for many calls.

    >>> import mpistrategy as ms
    >>> streams = ms.OneDeviceStrategy().rng(7)
    >>> bool(streams.at(3, 5).random() == streams.at(3, 5).random())
    True
    """

    _kept_as = "streams"
    #: The seed that it was made with.
    seed: Fixed[int] = Fixed()

    def __init__(self, seed: SupportsIndex, replica_id: int) -> None:
        self.seed = checked_count("Strategy.rng", "seed", seed, least=0)
        self._shared = self._generator(_SHARED)
        self._replica = self._generator(_REPLICA, replica_id)

    @property
    def shared(self) -> np.random.Generator:
        """A numpy.random.Generator that gives the same numbers on every replica, whatever their number.

        All replicas must draw alike from it: initial values, shuffling.
        """
        refuse_in_jax_trace("Streams.shared")
        return self._shared

    @property
    def replica(self) -> np.random.Generator:
        """A Generator with this replica's own numbers; replica 2's are the same whether there are 3 or 300."""
        refuse_in_jax_trace("Streams.replica")
        return self._replica

    def _state(self, path_of: PathOf) -> dict[Any, Any]:
        return {"seed": self.seed, "shared": self._shared, "replica": Leaf(self._replica, "own")}

    def _check(self, saved: Mapping[Any, Any], at: ObjectAt) -> str:
        there = saved["seed"]
        return "" if there == self.seed else f"seed {there} in the checkpoint, {self.seed} here"

    def at(self, *numbers: SupportsIndex) -> np.random.Generator:
        """Return a new Generator for these numbers, e.g. ``at(epoch, row)``; the same on whatever replica asks.

        Noise drawn for each row of the global batch this way does not depend on how many replicas share the batch.

        Raises:
            OptionTypeError, OptionError: for numbers that are no ints, or negative.
        """
        # SeedSequence strings all numbers together in words of 32 bits: two each keep (2**32,) from being (0, 1).
        checked = [checked_count("Streams.at", "number", number, least=0) for number in numbers]
        return self._generator(_NUMBERED, *(word for number in checked for word in divmod(number, 2**32)))

    def _generator(self, *key: int) -> np.random.Generator:
        refuse_in_jax_trace("Strategy.rng")
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))


# ----------------------------------------------------------------------------------------------- reduce along an axis


class ReduceAlong(General):
    """`Strategy.reduce` with an axis; the argument is the operation, the axis, and the type of the axis."""

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction of one array; see `CallPlan.run`."""
        (reduce_op, axis, _), where = self.argument, call.where
        if isinstance(value, Arena) or weight is not None:
            raise OptionError.at(where, found=f"{axis=} with an arena or weight=", expected="axis= alone")
        structure, op = nest.flatten_without_none(value)[1], ReduceOp._parse(reduce_op, where)
        call.structure = structure.text
        if structure.num_none and not structure.num_leaves:
            return structure.pack(self.reducer.all_reduce_leaves(call, op, [], list, num_none=structure.num_none))
        if call.structure != nest.LEAF.text:
            found = f"a structure {call.structure} with {axis=}"
            raise OptionTypeError.at(where, found=found, expected="a single array")
        component = contribution(own_component(value, op, where))
        array = reducible(component, where)
        axes = tuple(checked_axis(a, array.ndim, where) for a in (axis if isinstance(axis, (tuple, list)) else [axis]))
        if len(set(axes)) != len(axes):
            raise ShapeError.at(where, found=f"axis={axis}, one axis twice", expected="each axis once")
        call.structure = f"{op.value} of {dtype_name(array.dtype)} along axis {axes}"
        local_result, rows = _combined_here(array, axes, op), prod(array.shape[a] for a in axes)
        self.reducer.communicator.guard.wait_for_gpu(event_of_reads([component]))
        # A mean is divided at the end; of MIN and MAX the numbers of rows tell whether there is any row.
        over = ReduceOp.SUM if op is ReduceOp.MEAN else op
        leaves = [local_result, -rows if op is ReduceOp.MIN else rows]
        total, count = self.reducer.all_reduce_leaves(call, over, leaves, lambda: ["", " (the number of rows)"])
        if count == 0 and op in (ReduceOp.MIN, ReduceOp.MAX):
            raise ShapeError.at(where, found=f"no elements on any rank under {op.name}", expected="at least one")
        return like_given(finish(any_array(total), array.dtype, op, int(count)), component)


@quietly
def _combined_here(array: Any, axes: tuple[int, ...], op: ReduceOp) -> Any:
    """Combine an array along `axes`, where it is; a rank without elements gives the identity element.

    16-bit floats are rounded once, at the end: the sums here stay in the wire dtype.
    """
    travels = wire_dtype if is_on_device(array) else host_wire_dtype
    dtype = travels(sum_dtype_of_mean(array.dtype) if op is ReduceOp.MEAN else array.dtype)
    with on_device_of(array):
        if op not in (ReduceOp.MIN, ReduceOp.MAX):
            return (array.prod if op is ReduceOp.PROD else array.sum)(axis=axes, dtype=dtype)
        if 0 in (array.shape[axis] for axis in axes):
            shape = [length for axis, length in enumerate(array.shape) if axis not in axes]
            return placed_as(np.full(shape, identity(dtype, op), dtype), array)
        return COMBINE[op.value].reduce(array.astype(dtype, copy=False), axes)


# -------------------------------------------------------------------------------------------------- assert_mirrored


def is_mirrored(var: Variable) -> bool:
    """Return whether the copies of a variable should be equal at all times."""
    return var.synchronization is not VariableSynchronization.ON_READ


def _mirrored_in(extended: StrategyExtended, variables: Any, where: str) -> list[Variable]:
    """Return the mirrored variables of a nest of variables, and of objects with an attribute `variables`, each once."""
    variables_by_id: dict[int, Variable] = {}
    for leaf in nest.flatten(variables)[0]:
        members = [leaf] if isinstance(leaf, Variable) else getattr(leaf, "variables", None)
        if not isinstance(members, (list, tuple)):
            raise OptionTypeError.at(where, found=f"{leaf!r}", expected="variables and optimizers")
        for var in members:
            if not extended.variable_created_in_scope(var) or (var is leaf and not is_mirrored(var)):
                expected = "a variable of this strategy, whose copies should be equal (not ON_READ)"
                raise OptionError.at(where, found=f"{var!r}", expected=expected)
        variables_by_id |= {id(var): var for var in members if is_mirrored(var)}
    if not variables_by_id:
        raise EmptyBatchError.at(where, found="no mirrored variables", expected="at least one, or None for all")
    return list(variables_by_id.values())


def _diverged(where: str, differing: Sequence[tuple[Variable, list[int], str]], count: int) -> ReplicasDivergedError:
    rows = [
        f"  {var._key} {dtype_name(var.dtype)}{list(var.shape)}: {words}" for var, _, words in differing[:_MOST_ROWS]
    ]
    more = [f"  and {len(differing) - _MOST_ROWS} more"] if len(differing) > _MOST_ROWS else []
    error = ReplicasDivergedError.at(
        where,
        found=f"copies that differ in {len(differing)} of {count} variables",
        expected="the same bits on every rank",
        fix="\n".join(["These differ:", *rows, *more, ""])
        + "Look for values that differ by rank (random numbers, an assign outside a step), and restore the variables.",
    )
    error.variables = tuple(var.name for var, _, _ in differing)
    error.ranks = tuple(sorted({rank for _, ranks, _ in differing for rank in ranks}))
    return error
