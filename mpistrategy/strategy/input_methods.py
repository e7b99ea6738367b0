"""Strategy's methods for input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast

from mpistrategy import context
from mpistrategy.errors import OptionError
from mpistrategy.input.distributed import DistributedDataset, DistributedDatasetsFromFunction, check_iterable, describe
from mpistrategy.input.first_batches import FirstBatches, checked_level
from mpistrategy.input.iterators import DatasetIterator, InputFunctionIterator
from mpistrategy.input.options import InputContext, check_options
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import InputReplicationMode, ReplicationMode, checked_member
from mpistrategy.strategy.outside_steps import warn_if_alone

if TYPE_CHECKING:
    from mpistrategy.input.options import InputOptions

#: What is compared of the first batches, as an argument.
CheckBatches: TypeAlias = Literal["warn", "raise", "off", "WARN", "RAISE", "OFF"]
E = TypeVar("E")


class _Extended(Protocol):
    communicator: Communicator
    _datasets_made: int


class _Strategy(Protocol):
    _is_default: bool

    @property
    def extended(self) -> Any: ...  # an _Extended; basedpyright compares a descriptor's own type with what is said here


class InputMethods:
    """The part of Strategy that gives each rank its part of the data."""

    def distribute_dataset(
        self: _Strategy,
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
                iterator is collective with the former two.  Of a large batch the first and the last rows of each
                array are compared, 1 MiB in all; arrays whose bytes cannot be had (of objects, sparse ones) are left
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
        where = "Strategy.distribute_dataset"
        return _distribute(self, where, dataset, options, drop_remainder, pad, check_batches, name=name)

    def experimental_distribute_dataset(
        self: _Strategy,
        dataset: Iterable[E],
        options: InputOptions | None = None,
        *,
        drop_remainder: bool = False,
        pad: bool = False,
        check_batches: CheckBatches = "warn",
        name: str | None = None,
    ) -> DistributedDataset[E]:
        """Do `distribute_dataset`, under the name that TensorFlow has for it."""
        where = "Strategy.experimental_distribute_dataset"
        return _distribute(self, where, dataset, options, drop_remainder, pad, check_batches, name=name)

    def distribute_datasets_from_function(
        self: _Strategy,
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
        where = "Strategy.distribute_datasets_from_function"
        dataset = _make_input(self, where, dataset_fn, options, name=name)
        if self._is_default:
            found: DistributedDatasetsFromFunction[E] = dataset  # it acts as one
            return found
        communicator = self.extended.communicator
        return DistributedDatasetsFromFunction(dataset, communicator, drop_remainder=drop_remainder, name=name)

    def experimental_distribute_datasets_from_function(
        self: _Strategy,
        dataset_fn: Callable[[InputContext], Iterable[E]],
        options: InputOptions | None = None,
        *,
        name: str | None = None,
    ) -> DistributedDatasetsFromFunction[E]:
        """Return `distribute_datasets_from_function(dataset_fn, options)`: its old name."""
        return InputMethods.distribute_datasets_from_function(self, dataset_fn, options, name=name)

    def make_dataset_iterator(self: _Strategy, dataset: Iterable[E], *, name: str | None = None) -> DatasetIterator[E]:
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
        return DatasetIterator(_distribute(self, "Strategy.make_dataset_iterator", dataset, name=name))

    def make_input_fn_iterator(
        self: _Strategy,
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
        dataset = _make_input(self, where, input_fn, mode=replication_mode, name=name)
        return InputFunctionIterator(DistributedDatasetsFromFunction(dataset, self.extended.communicator, name=name))


def _distribute(
    strategy: _Strategy,
    where: str,
    dataset: Iterable[E],
    options: Any = None,
    drop_remainder: bool = False,
    pad: bool = False,
    check_batches: str = "warn",
    *,
    name: str | None = None,
) -> DistributedDataset[E]:
    extended: _Extended = strategy.extended
    communicator = extended.communicator
    with Call(communicator.guard, where, called=name) as call:
        check_options(options, where)
        level, number = checked_level(check_batches, where), extended._datasets_made + 1
        compares = level != "off" and communicator.size > 1
        first = FirstBatches(communicator, level, f"dataset {number} of the strategy", name) if compares else None
        distributed = DistributedDataset(
            dataset, communicator.rank, communicator.size, drop_remainder=drop_remainder, pad=pad, first=first
        )
        call.structure = describe(dataset)
        call.agree("distribute a dataset", op=f"{drop_remainder=}, {pad=}, check_batches={level!r}")
        extended._datasets_made = number  # after the agreement: the ranks' counts must not differ
    if strategy._is_default:
        warn_if_alone(cast(context.Strategy, strategy), where)
        return cast("DistributedDataset[E]", dataset)
    return distributed


def _make_input(
    strategy: _Strategy,
    where: str,
    function: Callable[[InputContext], Any],
    options: Any = None,
    mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER,
    *,
    name: str | None = None,
) -> Any:
    communicator: Communicator = strategy.extended.communicator
    with Call(communicator.guard, where, called=name) as call:
        context.check_call(where, function)
        check_options(options, where)
        if checked_member(InputReplicationMode, mode, where, "replication_mode") is not InputReplicationMode.PER_WORKER:
            raise OptionError.at(where, found=f"replication_mode={mode!r}", expected="InputReplicationMode.PER_WORKER")
        with call.own_work():
            dataset = function(InputContext(communicator.size, communicator.rank, communicator.size))
        check_iterable(dataset, where)
        call.agree("make input")
    if strategy._is_default:
        warn_if_alone(cast(context.Strategy, strategy), where)
    return dataset
