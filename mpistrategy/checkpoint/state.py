"""The state of objects as a flat table; `Kind`: how one kind of object is entered into it, and restored; and `Fit`.

The table has an item for each path.  It says kinds, dtypes and shapes, and must be equal on all ranks; beside it are
this rank's arrays and values.
The ranks compare their arrays, numbers and generators: those that are equal everywhere are saved once, others once for
each rank.

`Fit` is a checkpoint beside these objects.  They are compared path by path, with a list of everything that does not
fit.  The comparison is the same on all ranks, except for per-rank values.

To keep something new in checkpoints, write one Kind and enter it in the table in `mpistrategy.checkpoint.kinds`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mpistrategy import context
from mpistrategy.arrays.convert import NEVER_WRITTEN, host_array
from mpistrategy.arrays.digests import digest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.foreign import library_of
from mpistrategy.checkpoint.rows import Rows
from mpistrategy.checkpoint.storage.files import checksum_of
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, ROWS, Item, Manifest
from mpistrategy.checkpoint.storage.plain_values import ABSENT, from_json
from mpistrategy.checkpoint.storage.shards import dtype_text
from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.text import encoded, printable
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

_DEEPEST = 100
_ACCEPTED = (
    "Variables, optimizers, gradient accumulators, metrics, arrays, ms.Rows, numbers, strings, random generators, "
    "strategy.rng(seed), iterators of distributed datasets, torch's modules, tensors, JAX's arrays, dicts, lists and "
    "tuples of these, objects with state_dict() and load_state_dict(), and functions that return one of these"
)

#: What kinds raise over items that no save has written.
_UNSOUND = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)
#: The longest text about one problem, and how many problems are shown.
_LONGEST, _MOST_PROBLEMS = 1000, 10
IN_PART = "; partial=True restores the others"

#: Copies of an item before the ranks have compared them: kept once if they are equal, else one for each rank.
UNDECIDED = "?"

#: None and empty containers, as JSON.
_EMPTY: tuple[Any, ...] = (None, "", [], {"tuple": []}, {"dict": []})

#: Returns the value of an object after restoring: the object, changed in place, or another one.
Restore = Callable[[], Any]


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
    def restore(self, fit: Fit, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """Note what does not fit and which arrays are needed; return what restores the object.  Changes nothing.

        Args:
            fit: where problems and arrays are noted.
            path: where the object is.
            item: what the checkpoint has at `path`.
            value: the object; `ABSENT` if there is none.
            fresh: make new arrays; do not write into those that are here.
        """

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
        strategy, where, kinds: as given.
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
        self.kinds = kinds
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
        kind = kind_of(value, self.kinds)
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
        by_value = {kind.name for kind in self.kinds if kind.is_replaceable} | {ROWS}
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

    def decide(self, mine: Mapping[str, int], communicator: Ranks) -> None:
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
        """Return what must be equal on all ranks, in words that show a difference.

        Names are not enough: a rank with two names swapped would save one variable as the other.
        """
        who = {path: var._key for path, var in self.variables.items() if not var.strategy.extended._is_local}
        return "; ".join(
            f"{path}{f' is {who[path]}' if path in who else ''}: {item.kind} {item.copies} {item.dtype}"
            f"{_comparable(item)} {item.more or ''}"
            for path, item in self.items.items()
        )


def _comparable(item: Item) -> str:
    """Return what must be equal on all ranks of a shape: nothing of per-rank data, and not how many rows there are."""
    if item.copies == UNDECIDED:
        return "[any shape]" if item.is_array else "[]"
    return f"[any, {str(list(item.shape[1:]))[1:]}" if item.copies == ROWS else f"{list(item.shape)}"


def _summary(numbers: Sequence[int]) -> int:
    """Return a digest of numbers."""
    return int.from_bytes(checksum_of(np.array(numbers, np.uint64).tobytes()).digest()[:8], "little")


def _compared(digests: Sequence[int], communicator: Ranks, more: Sequence[int] = ()) -> tuple[Array, list[int]]:
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


# ------------------------------------------------------------------------------------------------ how it fits


class Fit:
    """How these objects are restored from this checkpoint.

    Args:
        manifest: what the checkpoint has.
        state: the objects.
        values: the plain values that each rank had, as JSON by path: those of the first rank, and those of the rank
            nearest to this one, which is this rank if it was there.
        communicator: the ranks.
        partial: restore what is on both sides, and leave the rest.

    Attributes:
        manifest: as given.
        strategy: whose ranks they are.
        here: `state`.
        rank: this rank.
        same_ranks: whether as many ranks saved as there are now.
        problems: what does not fit, in words; the other attributes are valid only if there is none.
        more_problems: how many more problems there are.
        left_out: with `partial`, the names that are on one side only.
        fetched: the paths of the arrays that are needed, each with the variable that it goes into; None for an array
            that goes into `staged`.
        shared: the paths among them of which each rank gets its own or, on another number of ranks, a part.
        prepare: functions that make missing variables; collective.
        staged: the arrays that were fetched, by path.
    """

    def __init__(
        self,
        manifest: Manifest,
        state: State,
        values: tuple[dict[str, Any], dict[str, Any]],
        communicator: Ranks,
        partial: bool,
    ) -> None:
        self.manifest = manifest
        self._first, self._nearest = values
        self.here = state
        self._kinds = {kind.name: kind for kind in state.kinds}
        self._replaceable = {kind.name for kind in state.kinds if kind.is_replaceable}
        self.strategy: Strategy = state.strategy
        self.rank: int = communicator.rank
        self.same_ranks: bool = communicator.size == manifest.ranks
        self._partial = partial
        self._lasting = _holders_of_lasting(state, self._replaceable)
        self.problems: list[str] = []
        self.more_problems: int = 0
        self.left_out: list[str] = []
        self.fetched: dict[str, Callable[[], Variable] | None] = {}
        self.shared: set[str] = set()
        self.prepare: list[Callable[[], None]] = []
        self.staged: dict[str, Array] = {}

    def restore_of(self, path: str, value: Any, *, fresh: bool = False) -> Restore:
        """Return what restores the object at `path`.

        Args:
            path: where it is, in the checkpoint and among the objects.
            value: the object, or `ABSENT`.
            fresh: make new arrays; do not write into those that are here.
        """
        item = self.manifest.items.get(path)
        if item is None:
            return self.missing(path, value)
        kind = self._kinds.get(item.kind)
        if kind is None:
            return self.problem(path, f"the checkpoint has something of an unknown kind, {item.kind[:40]!r}")
        try:
            return kind.restore(self, path, item, value, fresh)
        except _UNSOUND as error:
            return self.problem(path, f"{type(error).__name__}: {error}")

    def problem(self, path: str, text: str) -> Restore:
        """Note what does not fit; the text may come from a checkpoint."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(printable(f"{path}: {text}", "")[:_LONGEST])
        else:
            self.more_problems += 1
        return lambda: None

    def missing(self, path: str, value: Any) -> Restore:
        """Note an object that the checkpoint does not have."""
        if value is ABSENT:
            return self.problem(path, "the checkpoint names it and does not have it")
        if not self._partial:
            return self.problem(path, f"{_named(value)} here, nothing in the checkpoint{IN_PART}")
        self.left_out.append(path)
        return lambda: value

    def expect(self, holds: bool, path: str, item: Item, value: Any) -> bool:
        """Return `holds`, whether the checkpoint has what is here; note a problem if it is False."""
        if not holds:
            shape = f" {item.dtype}{list(self._shape_of(path, item))}" if item.is_array else ""
            self.problem(path, f"{item.kind}{shape} in the checkpoint, {_named(value)} here")
        return holds

    def has_layout(self, path: str, item: Item, array: Array) -> bool:
        """Return whether an item is an array of this dtype and shape."""
        return item.is_array and dtype_text(array.dtype, "") == item.dtype and array.shape == self._shape_of(path, item)

    def _shape_of(self, path: str, item: Item) -> tuple[int, ...]:
        """Return the shape of what this rank gets back; of rows, that of the global array."""
        return tuple(self._nearest[path]) if item.copies == OWN and self.same_ranks else item.shape

    def knows_own(self, path: str, item: Item) -> bool:
        """Return whether this rank's copy is known; note a problem if not."""
        if item.copies != OWN or self.same_ranks:
            return True
        self.problem(path, self.of_its_own(item))
        return False

    def own_value(self, path: str, item: Item) -> Any:
        """Return this rank's value; None, and a problem is noted, if it is not known."""
        return self.nearest_value(path, item) if self.knows_own(path, item) else None

    def first_value(self, path: str, item: Item) -> Any:
        """Return the value of the first rank."""
        return from_json(item.values[0] if item.copies == ONE else self._first[path])

    def nearest_value(self, path: str, item: Item) -> Any:
        """Return the value of this rank; if it was not there, of another one."""
        return from_json(item.values[0] if item.copies == ONE else self._nearest[path])

    def of_its_own(self, item: Item) -> str:
        """Return why per-rank data cannot be restored here."""
        now = self.strategy.num_replicas_in_sync
        return (
            f"each of the {self.manifest.ranks} ranks that saved had a {item.kind} of its own; now there are {now}; "
            "save rows of a global array as ms.Rows(array), sums and means in an ON_READ Variable with that "
            "aggregation, or make it equal on all ranks"
        )

    def is_replaceable(self, path: str, value: Any) -> bool:
        """Return whether the object at `path` may become another object: nothing in it is changed in place."""
        here = self.here.items.get(path)
        can_be = here is None or here.kind in self._replaceable or (value is ABSENT and here.kind != ROWS)
        return can_be and path not in self._lasting

    def is_lasting(self, path: str) -> bool:
        """Return whether a restore must not remove the object at `path`."""
        item = self.here.items.get(path)
        return item is not None and (item.kind not in self._replaceable or path in self._lasting)


def _holders_of_lasting(state: State, replaceable: set[str]) -> set[str]:
    """Return the paths of what holds objects that must be there, and cannot be made anew."""
    found: set[str] = set()
    for path, item in state.items.items():
        above = path.rpartition("/")[0]
        while item.kind not in replaceable and above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def _named(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, Variable):
        return f"variable {dtype_text(value.dtype, '')}{list(value.shape)}"
    if isinstance(value, Rows):
        return f"Rows {dtype_text(np.asarray(value).dtype, '')}[*{''.join(f', {n}' for n in value.shape[1:])}]"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype.str}{list(value.shape)}"
    return f"a {type(value).__name__}"
