"""What the state of objects is: a flat table of items by path, found by walking through them.  Never communicates.

The table says the kinds, dtypes and shapes, and must be equal on all ranks; beside it stand this rank's arrays and
values.  Of most it is clear how many copies there are.  Of what belongs to a rank (arrays, numbers, generators) it is
found out by comparing: what is equal on all ranks is kept once, the rest for each rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array, is_on_device
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.identities import check_generators, identities
from mpistrategy.checkpoint.kinds.accumulators import SUMS, item_of
from mpistrategy.checkpoint.kinds.generators import state_of, state_of_streams
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, Item
from mpistrategy.checkpoint.storage.plain_values import NOT_PLAIN, below, dtype_text, to_json
from mpistrategy.errors import AggregationError, OptionError, OptionTypeError
from mpistrategy.input.iterators import DistributedIterator
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import VariableAggregation, VariableSynchronization
from mpistrategy.strategy.random_streams import Streams
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.training.gradients import GradientAccumulator
from mpistrategy.training.optimizer import Optimizer
from mpistrategy.variables.mirrored_check import digest
from mpistrategy.variables.variable import Variable

#: Before the ranks have compared what they have: once, or each its own?
UNDECIDED = "?"
_DEEPEST = 100
_ACCEPTED = (
    "Variables, optimizers, gradient accumulators, metrics, arrays, numbers, strings, random generators, "
    "strategy.rng(seed), iterators of distributed datasets, dicts, lists and tuples of these, and objects with "
    "state_dict() and load_state_dict()"
)


class State:
    """The state of some objects on this rank.

    Args:
        objects: by name.
        strategy: whose ranks share them.
        where: the public name, for errors.

    Attributes:
        items: the table.
        live: what stands at each path.
        arrays: this rank's arrays, as they lie in memory.
        values: this rank's values, as JSON.

    Raises:
        OptionTypeError: for objects without a state that is known; names the path.
        AggregationError: for ON_READ variables whose aggregation is NONE.
        DTypeError: for arrays of objects.
    """

    def __init__(self, objects: Mapping[str, Any], strategy: Strategy, where: str) -> None:
        self._strategy = strategy
        self._where = where
        self._variables: dict[int, str] = {}
        self._variable_at: dict[str, Variable] = {}
        self.items: dict[str, Item] = {}
        self.live: dict[str, Any] = {}
        self.arrays: dict[str, Array] = {}
        self.values: dict[str, Any] = {}
        optimizers: list[tuple[str, Optimizer]] = []
        for name, value in objects.items():
            self._add(name, value, optimizers, 0)
        for path, optimizer in optimizers:  # which speak of variables that stand elsewhere
            self._add_optimizer(path, optimizer)

    def _add(self, path: str, value: Any, optimizers: list[tuple[str, Optimizer]], depth: int) -> None:
        if depth > _DEEPEST:
            raise OptionError.at(self._where, found=f"{path[:80]!r}, {depth} levels deep", expected="fewer levels")
        self.live[path] = value
        if isinstance(value, Variable):
            self._add_variable(path, value)
            self._variables.setdefault(id(value), path)
        elif isinstance(value, Optimizer):
            self.items[path] = Item("optimizer")  # keeps its place
            optimizers.append((path, value))
        elif isinstance(value, GradientAccumulator):
            self.items[path] = item_of(value, self._where)
            for number, total in enumerate(value.partial_sums):
                copies = ONE if self._strategy.extended.is_local else SUMS
                self._add_array(below(path, number), "array", copies, host_array(total))
        elif isinstance(value, Streams):
            self._add_value(path, "streams", OWN, to_json(state_of_streams(value)))
        elif isinstance(value, (np.random.Generator, np.random.RandomState)):
            self._add_value(path, "rng", UNDECIDED, to_json(state_of(value)))
        elif isinstance(value, DistributedIterator) and value.walk is not None:
            walk = value.walk
            more = {"of": walk.of, "any_ranks": walk.any_ranks}
            self._add_value(path, "iterator", UNDECIDED, walk.position, more)
        elif isinstance(value, (np.ndarray, np.generic)) or is_on_device(value):
            kind = "scalar" if isinstance(value, np.generic) else "array"
            self._add_array(path, kind, UNDECIDED, host_array(value))
        elif (plain := to_json(value)) is not NOT_PLAIN:
            self._add_value(path, "plain", UNDECIDED, plain)
        else:
            for key, child in self._children(path, value):
                self._add(below(path, key), child, optimizers, depth + 1)

    def _children(self, path: str, value: Any) -> Iterator[tuple[Any, Any]]:
        """Enter what only holds others into the table; return what it holds."""
        children: Iterable[tuple[Any, Any]]
        if type(value) is dict:
            keys = list(value)
            if not all(type(key) in (str, int) for key in keys) or len(set(map(str, keys))) < len(keys):
                raise OptionTypeError.at(
                    self._where, found=f"the keys {keys!r:.80} of {path!r}", expected="strings or ints, all different"
                )
            self.items[path], children = Item("dict", more=keys), value.items()
        elif type(value) in (list, tuple):
            self.items[path] = Item("list" if type(value) is list else "tuple", more=len(value))
            children = enumerate(value)
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            self.items[path], children = Item("object"), [("state", value.state_dict())]
        elif _variables_of(value) is not None:
            members = _variables_of(value) or ()
            self.items[path], children = Item("variables", more=len(members)), enumerate(members)
        else:
            raise OptionTypeError.at(self._where, found=f"a {type(value).__name__} as {path!r}", expected=_ACCEPTED)
        return iter(children)

    def _add_variable(self, path: str, var: Variable) -> None:
        self._variable_at[path] = var
        self._add_array(path, "variable", self._copies_of(var), host_array(var.local_view))

    def _copies_of(self, var: Variable) -> str:
        shared = self._strategy.extended
        if var.strategy is not self._strategy and not var.strategy.extended.is_local:
            raise OptionError.at(
                self._where,
                found=f"{var.name!r}, of another strategy than the rest",
                expected="objects of one strategy",
                fix="Make a Checkpoint for each strategy.",
            )
        if var.strategy is not self._strategy and shared.communicator.size > 1:
            return UNDECIDED  # of this rank alone, where the others have theirs
        if var.synchronization is not VariableSynchronization.ON_READ:
            return ONE
        if var.aggregation is VariableAggregation.NONE:
            if shared.is_local:
                return ONE
            raise AggregationError.at(
                self._where,
                found=f"{var.name!r}, an ON_READ variable with aggregation NONE",
                expected="an aggregation that says what becomes of the copies on another number of ranks",
                fix="Create it with aggregation='SUM', 'MEAN' or 'ONLY_FIRST_REPLICA'.",
            )
        return var.aggregation.name

    def _add_array(self, path: str, kind: str, copies: str, array: Array) -> None:
        dtype = dtype_text(array.dtype, f"{self._where}: {path!r}")
        self.items[path] = Item(kind, copies, dtype, array.shape)
        self.arrays[path] = array

    def _add_value(self, path: str, kind: str, copies: str, value: Any, more: Any = None) -> None:
        self.items[path] = Item(kind, copies, more=more)
        self.values[path] = value

    def _add_optimizer(self, path: str, optimizer: Optimizer) -> None:
        slotted = optimizer.slotted()
        more = {
            "class": type(optimizer).__name__,
            "variables": [self._variables.get(id(var)) for var in slotted],
            "slots": list(optimizer.slot_values),
        }
        self.items[path] = Item("optimizer", more=more)
        settings = {"learning_rate": float(optimizer.learning_rate), "skipped_steps": int(optimizer.skipped_steps)}
        self._add_value(below(path, "settings"), "plain", UNDECIDED, to_json(settings))
        if optimizer.iterations is not None:
            self._add_variable(below(path, "iterations"), optimizer.iterations)
        for number, var in enumerate(slotted):
            for name, slot in optimizer.slots_of(var).items():
                self._add_variable(slot_path(path, number, name), slot)

    def decide(self, communicator: Communicator) -> None:
        """Find out what is equal on all ranks, and is kept once.  Collective."""
        undecided = [path for path, item in self.items.items() if item.copies == UNDECIDED]
        mine = [self._digest(path) for path in undecided]
        equal = np.ones(len(mine), np.int32)
        if communicator.size > 1 and mine:
            greatest = np.array([mine, [~number & 2**64 - 1 for number in mine]], np.uint64).reshape(-1)
            communicator.allreduce(greatest, "MAX")
            first, second = greatest.reshape(2, -1)
            # The greatest of d and the greatest of ~d are opposite only when all d are the same.
            equal = first == ~second
        for path, is_equal in zip(undecided, equal.tolist(), strict=True):
            self.items[path] = dataclasses.replace(self.items[path], copies=ONE if is_equal else OWN)

    def _digest(self, path: str) -> int:
        array = self.arrays.get(path)
        if array is None:
            array = np.frombuffer(repr(self.values[path]).encode(), np.uint8)
        elif array.dtype.kind in "SUmM" or not array.flags.c_contiguous:
            array = np.frombuffer(array.tobytes(), np.uint8)
        return digest(array)

    def structure(self) -> str:
        """Return what must be equal on all ranks, in words that show a difference."""
        who = identities(self.live | self._variable_at)
        return "; ".join(
            f"{path}{f' is {who[path]}' if path in who else ''}: {item.kind} {item.copies} {item.dtype}"
            f"{list(item.shape)} {item.more or ''}"
            for path, item in self.items.items()
        )

    def check_generators(self, communicator: Communicator) -> None:
        """Do `mpistrategy.checkpoint.identities.check_generators`.  Collective."""
        states = {path: self._digest(path) for path, item in self.items.items() if item.kind == "rng"}
        check_generators(states, communicator, self._where)


def slot_path(path: str, number: int, name: str) -> str:
    """Return the path of a slot of an optimizer's variable."""
    return below(below(below(path, "slots"), number), name)


def strategy_of(objects: Mapping[str, Any], made_in: Strategy) -> Strategy:
    """Return the strategy whose ranks share these objects: `made_in` unless that is the default strategy."""
    if not made_in.is_default:
        return made_in
    found: dict[int, Strategy] = {id(var.strategy): var.strategy for var in _variables_in(list(objects.values()), 0)}
    shared = [strategy for strategy in found.values() if not strategy.extended.is_local]
    return (shared or [*found.values(), made_in])[0]


def _variables_in(value: Any, depth: int) -> Iterator[Variable]:
    if isinstance(value, Variable):
        yield value
    elif isinstance(value, Optimizer):
        yield from (*value.variables, *value.slotted())
    elif type(value) in (dict, list, tuple) and depth <= _DEEPEST:
        for child in value.values() if type(value) is dict else value:
            yield from _variables_in(child, depth + 1)
    else:
        yield from _variables_of(value) or ()


def _variables_of(value: Any) -> tuple[Variable, ...] | None:
    """Return the variables of an object that has some as its `variables`, such as a metric; else None."""
    members = getattr(value, "variables", None)
    if isinstance(members, (list, tuple)) and members and all(isinstance(member, Variable) for member in members):
        return tuple(members)
    return None
