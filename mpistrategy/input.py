"""Input: each rank's part of every global batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mpistrategy import nest
from mpistrategy.errors import OptionTypeError, ShapeError


def part_of_batch(length: int, index: int, parts: int) -> slice:
    """Return the rows of a batch of `length` rows that belong to part `index` of `parts`.

    The parts are contiguous and have ceil(length / parts) rows; the last ones are shorter, and may be empty.
    """
    rows = -(-length // parts)
    return slice(min(index * rows, length), min((index + 1) * rows, length))


class DistributedDataset:
    """Iterates over a dataset of global batches and yields this rank's part of each.

    Every rank makes the same number of steps; a rank without rows in a batch gets arrays of length 0.

    Args:
        dataset: an iterable of global batches: arrays, or nests of arrays with equal first axes.
        index: this rank's number.
        parts: how many ranks share a batch.

    Raises:
        OptionTypeError: when `dataset` cannot be iterated.
        ShapeError: while iterating, for a batch whose arrays differ in length, or that holds a scalar.
    """

    def __init__(self, dataset: Any, index: int, parts: int) -> None:
        if not isinstance(dataset, Iterable) or isinstance(dataset, (str, bytes)):
            raise OptionTypeError.at(
                "experimental_distribute_dataset",
                found=f"a {type(dataset).__name__}",
                expected="an iterable of global batches",
            )
        self._dataset: Iterable[Any] = dataset
        self._index = index
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataset:
            yield self._part(batch)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # a generator has none, and says so

    def _part(self, batch: Any) -> Any:
        leaves, structure = nest.flatten(batch)
        arrays = [leaf if hasattr(leaf, "shape") else np.asarray(leaf) for leaf in leaves]
        lengths = {array.shape[0] if array.shape else -1 for array in arrays}
        if len(lengths) != 1 or -1 in lengths:
            shapes = ", ".join(str(array.shape) for array in arrays)
            raise ShapeError.at(
                "distributed dataset",
                found=f"a batch with arrays of shapes {shapes}",
                expected="arrays with the same number of rows (first axis)",
            )
        rows = part_of_batch(lengths.pop(), self._index, self._parts)
        return structure.pack([array[rows] for array in arrays])
