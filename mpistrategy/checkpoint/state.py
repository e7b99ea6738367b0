"""The state of objects as a flat table: one walk enters the object at each path.

A leaf of the table is an array, a plain value, a variable or a random generator.  An object that tells its state
(`mpistrategy.objects.kept`, or `state_dict`) is entered as that state is, and so are dicts, lists and tuples.

The table says kinds, dtypes and shapes, and must be equal on all ranks; beside it are this rank's arrays and values.
The ranks compare their arrays, numbers and generators.  Equal items are saved once, other items once for each rank.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array, is_foreign, is_on_device, library_of
from mpistrategy.arrays.digests import digest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.format import (
    ARRAYS,
    DEEPEST,
    GENERATORS,
    NOT_PLAIN,
    ONE,
    OWN,
    ROWS,
    Item,
    dtype_text,
    state_of,
    to_json,
)
from mpistrategy.errors import OptionError, OptionTypeError, ShapeError
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.kept import Kept, Leaf, is_stateful
from mpistrategy.objects.other_names import NamesOurs
from mpistrategy.objects.text import encoded
from mpistrategy.options import VariableAggregation, VariableSynchronization
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

_ACCEPTED = (
    "Variables, optimizers, gradient accumulators, metrics, arrays, ms.Rows, numbers, strings, random generators, "
    "strategy.rng(seed), iterators of distributed datasets, torch's modules, tensors, JAX's arrays, dicts, lists and "
    "tuples of these, objects with state_dict() and load_state_dict(), and functions that return one of these"
)
#: Copies of an item before the ranks have compared them: saved once if they are equal, else once for each rank.
UNDECIDED = "?"
#: Kinds that a restore may make anew; objects of other kinds must exist.
REPLACEABLE = frozenset({"plain", "dict", "list", "tuple"}) | ARRAYS
#: The kinds of objects that tell their own state.
KEPT = frozenset({"optimizer", "accumulator", "streams", "iterator"})
DICTS: tuple[type, ...] = (dict, OrderedDict, defaultdict, Counter)
#: None and empty containers, as JSON.
_EMPTY: tuple[Any, ...] = (None, "", [], {"tuple": []}, {"dict": []})


class Rows(NamesOurs):
    """This rank's rows of a global array, for checkpoints.

    The global array is the rows of all ranks, one after the other in rank order.  A checkpoint restores it on any
    number of ranks, also on the number that saved it: of n rows in all, each of p ranks gets the next ceil(n / p), the
    last ones fewer or none.  The restored rows are a new array in `value`.

    Args:
        value: an array of shape (rows, ...) of NumPy, CuPy, torch or JAX, not copied.  The number of rows may differ
            between the ranks, and may be 0; the dtype and the other axes must not.

    Attributes:
        value: the array.  Assign another one at any time.  A restore assigns one of the same library, on the same
            device.

    Raises:
        OptionTypeError: for anything else than an array.
        ShapeError: for an array without axes.

    >>> import os, tempfile, numpy as np, mpistrategy as ms
    >>> field = ms.Rows(np.arange(6.0).reshape(3, 2))
    >>> with tempfile.TemporaryDirectory() as folder, ms.OneDeviceStrategy("CPU:0").scope():
    ...     checkpoint = ms.Checkpoint(field=field)
    ...     path = checkpoint.save(os.path.join(folder, "first")).path
    ...     field.value = np.empty((0, 2))
    ...     _ = checkpoint.restore(path)
    >>> field.value.tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """

    _words_of = "Rows"

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def value(self) -> Any:
        """This rank's rows."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        if not (isinstance(value, np.ndarray) or is_on_device(value) or is_foreign(value)):
            raise OptionTypeError.at(
                "Rows",
                found=f"a {type(value).__name__}",
                expected="an array of shape (rows, ...)",
                fix="Write ms.Rows(np.asarray(...)).",
            )
        if not value.shape:
            raise ShapeError.at("Rows", found="an array without axes", expected="an array of shape (rows, ...)")
        self._value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's rows."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.value.dtype

    def __repr__(self) -> str:
        return f"Rows({self.value!r})"


class State:
    """The state of some objects on this rank.

    Args:
        objects: by name.
        strategy: whose ranks share them.
        where: the public name, for errors.

    Attributes:
        strategy, where: as given.
        items: the table.
        live: the object at each path.
        arrays: this rank's arrays, not copied.
        values: this rank's values, as JSON.
        firsts: of variables, the numbers that fill them if a checkpoint does not have them.

    Raises:
        OptionTypeError: for an object of unknown kind; names the path.
        DTypeError: for arrays of objects.
        LeafError: for arrays without data; names the path.
    """

    def __init__(self, objects: Mapping[str, Any], strategy: Strategy, where: str) -> None:
        self.strategy = strategy
        self.where = where
        self.items: dict[str, Item] = {}
        self.live: dict[str, Any] = {}
        self.arrays: dict[str, Array] = {}
        self.values: dict[str, Any] = {}
        self.firsts: dict[str, float] = {}
        self._paths: dict[int, str] = {}
        owners: list[tuple[str, Kept]] = []
        for name, value in objects.items():
            self._add(name, value, owners)
        for path, owner in owners:  # last: their states name paths of variables
            state = owner._state(lambda var: self._paths.get(id(var)))
            if state is None:
                raise self._unknown(path, owner)
            self._add_all(path, owner._kept_as, state, owners)

    def _add(self, path: str, value: Any, owners: list[tuple[str, Kept]]) -> None:
        """Enter an object and its children; note an object with a state of its own in `owners`."""
        depth, copies = path.count("/"), UNDECIDED
        if depth > DEEPEST:
            raise OptionError.at(self.where, found=f"{path[:80]!r}, {depth} levels deep", expected="fewer levels")
        if isinstance(value, Leaf):
            copies = value.copies or UNDECIDED
            if value.first is not None:
                self.firsts[path] = value.first
            value = value.value
        self.live[path] = value
        is_generator = isinstance(value, GENERATORS)
        plain = to_json(state_of(value) if is_generator else value)
        if plain is not NOT_PLAIN:
            self.items[path] = Item("rng" if is_generator else "plain", copies)
            self.values[path] = plain
        elif isinstance(value, Variable):
            self._paths.setdefault(id(value), path)
            self._add_array(path, "variable", self._copies_of(value), value.local_view)
        elif isinstance(value, Rows):
            self._add_array(path, ROWS, ROWS, host_array(value.value))
        elif isinstance(value, Kept):
            self.items[path] = Item(value._kept_as)  # its place in the table
            owners.append((path, value))
        elif type(value) in DICTS:
            if not all(type(key) in (str, int) for key in value) or len(set(map(str, value))) < len(value):
                problem = f"the keys {[*value]!r:.80} of {path!r}"
                raise OptionTypeError.at(self.where, found=problem, expected="strings or ints, all different")
            self._add_all(path, "dict", value, owners)
        elif type(value) is list or is_tuple(value):
            self._add_all(path, "list" if type(value) is list else "tuple", value, owners)
        elif is_array(value):
            kind = "scalar" if isinstance(value, np.generic) else "array"
            kind = "tensor" if library_of(value) == "torch" and is_foreign(value) else kind
            self._add_array(path, kind, copies, host_array(value, "Checkpoint.save", path))
        elif is_stateful(value):
            kind = "module" if callable(getattr(value, "named_parameters", None)) else "object"
            self._add_all(path, kind, {"state": value.state_dict()}, owners)
        elif members := members_of(value):
            self._add_all(path, "variables", members, owners)
        else:
            raise self._unknown(path, value)

    def _add_all(
        self, path: str, kind: str, children: Mapping[Any, Any] | Sequence[Any], owners: list[tuple[str, Kept]]
    ) -> None:
        """Enter an object that only holds other objects."""
        self.items[path] = Item(kind, keys=[*children] if isinstance(children, Mapping) else None)
        for key, child in children.items() if isinstance(children, Mapping) else enumerate(children):
            name = str(key).replace("~", "~0").replace("/", "~1")  # a path has no other slashes
            self._add(f"{path}/{name}", child, owners)

    def _add_array(self, path: str, kind: str, copies: str, array: Array) -> None:
        dtype = dtype_text(array.dtype, f"{self.where}: {path!r}")
        shape = (0, *array.shape[1:]) if copies == ROWS else array.shape
        self.items[path] = Item(kind, copies, dtype, shape)
        self.arrays[path] = array

    def _unknown(self, path: str, value: Any) -> OptionTypeError:
        return OptionTypeError.at(self.where, found=f"a {type(value).__name__} as {path!r}", expected=_ACCEPTED)

    def _copies_of(self, var: Variable) -> str:
        """Return how the ranks' copies of a variable are saved."""
        is_local = var.strategy.extended._reducer.is_alone
        if var.strategy is not self.strategy and not is_local and not self.strategy._is_default:
            raise OptionError.at(
                self.where,
                found=f"{var.name!r}, of another strategy than the rest",
                expected="objects of one strategy",
                fix="Make a Checkpoint for each strategy.",
            )
        if var.strategy is not self.strategy and self.strategy.extended.communicator.size > 1:
            return UNDECIDED  # a local variable: every rank has its own
        if var.synchronization is not VariableSynchronization.ON_READ:
            return ONE
        if var.aggregation is VariableAggregation.NONE:
            return ONE if is_local else UNDECIDED
        return var.aggregation.name

    # ------------------------------------------------------------------------------------------- what is kept once

    def digests(self) -> dict[str, int]:
        """Return a digest of each item that may be equal on all ranks."""
        return {path: self._digest(path) for path, item in self.items.items() if item.copies == UNDECIDED}

    def decide(self, digests: Mapping[str, int], communicator: Ranks) -> None:
        """Decide which of these items are saved once.  Collective."""
        numbers = np.array([*digests.values()], np.uint64)
        greatest = np.concatenate([numbers, ~numbers])
        if digests:
            communicator.allreduce(greatest, "MAX")
        first, second = np.split(greatest, 2)
        for path, is_equal in zip(digests, (first == ~second).tolist(), strict=True):  # then the least is the greatest
            values = (self.values[path],) if is_equal and path in self.values else ()
            self.items[path] = dataclasses.replace(self.items[path], copies=ONE if is_equal else OWN, values=values)

    def by_name(self, digests: Mapping[str, int]) -> dict[str, int]:
        """Return a digest of each object of arrays and values, or of JAX's arrays, that is equal on all ranks.

        Objects that change in place, and objects without data, are left out.  All ranks return the same dict.
        """
        found: dict[str, list[int]] = defaultdict(list)
        of_jax = {path.partition("/")[0] for path, live in self.live.items() if library_of(live) == "jax"}
        others = set[str]()
        for path, item in self.items.items():
            name = path.partition("/")[0]
            if item.copies == OWN or item.kind not in (REPLACEABLE | {"object"} if name in of_jax else REPLACEABLE):
                others.add(name)
            elif self.arrays[path].size if path in self.arrays else self.values.get(path) not in _EMPTY:
                found[name].append(digests.get(path, 0))
        return {name: _summary(numbers) for name, numbers in found.items() if name not in others}

    def _digest(self, path: str) -> int:
        array = self.arrays.get(path)
        if array is None:
            return digest(np.frombuffer(encoded(repr(self.values[path])), np.uint8))
        return _summary([digest(host_array(array)), *array.shape])

    def structure(self) -> str:
        """Return the structure, which must be equal on all ranks, in words that show a difference.

        Names are not enough: a rank with two names swapped would save one variable as the other.
        """
        lines = []
        for path, item in self.items.items():
            live, shape = self.live[path], "[any shape]" if item.copies in (UNDECIDED, OWN) else list(item.shape)
            is_shared = isinstance(live, Variable) and not live.strategy.extended._reducer.is_alone
            who = f" is {live._key}" if is_shared else ""
            lines.append(f"{path}{who}: {item.kind} {item.copies} {item.dtype}{shape} {item.keys or ''}")
        return "; ".join(lines)


def is_tuple(value: object) -> bool:
    """Return whether a value is a tuple, named or not, and of no other derived class."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def is_array(value: object) -> bool:
    """Return whether a value is an array of any library, or a NumPy scalar."""
    return isinstance(value, (np.ndarray, np.generic)) or is_on_device(value) or is_foreign(value)


def members_of(value: Any) -> tuple[Variable, ...]:
    """Return the variables of an object with an attribute `variables`, such as a metric; none for other objects."""
    members = getattr(value, "variables", None)
    is_list = isinstance(members, (list, tuple)) and all(isinstance(member, Variable) for member in members)
    return tuple(members) if is_list and members else ()


def _summary(numbers: Sequence[int]) -> int:
    """Return a digest of numbers."""
    return digest(np.array(numbers, np.uint64))
