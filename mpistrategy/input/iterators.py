"""Iterators over distributed datasets: Python's protocol, and TensorFlow's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from mpistrategy.errors import OutOfRangeError
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.objects.kept import Kept, Leaf, ObjectAt, PathOf
from mpistrategy.objects.settings import NotPickled

#: An element: a batch, or this rank's part of one.
E = TypeVar("E")

END = object()
#: The largest position of an iterator.
_FARTHEST = 2**53
_ONE_SHOT = (
    "a dataset that can be iterated only once, and has begun; use Dataset.from_arrays, a list, or a new generator"
)


@dataclass
class Walk:
    """The position of an iterator in a dataset, and how to continue from there.

    Attributes:
        begin: returns the elements from `position` on, and increases `position`.
        dataset: the dataset; an iterator can be iterated only once.
        of: a description of the dataset; a position is valid only for the same description.
        any_ranks: whether the position means the same on any number of ranks.
        position: the number of elements taken from the dataset; for global batches, the number of global batches.
    """

    begin: Callable[[Walk], Iterator[Any]]
    dataset: Iterable[Any]
    of: str
    any_ranks: bool
    position: int = 0


class DistributedIterator(Kept, NotPickled, Iterator[E]):
    """An iterator over a distributed dataset, from `iter(dataset)`.  A `Checkpoint` saves its position."""

    _kept_as = "iterator"
    _instead_of_pickling = "Send the batches that it yields, or save its position with a Checkpoint."

    def __init__(self, elements: Iterator[E] | Walk) -> None:
        #: The position; None for elements without one.
        self._walk: Walk | None = elements if isinstance(elements, Walk) else getattr(elements, "_walk", None)
        self._elements: Iterator[E] = elements.begin(elements) if isinstance(elements, Walk) else elements

    def _state(self, path_of: PathOf) -> dict[Any, Any] | None:
        walk = self._walk
        if walk is None:
            return None
        return {"of": walk.of, "position": walk.position if walk.any_ranks else Leaf(walk.position, "own")}

    def _check(self, saved: Mapping[Any, Any], at: ObjectAt) -> str:
        walk, of, position = self._walk, saved["of"], saved["position"]
        assert walk is not None
        if walk.of != of:
            return f"a position in {of}; here it is {walk.of}"
        if type(position) is not int or not 0 <= position < _FARTHEST:
            return "no position in the checkpoint"
        return _ONE_SHOT if isinstance(walk.dataset, Iterator) and walk.position > 0 else ""

    def _load(self, saved: Mapping[Any, Any]) -> None:
        """Continue after the first elements; skipped elements are not read where possible."""
        assert self._walk is not None
        self._walk.position = saved["position"]
        self._elements = self._walk.begin(self._walk)

    def __repr__(self) -> str:
        at = "" if self._walk is None else f" at element {self._walk.position} of {self._walk.of}"
        return f"<{type(self).__name__}{at}>"

    @collective("next")
    def __next__(self) -> E:
        refuse_in_jax_trace("next(distributed dataset)")  # here: an error in the generator would end it
        return next(self._elements)

    def get_next(self) -> E:
        """Return this rank's part of the next global batch.

        Raises:
            OutOfRangeError: after the last one.
        """
        return self.get_next_as_optional().get_value()

    @collective("next")
    def get_next_as_optional(self) -> OptionalElement[E]:
        """Return the next element as an OptionalElement, which is empty at the end of the dataset."""
        refuse_in_jax_trace("DistributedIterator.get_next")
        return OptionalElement(next(self._elements, END))


class OptionalElement(Generic[E]):
    """An element of a dataset, or none: what `get_next_as_optional` returns."""

    def __init__(self, element: Any = END) -> None:
        self._element = element

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return self._element is not END

    def get_value(self) -> E:
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
        return cast("E", self._element)


class DatasetIterator(DistributedIterator[E]):
    """The result of `make_dataset_iterator`: an iterator that can start again."""

    def __init__(self, dataset: Iterable[E]) -> None:
        self._dataset = dataset
        super().__init__(iter(dataset))  # whose `_walk` is this one's

    def initialize(self) -> list[Any]:
        """Start at the first element; return an empty list, since there is nothing to run.

        A generator cannot start again: it continues.
        """
        DistributedIterator.__init__(self, iter(self._dataset))
        return []


class InputFunctionIterator(DatasetIterator[E]):
    """The result of `make_input_fn_iterator`."""
