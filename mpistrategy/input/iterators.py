"""Iterators over distributed datasets: Python's protocol, and TensorFlow's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mpistrategy.errors import OptionError, OutOfRangeError
from mpistrategy.mpi.faults.injection import collective
from mpistrategy.process_objects import Created, NotPickled

END = object()


@dataclass
class Walk:
    """How far an iterator has come through a dataset, and how to begin there again.

    Attributes:
        begin: returns the elements from `position` on, and counts on.
        of: what the dataset is, in words; in another one the position would mean something else.
        any_ranks: whether the position means the same on any number of ranks.
        is_one_shot: whether the dataset can be gone through only once.
        position: how many elements have been taken from it; of a dataset of global batches, how many of those.
        is_compared: whether the ranks have compared the first batch that they took.
    """

    begin: Callable[[Walk], Iterator[Any]]
    of: str
    any_ranks: bool
    is_one_shot: bool = False
    position: int = 0
    is_compared: bool = False


class DistributedIterator(Created, NotPickled, Iterator[Any]):
    """One walk through a distributed dataset; what `iter(dataset)` returns.  A `Checkpoint` keeps its position."""

    instead_of_pickling = "Send the batches that it yields, or keep its position with a Checkpoint."

    def __init__(self, elements: Iterator[Any] | Walk) -> None:
        #: Where it is; None for what cannot tell.
        self.walk: Walk | None = elements if isinstance(elements, Walk) else getattr(elements, "walk", None)
        self._elements = elements.begin(elements) if isinstance(elements, Walk) else elements

    def check_can_go(self) -> None:
        """Raise OptionError when `go_to` cannot go anywhere."""
        walk = self.walk
        if walk is None or (walk.is_one_shot and walk.position > 0):
            raise OptionError.at(
                "DistributedIterator.go_to",
                found="a dataset that cannot be gone through anew",
                expected="a dataset that can, or an iterator that has not begun",
                fix="Use Dataset.from_arrays, a list, or a generator that is fresh.",
            )

    def go_to(self, position: int) -> None:
        """Go on with the element after the first `position` ones; what is left out is not read where that can be.

        Raises:
            OptionError: for a dataset that can be gone through only once, when that has begun.
        """
        self.check_can_go()
        assert self.walk is not None
        self.walk.position = position
        self._elements = self.walk.begin(self.walk)

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
        super().__init__(iter(dataset))  # whose `walk` is this one's

    def initialize(self) -> list[Any]:
        """Start at the first element; return a list of nothing to run.

        A generator cannot start again: it goes on.
        """
        before = self.walk
        DistributedIterator.__init__(self, iter(self._dataset))
        if self.walk is not None and before is not None:
            self.walk.is_compared = before.is_compared
        return []


class InputFunctionIterator(DatasetIterator):
    """What `make_input_fn_iterator` returns."""
