"""Distributed datasets: each rank gets its part of every global batch, or its own batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import host_array, is_cupy, like_given
from mpistrategy.errors import BatchError, OptionError, OptionTypeError
from mpistrategy.input.datasets import Dataset, common_length, copied, to_rows
from mpistrategy.input.first_batches import first_batch
from mpistrategy.input.iterators import END, DistributedIterator, Walk
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.settings import NotPickled

#: An element: a batch, or this rank's part of one.
E = TypeVar("E")


def part_of_batch(length: int, index: int, parts: int) -> slice:
    """Return the rows of a batch of `length` rows that belong to part `index` of `parts`.

    The parts are contiguous and have ceil(length / parts) rows; the last parts may be shorter or empty.
    """
    rows = -(-length // parts)
    return slice(min(index * rows, length), min((index + 1) * rows, length))


class DistributedDataset(Generic[E]):
    """Iterates over a dataset of global batches and yields this rank's part of each.

    Every rank makes the same number of steps; a rank without rows in a batch gets arrays of length 0.

    Args:
        dataset: an iterable of global batches: arrays, or nests of arrays with equal first axes.  Only this rank's rows
            are read from a `Dataset` and from arrays that read when they are sliced.
        index: this rank's number.
        parts: how many ranks share a batch.
        drop_remainder: every rank gets the same number of rows; the remaining rows are left out.
        pad: every rank gets the same number of rows; missing rows are zeros.  A column of ones beside the data
            marks the real rows.
        first: arguments of `first_batch`, which compares the first batch of each iterator with the other ranks'; None
            compares nothing.

    Raises:
        OptionTypeError: when `dataset` cannot be iterated.
        OptionError: for drop_remainder and pad together.
        BatchError: at once or while iterating, for a batch that holds a scalar, or arrays that differ in length.
    """

    def __init__(
        self,
        dataset: Iterable[E],
        index: int,
        parts: int,
        *,
        drop_remainder: bool = False,
        pad: bool = False,
        first: tuple[Ranks, str, str, str | None] | None = None,
    ) -> None:
        where = "experimental_distribute_dataset"
        check_iterable(dataset, where)
        source: Any = dataset
        if isinstance(source, np.ndarray) or is_cupy(source):
            raise OptionTypeError.at(
                where,
                found=f"an array of shape {source.shape}: is its first axis batches, or rows?",
                expected="an iterable of global batches",
                fix="Dataset.from_arrays(array, global_batch_size) cuts rows into batches; list(array) is of batches.",
            )
        if drop_remainder and pad:
            raise OptionError.at(where, found="drop_remainder and pad", expected="one of them")
        self._dataset: Iterable[E] = dataset
        self._index, self._parts, self._first = index, parts, first
        self._drop_remainder, self._pad = drop_remainder, pad
        if isinstance(dataset, Sequence) and len(dataset):
            _rows_of(dataset[0])  # raises at once for a single batch or a list of rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_first": None}  # the ranks belong to this process; a copy elsewhere compares nothing

    def __iter__(self) -> DistributedIterator[E]:
        of = self._dataset._describe(epochs=False) if isinstance(self._dataset, Dataset) else "global batches"
        of += f", drop_remainder={self._drop_remainder}, pad={self._pad}"
        return DistributedIterator(Walk(self._elements, self._dataset, of, any_ranks=True))

    def __len__(self) -> int:
        steps = len(self._dataset)  # type: ignore[arg-type]  # a generator has none, and says so
        if not self._drop_remainder:
            return steps
        if not isinstance(self._dataset, (Dataset, Sequence)):
            raise TypeError("with drop_remainder, only the batches of a Dataset or a list can be counted in advance")
        return sum(_rows_of(batch)[1] >= self._parts for batch in self._batches())

    def _batches(self) -> Iterable[Any]:
        return self._dataset._lazy_batches() if isinstance(self._dataset, Dataset) else self._dataset

    def _elements(self, walk: Walk) -> Iterator[Any]:
        # Lazily: iter() runs in a call, which tells the other ranks of an error.
        batches: Iterator[Any] = itertools.islice(itertools.chain.from_iterable([self._batches()]), walk.position, None)
        if self._first is not None:
            first = first_batch(*self._first, batches)
            batches = itertools.chain([] if first is END else [first], batches)
        data, fewest = self._dataset, self._parts if self._drop_remainder else 0
        if isinstance(data, Dataset) and data._epochs is None and min(data._num_rows, data._batch) < fewest:
            return  # no batch of any epoch has a row for each rank
        for batch in batches:
            walk.position += 1
            part = self._part(batch)
            if part is not END:
                yield part

    def _part(self, batch: Any) -> Any:
        arrays, length, structure = _rows_of(batch)
        if self._drop_remainder:
            length -= length % self._parts
            if not length:
                return END  # fewer rows than ranks: no rank makes this step
        rows = part_of_batch(length, self._index, self._parts)
        blocks = [array[rows] for array in arrays]
        if isinstance(self._dataset, Sequence):
            # The same arrays are used in the next epoch: a step must not change them.
            blocks = [*map(copied, blocks)]
        if self._pad:
            blocks = [_padded(block, -(-length // self._parts)) for block in blocks]
        return structure.pack(blocks)


def _rows_of(batch: Any) -> tuple[list[Any], int, nest.Structure]:
    """Return the arrays of a batch, their number of rows, and the structure; nothing is read."""
    leaves, structure = nest.flatten(batch)
    arrays = [to_rows(leaf) for leaf in leaves]
    return arrays, common_length(arrays, "distributed dataset"), structure


def _padded(block: Any, rows: int) -> Any:
    """Return rows and zeros behind them, made on the host."""
    if len(block) == rows:
        return block
    on_host = host_array(block)
    zeros = np.zeros((rows - len(on_host), *on_host.shape[1:]), on_host.dtype)
    return like_given(np.concatenate([on_host, zeros]), block)


class DistributedDatasetsFromFunction(NotPickled, Generic[E]):
    """Iterates over this rank's own dataset, in step with the other ranks.  Iterating is collective.

    All ranks make as many steps as the rank with the most elements; a rank without more elements gets arrays of length
    0.  At every step the ranks tell each other whether they have an element.

    Args:
        dataset: an iterable of this rank's batches.
        communicator: the ranks.
        drop_remainder: whether all ranks end with the first rank that has no more elements instead.
        name: is compared between the ranks instead of the call sites that ask iterators for elements.
    """

    _instead_of_pickling = "Send the batches that it yields, or the dataset that your function returned."

    def __init__(
        self, dataset: Iterable[E], communicator: Ranks, *, drop_remainder: bool = False, name: str | None = None
    ) -> None:
        self._dataset: Iterable[Any] = dataset
        self._communicator, self._drop_remainder, self._name = communicator, drop_remainder, name

    def __iter__(self) -> DistributedIterator[E]:
        return DistributedIterator(Walk(self._elements, self._dataset, "a dataset of each rank's own", any_ranks=False))

    def _elements(self, walk: Walk) -> Iterator[Any]:
        element = END
        iterator = itertools.chain.from_iterable([self._dataset])  # lazily, as above
        for skipped in itertools.islice(iterator, walk.position):
            element = skipped
        while (element := self._next_of_all(iterator, element)) is not END:
            walk.position += 1
            yield element

    def _next_of_all(self, iterator: Iterator[Any], last: Any) -> Any:
        """Return this rank's next element; an element without rows when only other ranks have more; or END."""
        with Call(self._communicator.guard, "next(distributed dataset)", called=self._name) as call:
            with call.guard.own_work():
                element = next(iterator, END)
            call.agree("next")
            have = np.array([element is not END], np.int64)
            self._communicator.allreduce(have)
            if have[0] == self._communicator.size:
                return element
            if have[0] == 0 or self._drop_remainder:
                return END
            call.expect_more()
            if element is END:
                element = self._without_rows(last)
            call.agree("go on without rows")
            return element

    def _without_rows(self, last: Any) -> Any:
        if isinstance(self._dataset, Dataset):
            return self._dataset._empty_batch()
        if last is END:
            raise BatchError.at(
                "distribute_datasets_from_function",
                found="no element on this rank, although other ranks have some",
                expected="a first element, which has the dtypes and shapes",
                fix="Return a Dataset.from_arrays, or at least one batch of length 0.",
            )
        arrays, _, structure = _rows_of(last)
        return structure.pack([array[:0] for array in arrays])


def check_iterable(dataset: Any, where: str) -> None:
    """Raise OptionTypeError unless `dataset` is an iterable of batches."""
    if not isinstance(dataset, Iterable) or isinstance(dataset, (str, bytes, Mapping)):
        raise OptionTypeError.at(
            where,
            found=f"a {type(dataset).__name__}",
            expected="an iterable of batches",
            fix="Dataset.from_arrays(arrays, global_batch_size) makes one of arrays.",
        )


def describe(dataset: Any) -> str:
    """Return a text that must be equal on all ranks for datasets of global batches; reads no batch."""
    if isinstance(dataset, Dataset):
        return dataset._describe()
    try:
        return f"{len(dataset)} global batches"
    except Exception:  # a generator has no length, and classes raise errors of many types
        return "global batches"
