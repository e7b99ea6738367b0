"""Dataset: arrays cut into global batches, of which only the needed rows are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import as_kind_of, copy_of, host_array, is_foreign, is_on_device, library_of
from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import BatchError
from mpistrategy.objects.other_names import NamesOurs, refuses
from mpistrategy.objects.settings import checked_count, checked_switch

#: An element: a batch, or this rank's part of one.
E = TypeVar("E")
B = TypeVar("B")


class Rows:
    """Some rows of an array or file; a slice reads only its own rows.

    Attributes:
        shape: the shape of the array of all these rows.
    """

    def __init__(self, source: Any, rows: range | Array) -> None:
        self._source = source
        self._rows = rows
        self.shape: tuple[Any, ...] = (len(rows), *source.shape[1:])

    def __getitem__(self, part: slice) -> Any:
        if is_foreign(self._source) and not is_on_device(self._source):
            return as_kind_of(Rows(host_array(self._source), self._rows)[part], self._source)
        rows = self._rows[part]
        if isinstance(rows, range):
            return copied(self._source[rows.start : rows.stop])
        if isinstance(self._source, np.ndarray):
            return copied(self._source[rows])
        # Files need each row once and in order.
        unique_rows, positions = np.unique(rows, return_inverse=True)
        return copied(self._source[unique_rows] if len(rows) else self._source[0:0])[positions]


def copied(block: Any) -> Any:
    """Return a copy of a block of rows: a step may write to it, and the source must not change."""
    can_copy = hasattr(block, "copy") or library_of(block) == "torch"
    return copy_of(block) if can_copy and not isinstance(block, np.memmap) else np.array(block)


class Dataset(NamesOurs, Generic[E]):
    """Arrays, cut into global batches; made by `Dataset.from_arrays`.

    Iterating over it yields whole global batches.  Given to `experimental_distribute_dataset`, a rank reads only its
    own rows of each batch, from arrays in memory as from files (np.memmap, h5py, zarr).
    """

    def __init__(
        self,
        arrays: E,
        global_batch_size: int,
        *,
        shuffle_seed: int | None = None,
        drop_remainder: bool = False,
        epochs: int | None = 1,
        first_epoch: int = 0,
    ) -> None:
        where = "Dataset.from_arrays"
        leaves, self._structure = nest.flatten(arrays)
        self._sources = [to_rows(leaf) for leaf in leaves]
        self._num_rows = common_length(self._sources, where)
        self._batch = checked_count(where, "global_batch_size", global_batch_size)
        self._seed = None if shuffle_seed is None else checked_count(where, "shuffle_seed", shuffle_seed, least=0)
        self._drop_remainder = checked_switch(where, "drop_remainder", drop_remainder)
        self._epochs = None if epochs is None else checked_count(where, "epochs", epochs, least=0)
        self._first_epoch = first_epoch

    @classmethod
    @refuses(
        batch_size="Write global_batch_size: the rows of all ranks together.",
        seed="Write shuffle_seed.",
        shuffle="Write shuffle_seed, a number.",
        buffer_size="Leave it out: all rows are shuffled.",
        repeat="Write epochs.",
        count="Write epochs.",
    )
    def from_arrays(
        cls,
        arrays: B,
        global_batch_size: int,
        *,
        shuffle_seed: int | None = None,
        drop_remainder: bool = False,
        epochs: int | None = 1,
    ) -> Dataset[B]:
        """Return a dataset of the rows of `arrays`.

        Args:
            arrays: an array or a nest of arrays with equal first axes.  An array is any object with `shape` and slices;
                only the rows of the current batch are read.  Batches of tensors are tensors.
            global_batch_size: the number of rows of all replicas together in one step.
            shuffle_seed: None keeps the order of the rows.  A number shuffles them differently in each epoch; the order
                depends on the number and the epoch, and not on the number of ranks.
            drop_remainder: whether the last batch of an epoch is left out when it has fewer rows.
            epochs: how often to iterate over the rows; None for ever.

        Raises:
            BatchError: for scalars, arrays with different numbers of rows, or no arrays at all.
            OptionError, OptionTypeError: for the other arguments.

        >>> import numpy as np
        >>> [batch.tolist() for batch in Dataset.from_arrays(np.arange(5), global_batch_size=2)]
        [[0, 1], [2, 3], [4]]
        """
        return Dataset(
            arrays, global_batch_size, shuffle_seed=shuffle_seed, drop_remainder=drop_remainder, epochs=epochs
        )

    def epoch(self, number: int) -> Dataset[E]:
        """Return one epoch of this dataset, with the row order of that epoch; the first is number 0.

        For your own loops over epochs: a dataset has the same order each time it is iterated.  `number` may be any
        number, whatever `epochs` is.
        """
        number = checked_count("Dataset.epoch", "number", number, least=0)
        return Dataset(
            self._structure.pack(list(self._sources)),
            self._batch,
            shuffle_seed=self._seed,
            drop_remainder=self._drop_remainder,
            first_epoch=self._first_epoch + number,
        )

    def _lazy_batches(self) -> Iterator[Any]:
        """Yield the global batches as nests of unread `Rows`."""
        epochs = itertools.count(self._first_epoch)
        for epoch in epochs if self._epochs is None else itertools.islice(epochs, self._epochs):
            order: range | Array = range(self._num_rows)
            if self._seed is not None:
                order = np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
            for start in range(0, self._batches_per_epoch * self._batch, self._batch):
                rows = order[start : start + self._batch]
                yield self._structure.pack([Rows(source, rows) for source in self._sources])
            if not self._batches_per_epoch:
                return  # no epoch has batches, and there may be no last epoch

    def __iter__(self) -> Iterator[E]:
        for batch in self._lazy_batches():
            yield nest.map_structure(lambda rows: rows[:], batch)

    def __len__(self) -> int:
        """Return the number of global batches.

        Raises:
            TypeError: for a dataset without an end.
        """
        if self._epochs is None:
            raise TypeError("a Dataset with epochs=None has no length")
        return self._epochs * self._batches_per_epoch

    @property
    def _batches_per_epoch(self) -> int:
        whole, remainder = divmod(self._num_rows, self._batch)
        return whole + (remainder > 0 and not self._drop_remainder)

    def _empty_batch(self) -> Any:
        """Return a batch without rows."""
        return self._structure.pack([Rows(source, range(0))[:] for source in self._sources])

    def _describe(self, *, epochs: bool = True) -> str:
        """Return a text that must be equal on all ranks; without `epochs`, what the order of batches depends on."""
        kinds = ", ".join(f"{getattr(s, 'dtype', '?')}{list(s.shape)}" for s in self._sources)
        return (
            f"Dataset {self._structure.text} of {kinds}, global_batch_size={self._batch}, shuffle_seed={self._seed}, "
            f"drop_remainder={self._drop_remainder}, {f'epochs={self._epochs}, ' if epochs else ''}"
            f"first_epoch={self._first_epoch}"
        )

    def __repr__(self) -> str:
        return f"<{self._describe()}>"


def to_rows(leaf: Any) -> Any:
    """Return `leaf` if it can be indexed by row numbers; otherwise an array of it."""
    if hasattr(leaf, "iloc"):  # pandas selects rows by labels
        return np.asarray(leaf)
    return leaf if hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") else np.asarray(leaf)


def common_length(arrays: list[Any], where: str) -> int:
    """Return the number of rows, which must be the same for all arrays.

    Raises:
        BatchError: when they differ, when one is a scalar, or when there are none.
    """
    lengths = {int(array.shape[0]) if array.shape else -1 for array in arrays}
    if len(lengths) != 1 or -1 in lengths:
        shapes = ", ".join(str(tuple(array.shape)) for array in arrays) or "none"
        raise BatchError.at(
            where,
            found=f"a batch with arrays of shapes {shapes}",
            expected="arrays with the same number of rows (first axis)",
        )
    return lengths.pop()
