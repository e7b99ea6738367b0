"""Iterators over distributed datasets: Python's protocol, and TensorFlow's methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mpistrategy.errors import OutOfRangeError
from mpistrategy.mpi.faults import collective

END = object()


class DistributedIterator(Iterator[Any]):
    """One walk through a distributed dataset; what `iter(dataset)` returns."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    @collective("next")
    def __next__(self) -> Any:
        return next(self._elements)

    def get_next(self) -> Any:
        """Return this rank's part of the next global batch.

        Raises:
            OutOfRangeError: after the last one.
        """
        return self.get_next_as_optional().get_value()

    @collective("next")
    def get_next_as_optional(self) -> OptionalElement:
        """Return the next element, or that there is none, without an exception at the end."""
        return OptionalElement(next(self._elements, END))


class OptionalElement:
    """An element of a dataset, or none: what `get_next_as_optional` returns."""

    def __init__(self, element: Any = END) -> None:
        self._element = element

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return self._element is not END

    def get_value(self) -> Any:
        """Return the element.

        Raises:
            OutOfRangeError: when there is none.
        """
        if self._element is END:
            raise OutOfRangeError.at(
                "DistributedIterator.get_next",
                found="the end of the dataset",
                expected="one more element",
                fix="Loop with `for`, or ask get_next_as_optional().has_value() first.",
            )
        return self._element


class DatasetIterator(DistributedIterator):
    """What `make_dataset_iterator` returns: an iterator that can start again."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        super().__init__(iter(dataset))

    def initialize(self) -> list[Any]:
        """Start at the first element; return a list of nothing to run.

        A generator cannot start again: it goes on.
        """
        self._elements = iter(self._dataset)
        return []


class InputFunctionIterator(DatasetIterator):
    """What `make_input_fn_iterator` returns."""
