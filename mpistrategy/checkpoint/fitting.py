"""How a checkpoint fits the objects: compared path by path, with a list of everything that does not fit.

The comparison is the same on all ranks, except for per-rank values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.kinds import BY_NAME, KINDS
from mpistrategy.checkpoint.state import Restore, State
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, Item, Manifest
from mpistrategy.checkpoint.storage.plain_values import ABSENT, from_json
from mpistrategy.checkpoint.storage.shards import dtype_text
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.own_files import printable
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

#: What kinds raise over items that no save has written.
_UNSOUND = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)
_REPLACEABLE = {kind.name for kind in KINDS if kind.is_replaceable}
#: The longest text about one problem, and how many problems are shown.
_LONGEST, _MOST_PROBLEMS = 1000, 10


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
        communicator: Communicator,
        partial: bool,
    ) -> None:
        self.manifest = manifest
        self._first, self._nearest = values
        self.here = state
        self.strategy: Strategy = state.strategy
        self.rank: int = communicator.rank
        self.same_ranks: bool = communicator.size == manifest.ranks
        self._partial = partial
        self._lasting = _holders_of_lasting(state)
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
        kind = BY_NAME.get(item.kind)
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
            return self.problem(path, f"{_named(value)} here, nothing in the checkpoint")
        self.left_out.append(path)
        return lambda: value

    def expect(self, holds: bool, path: str, item: Item, value: Any) -> bool:
        """Return `holds`, whether the checkpoint has what is here; note a problem if it is False."""
        if not holds:
            shape = f" {item.dtype}{list(item.shape)}" if item.is_array else ""
            self.problem(path, f"{item.kind}{shape} in the checkpoint, {_named(value)} here")
        return holds

    def has_layout(self, item: Item, array: Array) -> bool:
        """Return whether an item is an array of this dtype and shape."""
        return item.is_array and dtype_text(array.dtype, "") == item.dtype and array.shape == item.shape

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
            "keep it in an ON_READ Variable, whose aggregation says what becomes of it, or make it equal on all ranks"
        )

    def is_replaceable(self, path: str, value: Any) -> bool:
        """Return whether the object at `path` may become another object: nothing in it is changed in place."""
        here = self.here.items.get(path)
        return (value is ABSENT or here is None or here.kind in _REPLACEABLE) and path not in self._lasting

    def is_lasting(self, path: str) -> bool:
        """Return whether a restore must not remove the object at `path`."""
        item = self.here.items.get(path)
        return item is not None and (item.kind not in _REPLACEABLE or path in self._lasting)


def _holders_of_lasting(state: State) -> set[str]:
    """Return the paths of what holds objects that must be there, and cannot be made anew."""
    found: set[str] = set()
    for path, item in state.items.items():
        above = path.rpartition("/")[0]
        while item.kind not in _REPLACEABLE and above and above not in found:
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
