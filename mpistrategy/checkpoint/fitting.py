"""Does a checkpoint fit the objects, and if so, what is to be done?  Nothing is changed while this is found out.

`Fit` walks through what the checkpoint holds beside the objects.  It lists everything that does not fit; where all
does, it knows which arrays are needed and where they go, and has for each object the function that gives it back its
value.  All of that is the same on all ranks, but for values of a rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device, placed_as
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.kinds.accumulators import fit_accumulator
from mpistrategy.checkpoint.kinds.generators import check_state, jumped, set_state, set_streams
from mpistrategy.checkpoint.kinds.holders import fit_dict, fit_list, fit_tuple, fit_variables
from mpistrategy.checkpoint.kinds.optimizers import OptimizerFit
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, Item, Manifest
from mpistrategy.checkpoint.storage.plain_values import ABSENT, below, dtype_text, from_json
from mpistrategy.checkpoint.storage.shards import shown
from mpistrategy.errors import MpiStrategyError
from mpistrategy.input.iterators import DistributedIterator
from mpistrategy.own_files import printable
from mpistrategy.strategy.random_streams import Streams
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.training.gradients import GradientAccumulator
from mpistrategy.variables.variable import Variable

#: Returns the value that an object has after restoring: itself, changed in place, or another.
Restore = Callable[[], Any]

#: What is raised over values that nobody has saved like that.
_UNSOUND = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)
#: What is made anew where it is missing, and may be taken away where the checkpoint has nothing of it.
_PLAIN, _HOLDING = ("plain", "array", "scalar"), ("dict", "list", "tuple")
#: How much is said of one thing that does not fit, and of how many; and how far an iterator may have come.
_LONGEST, _MOST_PROBLEMS, _FARTHEST = 1000, 10, 2**53
_KINDS = (
    *_PLAIN,
    *_HOLDING,
    "variable",
    "rng",
    "streams",
    "iterator",
    "object",
    "variables",
    "optimizer",
    "accumulator",
)


class Fit:
    """What restoring these objects from this checkpoint comes to.

    Args:
        manifest: what the checkpoint holds.
        state: what the objects are now.
        strategy: the ranks.
        partial: restore what is in both, and leave the rest.

    Attributes:
        problems: what does not fit, in words, as much as is shown; the others are only good when there is none.
        more_problems: how many there are besides.
        left_out: what `partial` leaves: names that stand on one side only.
        fetched: the paths of the arrays that are needed, and the variables that they go into; None for other arrays,
            which are put into `staged`.
        shared: the paths among them of which each rank gets its own or, on another number of ranks, a part.
        prepare: functions that make variables which are missing; collective.
        staged: the arrays that were fetched, by path.
    """

    def __init__(self, manifest: Manifest, state: State, strategy: Strategy, partial: bool) -> None:
        self.manifest = manifest
        self.state = state
        self.strategy = strategy
        communicator = strategy.extended.communicator
        self.rank, self._same_ranks = communicator.rank, communicator.size == manifest.ranks
        self._partial = partial
        self._lasting = _holders_of_lasting(state)
        self.problems: list[str] = []
        self.more_problems = 0
        self.left_out: list[str] = []
        self.fetched: dict[str, Callable[[], Variable] | None] = {}
        self.shared: set[str] = set()
        self.prepare: list[Callable[[], None]] = []
        self.staged: dict[str, Array] = {}

    def restore_of(self, path: str, value: Any, *, fresh: bool = False) -> Restore:
        """Return what restores the object at `path`.

        Args:
            path: where it stands, in the checkpoint as among the objects.
            value: the object, or `ABSENT`.
            fresh: make arrays anew instead of writing into those that there are.
        """
        item = self.manifest.items.get(path)
        if item is None:
            return self.missing(path, value)
        if item.kind not in _KINDS:
            return self.problem(path, f"the checkpoint has something of an unknown kind, {item.kind[:40]!r}")
        try:
            restore: Restore = getattr(self, f"restore_{item.kind}")(path, item, value, fresh)
        except _UNSOUND as error:
            return self.problem(path, f"{type(error).__name__}: {error}")
        return restore

    def problem(self, path: str, text: str) -> Restore:
        """Note what does not fit; the words may be a checkpoint's."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(printable(f"{path}: {text}", "")[:_LONGEST])
        else:
            self.more_problems += 1
        return lambda: None

    def missing(self, path: str, value: Any) -> Restore:
        """Note what stands at `path` and is not in the checkpoint."""
        if value is ABSENT:
            return self.problem(path, "the checkpoint speaks of it, and has nothing of it")
        if not self._partial:
            return self.problem(path, f"{_named(value)} here, nothing in the checkpoint")
        self.left_out.append(path)
        return lambda: value

    def expect(self, holds: bool, path: str, item: Item, value: Any) -> bool:
        """Return whether the checkpoint has what is here; note it if not."""
        if not holds:
            shape = f" {item.dtype}{list(item.shape)}" if item.is_array else ""
            self.problem(path, f"{item.kind}{shape} in the checkpoint, {_named(value)} here")
        return holds

    # ------------------------------------------------------------------------------------------- arrays

    def restore_variable(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """A variable: the array goes into it."""
        if fresh:
            value = self.state.live.get(path, ABSENT)
        fits = isinstance(value, Variable) and self.has_layout(item, value.local_view)
        if self.expect(fits, path, item, value) and self._can_tell(path, item):
            self.fetched[path] = lambda: value
        return lambda: value

    def has_layout(self, item: Item, array: Array) -> bool:
        """Return whether dtype and shape are those of the checkpoint."""
        return item.is_array and dtype_text(array.dtype, "") == item.dtype and array.shape == item.shape

    def restore_array(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """An array: in place where there is one."""
        in_place = (isinstance(value, np.ndarray) or is_on_device(value)) and not fresh
        fits = item.is_array and (self.has_layout(item, value) if in_place else self._is_replaceable(path, value))
        if not self.expect(fits, path, item, value) or not self._can_tell(path, item):
            return lambda: None
        if in_place and not is_on_device(value) and not value.flags.writeable:
            return self.problem(path, "a read-only array here")
        self.fetched[path] = None

        def restore() -> Any:
            array = self.staged.pop(path)
            if not in_place:
                there = self.state.live.get(path, ABSENT) if fresh else ABSENT
                return placed_as(array, there) if is_on_device(there) else array
            value[...] = placed_as(array, value)
            return value

        return restore

    def restore_scalar(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """A number of NumPy's."""
        is_number = item.is_array and item.shape == () and not isinstance(value, np.ndarray)
        if not self.expect(is_number and self._is_replaceable(path, value), path, item, value):
            return lambda: None
        if self._can_tell(path, item):
            self.fetched[path] = None
        return lambda: self.staged.pop(path)[()]

    def _can_tell(self, path: str, item: Item) -> bool:
        """Return whether it is known what this rank gets."""
        if item.copies != OWN or self._same_ranks:
            return True
        self.problem(path, self._of_its_own(item))
        return False

    def _of_its_own(self, item: Item) -> str:
        now = self.strategy.num_replicas_in_sync
        return (
            f"each of the {self.manifest.ranks} ranks that saved had a {item.kind} of its own; now there are {now}; "
            "keep it in an ON_READ Variable, whose aggregation says what becomes of it, or make it equal on all ranks"
        )

    # ------------------------------------------------------------------------------------------- values

    def _own(self, path: str, item: Item) -> Any:
        """Return this rank's value as plain values."""
        if item.copies == ONE:
            return from_json(item.values[0])
        if self._can_tell(path, item):
            return from_json(item.values[self.rank])
        return None

    def restore_plain(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """Numbers, strings and nests of them: lists and dicts in place."""
        is_array = isinstance(value, np.ndarray) or is_on_device(value)
        if not self.expect(not is_array and self._is_replaceable(path, value), path, item, value):
            return lambda: None
        plain = self._own(path, item)

        def restore() -> Any:
            if type(value) is type(plain) is list:
                value[:] = plain
                return value
            if type(value) is type(plain) is dict:
                value.clear()
                value.update(plain)
                return value
            return plain

        return restore

    def _is_replaceable(self, path: str, value: Any) -> bool:
        """Return whether what stands at `path` may become another value: nothing in it has to be the same object."""
        here = self.state.items.get(path)
        is_plain = value is ABSENT or here is None or here.kind in (*_PLAIN, *_HOLDING)
        return is_plain and path not in self._lasting

    def restore_rng(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """A random generator: a rank that was not there gets a stream that is independent of the others'."""
        if not self.expect(isinstance(value, (np.random.Generator, np.random.RandomState)), path, item, value):
            return lambda: None
        if item.copies == ONE:
            state = from_json(item.values[0])
        else:
            times, rank = divmod(self.rank, self.manifest.ranks)
            state = from_json(item.values[rank])
            state = jumped(state, times) if times else state
        check_state(value, state)

        def restore() -> Any:
            set_state(value, state)
            return value

        return restore

    def restore_streams(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """What `strategy.rng` made."""
        if not self.expect(isinstance(value, Streams), path, item, value):
            return lambda: None
        states = [from_json(one) for one in item.values]
        if states[0]["seed"] != value.seed:
            return self.problem(path, f"seed {states[0]['seed']} in the checkpoint, {value.seed} here")
        set_streams(Streams(value.seed, self.rank), states, self.rank)

        def restore() -> Any:
            set_streams(value, states, self.rank)
            return value

        return restore

    def restore_iterator(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """An iterator of a distributed dataset: it goes on where it was."""
        walk = value.walk if isinstance(value, DistributedIterator) else None
        if not self.expect(walk is not None, path, item, value):
            return lambda: None
        assert walk is not None
        if walk.of != item.more["of"]:
            return self.problem(path, f"a position in {item.more['of']}; here it is {walk.of}")
        if not walk.any_ranks and not self._same_ranks:
            return self.problem(
                path, f"{self._of_its_own(item)}; a Dataset given to experimental_distribute_dataset can go on"
            )
        position = self._own(path, item)
        if type(position) is not int or not 0 <= position < _FARTHEST:
            return self.problem(path, f"the position {shown(position)} in the checkpoint")
        try:
            value.check_can_go()
        except MpiStrategyError as error:
            return self.problem(path, str(error))

        def restore() -> Any:
            value.go_to(position)
            return value

        return restore

    # ------------------------------------------------------------------------------------------- what holds others

    def is_lasting(self, path: str) -> bool:
        """Return whether what stands at `path` is no value that a restore may take away."""
        item = self.state.items.get(path)
        if item is None or item.kind in _PLAIN:
            return False
        return item.kind not in _HOLDING or path in self._lasting

    def restore_object(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """An object with state_dict() and load_state_dict(): it is asked to load, and may refuse."""
        if not self.expect(callable(getattr(value, "load_state_dict", None)), path, item, value):
            return lambda: None
        state = self.restore_of(below(path, "state"), ABSENT, fresh=True)

        def restore() -> Any:
            value.load_state_dict(state())
            return value

        return restore

    def restore_optimizer(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """An optimizer: its settings, steps and slots."""
        here = self.state.items.get(path)
        if not self.expect(here is not None and here.kind == "optimizer", path, item, value):
            return lambda: None
        return OptimizerFit(self, path, item, value).restore()

    def restore_accumulator(self, path: str, item: Item, value: Any, fresh: bool) -> Restore:
        """A gradient accumulator: its sums, and how many steps they are of."""
        if not self.expect(isinstance(value, GradientAccumulator), path, item, value):
            return lambda: None
        return fit_accumulator(self, path, item, value)

    restore_dict, restore_list, restore_tuple, restore_variables = fit_dict, fit_list, fit_tuple, fit_variables


def _holders_of_lasting(state: State) -> set[str]:
    """Return the paths below which something stands that cannot be made anew."""
    found: set[str] = set()
    for path, item in state.items.items():
        above = path.rpartition("/")[0]
        while item.kind not in (*_PLAIN, *_HOLDING) and above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def _named(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, Variable):
        return f"variable {dtype_text(value.dtype, '')}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype.str}{list(value.shape)}"
    return f"a {type(value).__name__}"
