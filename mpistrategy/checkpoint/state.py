"""The state of objects as a flat table: one walk enters the object at each path.

A leaf of the table is an array, a plain value, a variable or a random generator.  An object that tells its state
(`mpistrategy.objects.kept`, or `state_dict`) is entered as that state is, and so are dicts, lists and tuples.

The table says kinds, dtypes and shapes, and must be equal on all ranks; beside it are this rank's arrays and values.
The ranks compare their arrays, numbers and generators.  Equal items are saved once, other items once for each rank.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import (
    array_where_it_is,
    as_target,
    as_tensor,
    hand_back,
    host_array,
    is_foreign,
    is_on_device,
    library_of,
    like_given,
    on_device_of,
    placed_as,
)
from mpistrategy.arrays.digests import digest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.format import (
    ABSENT,
    ARRAYS,
    COMBINED,
    DEEPEST,
    NOT_PLAIN,
    ONE,
    OWN,
    ROWS,
    AnyGenerator,
    Item,
    checked_state,
    dtype_of,
    dtype_text,
    from_json,
    require,
    set_state,
    state_of,
    to_json,
)
from mpistrategy.checkpoint.restoring import Reading, fetched
from mpistrategy.errors import CheckpointMismatchError, OptionError, OptionTypeError, ShapeError
from mpistrategy.objects.kept import Kept, Leaf, is_stateful
from mpistrategy.objects.text import encoded, printable
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
#: Below these kinds, arrays and values come from the checkpoint, whatever the program has.
_FREE = KEPT | {"object"}
DICTS: tuple[type, ...] = (dict, OrderedDict, defaultdict, Counter)
#: None and empty containers, as JSON.
_EMPTY: tuple[Any, ...] = (None, "", [], {"tuple": []}, {"dict": []})
#: Stands for an item that is not there.
_NONE = Item("")
#: The longest text about one problem, and how many problems are shown.
_LONGEST, _MOST_PROBLEMS = 1000, 10


class Rows:
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
        objects, strategy, where: as given.
        items: the table.
        live: the object at each path.
        arrays: this rank's arrays, not copied.
        values: this rank's values, as JSON.
        kept: the objects of this package that tell their states, with their paths.
        firsts: of leaves, the numbers that fill variables if a checkpoint does not have them, or None.
        digests: of the items that may be equal on all ranks; empty before `take_digests`.

    Raises:
        OptionTypeError: for an object of unknown kind; names the path.
        DTypeError: for arrays of objects.
        LeafError: for arrays without data; names the path.
    """

    def __init__(self, objects: dict[str, Any], strategy: Strategy, where: str) -> None:
        self.objects = objects
        self.strategy = strategy
        self.where = where
        self.items: dict[str, Item] = {}
        self.live: dict[str, Any] = {}
        self.arrays: dict[str, Array] = {}
        self.values: dict[str, Any] = {}
        self.firsts: dict[str, float | None] = {}
        self.digests: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        self.kept: list[tuple[str, Kept]] = []
        for name, value in objects.items():
            self._add(name, value)
        for path, owner in self.kept:  # last: their states name paths of variables
            state = owner._state(lambda var: self._paths.get(id(var)))
            if state is None:
                raise self._unknown(path, owner)
            self._add_all(path, owner._kept_as, state)

    def _add(self, path: str, value: Any) -> None:
        """Enter an object and its children; only note an object of this package that tells its state."""
        depth, copies = path.count("/"), UNDECIDED
        if depth > DEEPEST:
            raise OptionError.at(self.where, found=f"{path[:80]!r}, {depth} levels deep", expected="fewer levels")
        if isinstance(value, Leaf):
            copies, self.firsts[path] = value.copies or UNDECIDED, value.first
            value = value.value
        self.live[path] = value
        is_generator = isinstance(value, AnyGenerator)
        content = state_of(value) if is_generator else value
        try:
            plain = to_json(content)
        except TypeError:
            plain = NOT_PLAIN
        if plain is not NOT_PLAIN:
            self.items[path] = Item("rng" if is_generator else "plain", copies)
            self.values[path] = plain
        elif isinstance(value, Variable):
            self._paths[id(value)] = min(path, self._paths.get(id(value), path))  # whatever order names come in
            self._add_array(path, "variable", self._copies_of(value), value.local_view)
        elif isinstance(value, Rows):
            self._add_array(path, ROWS, ROWS, value.value)
        elif isinstance(value, Kept):
            self.items[path] = Item(value._kept_as)  # its place in the table
            self.kept.append((path, value))
        elif kind := container_of(value):
            self._add_all(path, kind, value if kind == "dict" else dict(enumerate(value)))
        elif is_array(value):
            kind = "scalar" if isinstance(value, np.generic) else "array"
            kind = "tensor" if library_of(value) == "torch" else kind
            self._add_array(path, kind, copies, value)
        elif is_stateful(value):
            kind = "module" if callable(getattr(value, "named_parameters", None)) else "object"
            self._add_all(path, kind, {"state": value.state_dict()})
        elif members := members_of(value):
            self._add_all(path, "variables", dict(enumerate(members)))
        else:
            raise self._unknown(path, value)

    def _add_all(self, path: str, kind: str, children: Mapping[Any, Any]) -> None:
        """Enter an object that only holds other objects."""
        self.items[path] = Item(kind, keys=[*children])
        for key, child in children.items():
            below = _below(path, key)
            if type(key) not in (str, int) or below in self.items:
                found = f"the key {key!r:.80} of {path!r}"
                raise OptionTypeError.at(self.where, found=found, expected="strings or ints, all different")
            self._add(below, child)

    def _add_array(self, path: str, kind: str, copies: str, array: Any) -> None:
        if not (isinstance(array, np.ndarray) or kind == "variable"):  # a variable may be on a GPU
            array = host_array(array, self.where, path)
        shape = (0, *array.shape[1:]) if copies == ROWS else array.shape
        self.items[path] = Item(kind, copies, dtype_text(array.dtype, f"{self.where}: {path!r}"), shape)
        self.arrays[path] = array_where_it_is(array, self.where, path)  # refuses masked arrays

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

    def take_digests(self) -> None:
        """Take a digest of each item that may be equal on all ranks."""
        for path, item in self.items.items():
            if item.copies == UNDECIDED and item.dtype:
                array = self.arrays[path]
                self.digests[path] = digest(np.array([digest(host_array(array)), *array.shape], np.uint64))
            elif item.copies == UNDECIDED:
                self.digests[path] = digest(np.frombuffer(encoded(repr(self.values[path])), np.uint8))

    def decide(self) -> None:
        """Decide which of these items are saved once.  Collective."""
        least = np.array([*self.digests.values()], np.uint64)
        greatest = least.copy()
        self.strategy.extended.communicator.allreduce(least, "MIN")
        self.strategy.extended.communicator.allreduce(greatest, "MAX")
        for path, is_equal in zip(self.digests, (least == greatest).tolist(), strict=True):
            values = (self.values[path],) if is_equal and path in self.values else ()
            self.items[path] = self.items[path]._replace(copies=ONE if is_equal else OWN, values=values)

    def by_name(self) -> dict[str, list[Any]]:
        """Return, for each object, what is equal in the next save if the program may have replaced the object by then.

        That are digests of arrays and values, and of JAX's arrays, if they are equal on all ranks.  Objects without
        data are left out.  All ranks return the same digests.
        """
        found = defaultdict[str, list[Any]](list)
        of_jax = {path.partition("/")[0] for path, live in self.live.items() if library_of(live) == "jax"}
        for path, item in self.items.items():
            name = path.partition("/")[0]
            if item.copies == OWN or item.kind not in (REPLACEABLE | {"object"} if name in of_jax else REPLACEABLE):
                found[name].append(object())  # which equals nothing else
            elif self.arrays[path].size if item.dtype else self.values.get(path, []) not in _EMPTY:
                found[name].append(self.digests.get(path, 0))
        return found

    def structure(self) -> str:
        """Return the structure, which must be equal on all ranks, in words that show a difference.

        Names are not enough: a rank with two names swapped would save one variable as the other.
        """
        lines = []
        for path, item in self.items.items():
            live, shape = self.live[path], "[any shape]" if item.copies in (UNDECIDED, OWN) else item.shape
            is_shared = isinstance(live, Variable) and not live.strategy.extended._reducer.is_alone
            who = f" is {live._key}" if is_shared else ""
            lines.append(f"{path}{who}: {item.kind} {item.copies} {item.dtype}{shape} {item.keys}")
        return "; ".join(lines)


class Comparison:
    """A checkpoint that fits these objects, compared path by path; alike on all ranks but for per-rank data.

    Args:
        source: the checkpoint.
        state: the objects.
        partial: restore the objects that are on both sides, and leave the others.

    Attributes:
        one_sided: the names that are on one side only.

    Raises:
        CheckpointMismatchError: with a list, for what does not fit.
    """

    def __init__(self, source: Reading, state: State, partial: bool) -> None:
        self._source, self._state, self._is_partial = source, state, partial
        self.one_sided: list[str] = sorted({*source.manifest.names} ^ {*state.objects})
        #: What is restored, with the shapes that this rank gets; of rows, without their number.
        self._items: dict[str, Item] = {}
        #: The arrays that have come and go into no variable, by path.
        self._arrays: dict[str, Array] = {}
        #: The arrays, lists and dicts of the program that have got a content, by id, with the content.
        self._contents: dict[int, tuple[Any, Any]] = {}
        #: The kind of the object at each path or nearest above that tells its own state.
        self._inside: dict[str, str] = {"": ""}
        for path, item in source.manifest.items.items():
            if path.partition("/")[0] in state.objects:
                is_own = item.copies == OWN and path in source.own.arrays
                self._items[path] = item._replace(shape=source.own.arrays[path].shape) if is_own else item
                above = self._inside[path.rpartition("/")[0]]
                self._inside[path] = item.kind if item.kind in _FREE | {"module"} else above
        problems = [printable(line, "")[:_LONGEST] for line in islice(self._problems(), _MOST_PROBLEMS + 1)]
        if problems:
            problems[_MOST_PROBLEMS:] = ["and more"] * (len(problems) > _MOST_PROBLEMS)
            raise CheckpointMismatchError.at(
                state.where,
                found=f"a checkpoint, {source.path!r}, that does not fit the objects",
                expected="the same names, kinds, dtypes and shapes",
                fix="\n  ".join(["Nothing has changed. These do not fit (partial=True leaves names out):", *problems]),
            )

    # ------------------------------------------------------------------------------------------- what does not fit

    def _problems(self) -> Iterator[str]:
        """Yield what does not fit; the text may come from a checkpoint."""
        saved, missing = self._source.manifest.items, [] if self._is_partial else self.one_sided
        yield from (f"{name}: {saved[name].kind} in the checkpoint, nothing here" for name in missing if name in saved)
        for path, own_item in self._state.items.items():
            inside = self._inside.setdefault(path, self._inside[path.rpartition("/")[0]])
            is_made = own_item.kind in REPLACEABLE and inside != "module"
            is_free = inside == "object" or is_made or self._state.firsts.get(path) is not None
            is_left = path not in self._items and path.partition("/")[0] in self._items and not is_free
            if is_left or path in missing:
                yield f"{path}: {self._in_words(path)} here, nothing in the checkpoint"
        for path, item in self._items.items():
            try:
                trouble = self._trouble(path, item)
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
                trouble = f"{type(error).__name__}: {error}"
            if trouble:
                yield f"{path}: {trouble}"

    def _trouble(self, path: str, item: Item) -> str:
        """Return why an item does not fit the program's object; "" if it does."""
        value, kind = self._target(path, item), item.kind
        if item.copies == OWN and not self._source.same_ranks and kind != "rng":
            return (
                f"each of the {self._source.manifest.ranks} ranks that saved had a {kind} of its own; "
                f"now there are {self._source.ranks.size}; "
                "save rows of a global array as ms.Rows(array), sums and means in an ON_READ Variable with that "
                "aggregation, or make it equal on all ranks"
            )
        if not self._fits(path, item, value):
            shape = f" {item.dtype}{list(item.shape)}" if item.dtype else ""
            how = f" with aggregation {item.copies}" if item.copies in COMBINED else ""
            return f"{kind}{shape}{how} in the checkpoint, {self._in_words(path)} here"
        if _is_in_place(value) and library_of(value) != "jax":
            as_target(value, "here", "the array")  # raises where nothing can be written to it
        self._content(path, item)  # raises for what no save wrote
        return value._check(self._zero_state(path), self._state.live.get) if kind in KEPT else ""

    def _fits(self, path: str, item: Item, value: Any) -> bool:
        """Return whether there is an object of this kind, dtype and shape, or a replaceable object."""
        here, kind = self._state.items.get(path, _NONE).kind, item.kind
        if value is ABSENT:
            if kind == "variable":  # an optimizer has looked at those that it will make
                return self._inside[path] == "optimizer"
            is_alike = not here or (kind == ROWS) == (here == ROWS)
            return kind in REPLACEABLE | {ROWS} and is_alike and self._inside[path] != "module"
        if kind in ("variable", ROWS) or _is_in_place(value):
            return (here == kind or kind in ARRAYS) and self._has_layout(path, item)
        if kind in ARRAYS | {"plain"}:
            return here in REPLACEABLE
        if kind in ("dict", "list", "tuple"):  # a named tuple has as many fields
            return container_of(value) == kind and len(getattr(value, "_fields", item.keys)) == len(item.keys)
        return here == kind

    def _has_layout(self, path: str, item: Item) -> bool:
        """Return whether the array here has this dtype and shape; and whether its copies are combined, if these are."""
        own_item = self._state.items.get(path, _NONE)
        is_split = item.copies in COMBINED and own_item.copies == UNDECIDED
        return not is_split and (own_item.dtype, own_item.shape) == (item.dtype, item.shape)

    def _in_words(self, path: str) -> str:
        """Return the program's object at a path, in words."""
        own_item = self._state.items.get(path, _NONE)
        if own_item.dtype:
            return f"{own_item.kind} {own_item.dtype}{list(own_item.shape)}"
        return f"a {type(self._state.live[path]).__name__}" if own_item.kind else "nothing"

    # ------------------------------------------------------------------------------------------- objects and values

    def _target(self, path: str, item: Item) -> Any:
        """Return the object at a path that an item goes into; `ABSENT` if the item makes a new object."""
        is_new = item.kind in REPLACEABLE | {ROWS} and self._inside[path] in _FREE
        return ABSENT if is_new else self._state.live.get(path, ABSENT)

    def _content(self, path: str, item: Item) -> Any:
        """Return what a checkpoint has for this rank, without arrays: the paths below by key, or a value or state.

        The value is another rank's if this rank did not save; its generator then gets a new stream.

        Raises:
            ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError: for what no save wrote.
        """
        if item.kind not in ("plain", "rng"):
            children = {key: _below(path, key) for key in item.keys}
            has_state = "state" in children or item.kind not in ("module", "object")
            # No two keys may have one path.
            require(has_state and len({*children.values()} & self._items.keys()) == len(children), "items")
            return children
        value = from_json(item.values[0] if item.copies == ONE else self._source.own.values[path])
        rank = self._source.ranks.rank
        # A new rank gets rank 0's stream, jumped by its number: no other rank has that stream, then or later.
        times = 0 if item.copies == ONE or rank < self._source.manifest.ranks else rank
        return checked_state(self._state.live[path], value, times) if item.kind == "rng" else value

    def _zero_state(self, path: str) -> Any:
        """Return the saved state of an object of this package, with zeros in its arrays."""
        item = self._items[path]
        if item.dtype:
            return np.broadcast_to(np.zeros((), dtype_of(item.dtype)), item.shape)
        content = self._content(path, item)
        if item.kind in ("plain", "rng"):
            return content
        children = {key: self._zero_state(inner) for key, inner in content.items()}
        return [*children.values()] if item.kind == "list" else children

    # ------------------------------------------------------------------------------------------- restoring

    def fetch(self) -> None:
        """Make the missing variables, and write arrays into variables; keep the other arrays for objects.  Collective.

        Variables of optimizers that the checkpoint does not have get their first values.
        """
        state = self._state
        for path, value in state.kept:
            if path in self._items:
                value._prepare(self._zero_state(path), state.live.get, state.strategy)
        state = self._state = State(state.objects, state.strategy, state.where)
        lost = [path for path, item in self._items.items() if item.kind == "variable" and path not in state.live]
        if lost:
            raise CheckpointMismatchError.at(
                state.where,
                found=f"{lost[0]!r} in the checkpoint, of a variable that has another name here",
                expected="each variable under the names that it had, and no others",
            )
        for path, item in self._items.items():
            live = state.live.get(path)
            if item.kind == "variable" and isinstance(live, Variable) and self._has_layout(path, item):
                store(live, fetched(self._source, path, state.items[path].copies))
            elif item.dtype:
                self._arrays[path] = fetched(self._source, path, item.copies)
        for path, first in state.firsts.items():
            if first is not None and path not in self._items and path.partition("/")[0] in self._items:
                store(state.live[path], np.full(state.items[path].shape, first, state.live[path].dtype))

    def restored(self, path: str) -> Any:
        """Return the restored object at a path: the program's object, changed in place if possible."""
        item = self._items[path]
        value, live, kind = self._target(path, item), self._state.live.get(path, ABSENT), item.kind
        if kind == "variable":
            return live
        if item.dtype:
            return self._restored_array(self._arrays.pop(path), item, value, live)
        content = self._content(path, item)
        if kind == "plain":
            return self._into(content, value)
        if kind == "rng":
            set_state(live, content)
            return live
        children = {key: self.restored(inner) for key, inner in content.items()}
        if kind == "dict":
            return self._into(children, live.copy() if value is ABSENT and type(live) in DICTS else value)
        if kind == "list":
            return self._into([*children.values()], value)
        if kind == "tuple":
            return getattr(type(live), "_make", tuple)(children.values())
        if kind in ("module", "object"):
            live.load_state_dict(children["state"])
        elif kind in KEPT:
            live._load(children)
        return live

    def _is_first(self, content: Any, owner: Any, are_equal: Callable[[Any, Any], object]) -> bool:
        """Return whether an object of the program has no other content yet: it may be at two places, with one each."""
        _, first = self._contents.setdefault(id(owner), (owner, content))
        return first is content or bool(are_equal(first, content))

    def _into(self, value: Any, container: Any) -> Any:
        """Return the container with the contents of a value, if both are lists or both are dicts; else the value.

        So do the lists and dicts in them.
        """
        is_list = type(container) is list and type(value) is list
        is_dict = type(container) in DICTS and type(value) is dict
        if value is container or not (is_list or is_dict) or not self._is_first(value, container, _are_equal):
            return value
        if is_list:
            container[:] = [self._into(*pair) for pair in zip_longest(value, container[: len(value)])]
            return container
        pairs = {key: self._into(inner, container.get(key)) for key, inner in value.items()}
        container.clear()
        container.update(pairs)
        return container

    def _restored_array(self, array: Array, item: Item, value: Any, live: Any) -> Any:
        if item.kind == ROWS:
            rows = value if isinstance(value, Rows) else Rows(array)
            rows.value = like_given(array, live.value) if isinstance(live, Rows) else array
            return rows
        if _is_in_place(value) and library_of(value) != "jax":
            if not self._is_first(array, value, lambda a, b: digest(host_array(a)) == digest(host_array(b))):
                return like_given(array, live)
            target = as_target(value, "Checkpoint.restore", "an array")
            target[...] = placed_as(array, target)
            hand_back(target, value)
            return value
        if _is_in_place(live):
            return like_given(array, live)
        if item.kind == "tensor":
            return as_tensor(array)
        return array[()] if item.kind == "scalar" else array


def _is_in_place(value: Any) -> bool:
    """Return whether a value is an array that can be written in place."""
    return is_array(value) and not isinstance(value, np.generic)


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two lists or dicts have equal contents; False where they hold arrays."""
    try:
        return bool(first == second)
    except ValueError:
        return False


# ------------------------------------------------------------------------------------------- kinds of objects


def _below(path: str, key: Any) -> str:
    """Return the path of what an object at a path has under a key."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"  # a path has no other slashes


def container_of(value: object) -> str:
    """Return the kind of a dict, list or tuple, named or not; "" for others, and for other derived classes."""
    if isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_fields")):
        return "tuple"
    return "dict" if type(value) in DICTS else "list" if type(value) is list else ""


def is_array(value: object) -> bool:
    """Return whether a value is an array of any library, or a NumPy scalar."""
    return isinstance(value, (np.ndarray, np.generic)) or is_on_device(value) or is_foreign(value)


def members_of(value: Any) -> tuple[Variable, ...]:
    """Return the variables of an object with an attribute `variables`, such as a metric; none for other objects."""
    members = getattr(value, "variables", None)
    is_list = isinstance(members, (list, tuple)) and all(isinstance(member, Variable) for member in members)
    return tuple(members) if is_list and members else ()


def store(var: Variable, array: Array) -> None:
    """Write an ndarray of its dtype and shape into this rank's copy of a variable, whatever its policy is."""
    storage = var._storage
    with on_device_of(storage):
        storage[...] = placed_as(array, storage)
