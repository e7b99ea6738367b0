"""The state of objects as a flat table, and `Kind`: how one kind of object is entered into it, and restored.

The table has an item for each path.  It says kinds, dtypes and shapes, and must be equal on all ranks; beside it are
this rank's arrays and values.
The ranks compare their arrays, numbers and generators: those that are equal everywhere are saved once, others once for
each rank.

To keep something new in checkpoints, write one Kind and enter it in the table in `mpistrategy.checkpoint.kinds`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from mpistrategy import context
from mpistrategy.arrays.convert import NEVER_WRITTEN, host_array
from mpistrategy.arrays.digests import digest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.foreign import library_of
from mpistrategy.checkpoint.storage.files import checksum_of
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, ROWS, Item, Manifest
from mpistrategy.checkpoint.storage.shards import dtype_text
from mpistrategy.errors import CollectiveMismatchError, OptionError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.objects.copies import Created
from mpistrategy.objects.text import encoded
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

_DEEPEST = 100
#: The most generators that an error names.
_MOST_NAMED = 3
_ACCEPTED = (
    "Variables, optimizers, gradient accumulators, metrics, arrays, ms.Rows, numbers, strings, random generators, "
    "strategy.rng(seed), iterators of distributed datasets, torch's modules, tensors, JAX's arrays, dicts, lists and "
    "tuples of these, objects with state_dict() and load_state_dict(), and functions that return one of these"
)

#: Copies of an item before the ranks have compared them: kept once if they are equal, else one for each rank.
UNDECIDED = "?"

#: None and empty containers, as JSON.
_EMPTY: tuple[Any, ...] = (None, "", [], {"tuple": []}, {"dict": []})

#: Returns the value of an object after restoring: the object, changed in place, or another one.
Restore = Callable[[], Any]


class Fitting(Protocol):
    """What kinds use of `mpistrategy.checkpoint.restoring.Fit`, a checkpoint beside the objects."""

    manifest: Manifest
    strategy: Strategy
    rank: int
    same_ranks: bool
    problems: list[str]
    fetched: dict[str, Callable[[], Variable] | None]
    shared: set[str]
    prepare: list[Callable[[], None]]
    staged: dict[str, Array]

    @property
    def here(self) -> State: ...
    def restore_of(self, path: str, value: Any, *, fresh: bool = False) -> Restore: ...
    def problem(self, path: str, text: str) -> Restore: ...
    def missing(self, path: str, value: Any) -> Restore: ...
    def expect(self, holds: bool, path: str, item: Item, value: Any) -> bool: ...
    def has_layout(self, path: str, item: Item, array: Array) -> bool: ...
    def knows_own(self, path: str, item: Item) -> bool: ...
    def own_value(self, path: str, item: Item) -> Any: ...
    def first_value(self, path: str, item: Item) -> Any: ...
    def nearest_value(self, path: str, item: Item) -> Any: ...
    def of_its_own(self, item: Item) -> str: ...
    def is_replaceable(self, path: str, value: Any) -> bool: ...
    def is_lasting(self, path: str) -> bool: ...


def has_state(value: Any) -> bool:
    """Return whether an object saves and loads its state by its own methods."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


class Kind(ABC):
    """One kind of object in checkpoints.

    Attributes:
        name: the kind of its items in the manifest.
        types: its classes; subclasses count unless `is_exact`.
        is_exact: whether only these very classes are meant.
        is_replaceable: whether a restore may make a new object; else the object must be there and is changed in place.
    """

    name: ClassVar[str]
    types: ClassVar[tuple[type, ...]] = ()
    is_exact: ClassVar[bool] = False
    is_replaceable: ClassVar[bool] = False

    def owns(self, value: Any) -> bool:
        """Return whether an object is of this kind."""
        return type(value) in self.types if self.is_exact else isinstance(value, self.types)

    @abstractmethod
    def add(self, entries: State, path: str, value: Any) -> None:
        """Enter an object into the table; raise for one that cannot be saved."""

    @abstractmethod
    def restore(self, fit: Fitting, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """Note what does not fit and which arrays are needed; return what restores the object.  Changes nothing.

        Args:
            fit: where problems and arrays are noted.
            path: where the object is.
            item: what the checkpoint has at `path`.
            value: the object; `ABSENT` if there is none.
            fresh: make new arrays; do not write into those that are here.
        """

    def identity(self, value: Any, number: str) -> str:
        """Return words for the object, equal on all ranks for the same object and different for another; "" for none.

        Args:
            value: the object.
            number: its number among those of its class that this program made, if they are counted: "1 of 2".
        """
        return f"{type(value).__name__} {number}" if number else ""

    def variables(self, value: Any) -> Iterable[Variable]:
        """Return the variables that belong to an object."""
        return members_of(value) or ()


def members_of(value: Any) -> tuple[Variable, ...] | None:
    """Return the variables of an object with an attribute `variables`, such as a metric; None for other objects."""
    members = getattr(value, "variables", None)
    if isinstance(members, (list, tuple)) and members and all(isinstance(member, Variable) for member in members):
        return tuple(members)
    return None


class State:
    """The state of some objects on this rank.

    Args:
        objects: by name.
        strategy: whose ranks share them.
        where: the public name, for errors.
        kinds: the table of kinds.

    Attributes:
        strategy, where: as given.
        items: the table.
        live: the object at each path.
        variables: the variable at each path, slots of optimizers included.
        arrays: this rank's arrays, not copied.
        values: this rank's values, as JSON.
        of_names: by name, a digest of each object that consists of arrays and values, or that returns JAX arrays as its
            state; made by `digests`.
        last: `of_names` of the save before this one, if there was one.
        unchanged: the names of these objects that are on all ranks as they were then; known after `decide`.

    Raises:
        OptionTypeError: for an object of unknown kind; names the path.
        DTypeError: for arrays of objects.
        LeafError: for arrays without data; names the path.
    """

    def __init__(self, objects: Mapping[str, Any], strategy: Strategy, where: str, kinds: Sequence[Kind]) -> None:
        self.strategy = strategy
        self.where = where
        self._kinds = kinds
        self.items: dict[str, Item] = {}
        self.live: dict[str, Any] = {}
        self.variables: dict[str, Variable] = {}
        self.arrays: dict[str, Array] = {}
        self.values: dict[str, Any] = {}
        self.of_names: dict[str, int] = {}
        self.last: Mapping[str, int] = {}
        self.unchanged: list[str] = []
        self._paths: dict[int, str] = {}
        self._last: list[Callable[[], None]] = []
        for name, value in objects.items():
            self.add(name, value)
        for add in self._last:
            add()

    def add(self, path: str, value: Any) -> None:
        """Enter an object and what it holds."""
        depth = path.count("/")
        if depth > _DEEPEST:
            raise OptionError.at(self.where, found=f"{path[:80]!r}, {depth} levels deep", expected="fewer levels")
        kind = kind_of(value, self._kinds)
        if kind is None:
            raise OptionTypeError.at(self.where, found=f"a {type(value).__name__} as {path!r}", expected=_ACCEPTED)
        self.live[path] = value
        self._paths.setdefault(id(value), path)
        kind.add(self, path, value)

    def add_last(self, add: Callable[[], None]) -> None:
        """Call `add` once all objects are entered."""
        self._last.append(add)

    def add_array(self, path: str, kind: str, copies: str, array: Array) -> None:
        """Enter an array, NumPy's or CuPy's; DTypeError for one of objects."""
        dtype = dtype_text(array.dtype, f"{self.where}: {path!r}")
        self.items[path] = Item(kind, copies, dtype, array.shape)
        self.arrays[path] = array

    def add_value(self, path: str, kind: str, copies: str, value: Any, more: Any = None) -> None:
        """Enter a value, as JSON."""
        self.items[path] = Item(kind, copies, more=more)
        self.values[path] = value

    def path_of(self, var: Variable) -> str | None:
        """Return the path at which a variable was entered first; None if it was not."""
        return self._paths.get(id(var))

    # ------------------------------------------------------------------------------------------- what is kept once

    def digests(self) -> dict[str, int]:
        """Return a digest of each item that may be equal on all ranks; make `of_names`."""
        found = {path: self._digest(path) for path, item in self.items.items() if item.copies in (UNDECIDED, ROWS)}
        by_value = {kind.name for kind in self._kinds if kind.is_replaceable} | {ROWS}
        names: dict[str, list[int]] = {}
        for path in self.items:
            if path in found and self._has_data(path):
                names.setdefault(path.partition("/")[0], []).append(found[path])
        never_change = {
            path.partition("/")[0] for path, value in self.live.items() if library_of(value) in NEVER_WRITTEN
        }
        for path, item in self.items.items():
            name = path.partition("/")[0]
            if item.kind not in by_value and not (item.kind == "object" and name in never_change):
                names.pop(name, None)  # changed in place, or asked for its state
        self.of_names = {name: _summary(numbers) for name, numbers in names.items()}
        return {path: number for path, number in found.items() if self.items[path].copies == UNDECIDED}

    def decide(self, mine: Mapping[str, int], communicator: Communicator) -> None:
        """Decide which items are saved once, and make `unchanged`.  Collective.

        Args:
            mine: this rank's `digests`.
            communicator: the ranks.
        """
        digests = list(mine.values())
        equal = np.ones(len(digests), bool)
        names = [path for path in self.items if "/" not in path]
        # A rank without data of a name neither says that they have changed nor that they have not.
        told = [0 if name not in self.of_names else 1 + (self.of_names[name] != self.last.get(name)) for name in names]
        are_equal, most = _compared([_summary(digests)], communicator, told)
        self.unchanged = [name for name, number in zip(names, most, strict=True) if number == 1]
        if not are_equal.all():
            equal, _ = _compared(digests, communicator)
        for path, is_equal in zip(mine, equal.tolist(), strict=True):
            self.items[path] = dataclasses.replace(self.items[path], copies=ONE if is_equal else OWN)

    def _has_data(self, path: str) -> bool:
        """Return whether there is anything at a path that could change: a rank may never have rows, a list no items."""
        return bool(self.arrays[path].size) if path in self.arrays else self.values[path] not in _EMPTY

    def _digest(self, path: str) -> int:
        array = self.arrays.get(path)
        if array is None:
            return int.from_bytes(checksum_of(encoded(repr(self.values[path]))).digest()[:8], "little")
        array = host_array(array)
        shape = array.shape
        if array.dtype.kind in "SUmM" or not array.flags.c_contiguous:
            array = np.frombuffer(array.tobytes(), np.uint8)
        return _summary([digest(array), *shape])

    # ------------------------------------------------------------------------------------------- what must be equal

    def structure(self) -> str:
        """Return what must be equal on all ranks, in words that show a difference."""
        who = self._identities()
        return "; ".join(
            f"{path}{f' is {who[path]}' if path in who else ''}: {item.kind} {item.copies} {item.dtype}"
            f"{_comparable(item)} {item.more or ''}"
            for path, item in self.items.items()
        )

    def _identities(self) -> dict[str, str]:
        """Return words for the object at each path, equal on all ranks for the same object.

        Names are not enough: a rank with two names swapped would save one variable as the other.  Variables have
        numbers that all ranks share; optimizers are known by their variables; other objects by the order in which those
        of their class in the checkpoint were made.  Arrays, plain values and random generators have no identity: see
        `check_generators`.
        """
        objects = self.live | self.variables
        made: dict[type, list[tuple[tuple[int], str]]] = {}
        for path, value in objects.items():
            if isinstance(value, Created):
                made.setdefault(type(value), []).append((value._creation_order, path))
        numbers = {
            path: f"{number} of {len(paths)}"
            for paths in made.values()
            for number, (_, path) in enumerate(sorted(paths), 1)
        }
        kinds = {kind.name: kind for kind in self._kinds}
        found = {
            path: kinds[self.items[path].kind].identity(value, numbers.get(path, "")) for path, value in objects.items()
        }
        return {path: text for path, text in found.items() if text}

    def check_generators(self, communicator: Communicator, call: Call) -> None:
        """Raise on every rank if a rank has rank 0's generators under other names.  Collective, in an agreed call.

        Generators may differ between ranks, but no rank has the states of another by chance.

        Raises:
            CollectiveMismatchError: names the generators and the rank.
        """
        states = {path: self._digest(path) for path, item in self.items.items() if item.kind == "rng"}
        if communicator.size == 1 or len(states) < 2:
            return
        mine = list(states.values())
        theirs = np.array(mine, np.uint64)
        communicator.bcast(theirs, 0)
        call.expect_more()
        first: list[int] = theirs.tolist()
        if mine != first and sorted(mine) == sorted(first):
            swapped = [
                f"{path!r} on rank {communicator.rank} is {list(states)[first.index(number)]!r} on rank 0"
                for path, number, there in zip(states, mine, first, strict=True)
                if number != there
            ]
            raise CollectiveMismatchError.at(
                self.where,
                found=f"random generators under other names than on rank 0: {'; '.join(swapped[:_MOST_NAMED])}",
                expected="the same objects under the same names on all ranks",
                fix="Where each rank has its own on purpose, keep generator.bit_generator.state.",
            )
        call.agree("compare random generators")


def _comparable(item: Item) -> str:
    """Return what must be equal on all ranks of a shape: nothing of per-rank data, and not how many rows there are."""
    if item.copies == UNDECIDED:
        return "[any shape]" if item.is_array else "[]"
    return f"[any, {str(list(item.shape[1:]))[1:]}" if item.copies == ROWS else f"{list(item.shape)}"


def _summary(numbers: Sequence[int]) -> int:
    """Return a digest of numbers."""
    return int.from_bytes(checksum_of(np.array(numbers, np.uint64).tobytes()).digest()[:8], "little")


def _compared(digests: Sequence[int], communicator: Communicator, more: Sequence[int] = ()) -> tuple[Array, list[int]]:
    """Return which digests are equal on all ranks, and of each of some other numbers the greatest.  Collective."""
    numbers = np.array(digests, np.uint64)
    greatest = np.concatenate([numbers, ~numbers, np.array(more, np.uint64)])
    communicator.allreduce(greatest, "MAX")
    first, second, others = np.split(greatest, [numbers.size, 2 * numbers.size])
    return np.asarray(first == ~second), others.tolist()  # max(d) == ~max(~d) means max(d) == min(d)


def kind_of(value: Any, kinds: Sequence[Kind]) -> Kind | None:
    """Return the first kind that owns an object; None for one that cannot be saved."""
    for kind in kinds:
        if kind.owns(value):
            return kind
    return None


def strategy_of(objects: Mapping[str, Any], made_in: Strategy, kinds: Sequence[Kind]) -> Strategy:
    """Return the strategy whose ranks share these objects.

    That is `made_in`; for the default strategy, the strategy of the variables among the objects, or else the only one
    of several ranks that is open.

    Raises:
        ContextError: if there are several, or none any more.
    """
    if not made_in._is_default:
        return made_in
    variables = _variables_in(list(objects.values()), kinds, 0)
    found: dict[int, Strategy] = {id(var.strategy): var.strategy for var in variables if not var.strategy._is_default}
    shared = [strategy for strategy in found.values() if not strategy.extended._is_local]
    if shared or found:
        return (shared or list(found.values()))[0]
    joined: Any = context.open_strategy("Checkpoint", "one that was")
    return made_in if joined is None else joined


def _variables_in(values: Sequence[Any], kinds: Sequence[Kind], depth: int) -> Iterator[Variable]:
    for value in values:
        if type(value) in (dict, list, tuple):
            if depth < _DEEPEST:
                yield from _variables_in(list(value.values()) if type(value) is dict else value, kinds, depth + 1)
        elif (kind := kind_of(value, kinds)) is not None:
            yield from kind.variables(value)
