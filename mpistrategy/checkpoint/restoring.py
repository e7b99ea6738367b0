"""Reading a checkpoint: everything is read and checked on all ranks before the first object changes.

1. Rank 0 reads the manifest, and tells the others what they need of it.
2. Some ranks read the shards and compare their checksums.
3. Each rank gets the plain values that it had, and compares the checkpoint with its objects (`Fit`).
4. The arrays go to the ranks (`delivering`), and the objects change.

Objects and checkpoint are compared path by path, with a list of everything that does not fit.  The comparison is the
same on all ranks, except for per-rank values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.delivering import deliver
from mpistrategy.checkpoint.kinds import BY_NAME, KINDS
from mpistrategy.checkpoint.kinds.rows import Rows
from mpistrategy.checkpoint.reading import Reading
from mpistrategy.checkpoint.state import Restore, State
from mpistrategy.checkpoint.storage.files import reading
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, ROWS, Item, Manifest
from mpistrategy.checkpoint.storage.plain_values import ABSENT, from_json
from mpistrategy.checkpoint.storage.shards import dtype_text
from mpistrategy.errors import CheckpointDamagedError, CheckpointMismatchError, MpiStrategyError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.objects.text import printable
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

#: What kinds raise over items that no save has written.
_UNSOUND = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)
_REPLACEABLE = {kind.name for kind in KINDS if kind.is_replaceable}
#: The longest text about one problem, and how many problems are shown.
_LONGEST, _MOST_PROBLEMS = 1000, 10
_IN_PART = "; partial=True restores the others"
#: The longest text of a value in a note; buckets of gradients are long lists.
_LONGEST_NOTE = 500


@dataclass(frozen=True)
class Restored:
    """What `Checkpoint.restore` did.

    Attributes:
        path: the checkpoint.
        ranks: how many ranks saved it.
        written_by: the version of mpistrategy that saved it.
        layout: `Strategy.layout()` of that job.
        notes: differences between that layout and the present one; they may change the last bits of later sums.
        left_out: with partial=True, the paths that are on one side only.
        objects: the restored objects by name: those that were given, changed in place where that can be, and new ones
            for numbers, strings, tuples and JAX arrays, and for what a function returned.
    """

    path: str
    ranks: int
    written_by: str
    layout: dict[str, Any]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    objects: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def restore(
    objects: dict[str, Any], state: State, layout: dict[str, Any], path: str, partial: bool, call: Call
) -> Restored:
    """Restore `objects`, and put new objects into it, from the checkpoint at `path`.  Collective.

    `layout` is `Strategy.layout()` now.
    """
    communicator = state.strategy.extended.communicator
    source = Reading(communicator, path)
    call.expect_more()
    if communicator.rank == 0:
        with _sound(call.where, path), reading(call.where, path):
            source.read_manifest()
    call.agree("read a manifest")
    manifest = source.tell_manifest()
    call.expect_more()
    with _sound(call.where, path), reading(call.where, path):
        source.read_shards(objects)
    call.agree("read shards", patiently=True)
    source.tell_owns(call)
    call.expect_more()
    with _sound(call.where, path):
        source.parse_owns()
        fit = Fit(manifest, state, (source.first, source.nearest), communicator, partial)
        changes = {name: fit.restore_of(name, value) for name, value in objects.items()}
        for missing in [other for other in manifest.names if other not in objects]:
            if partial:
                fit.left_out.append(missing)
            else:
                fit.problem(
                    missing,
                    f"{manifest.items[missing].kind} in the checkpoint, nothing here{_IN_PART}",
                )
        notes, saved_layout = tuple(_notes(manifest, layout)), _printable(manifest.layout)
    if fit.problems:
        raise _mismatch(call.where, path, fit)
    call.agree("compare a checkpoint with the objects")
    for prepare in fit.prepare:
        prepare()
    deliver(source, fit)
    call.expect_more()
    restored = {name: change() for name, change in changes.items()}
    objects.update(restored)
    call.agree("restore a checkpoint")
    left_out = tuple(printable(each, "") for each in fit.left_out)
    return Restored(path, manifest.ranks, manifest.written_by, saved_layout, notes, left_out, dict(objects))


@contextlib.contextmanager
def _sound(where: str, path: str) -> Iterator[None]:
    """Turn Python's errors about a forged manifest into ours; nothing has changed yet."""
    try:
        yield
    except MpiStrategyError:
        raise
    except Exception as error:
        raise CheckpointDamagedError.at(
            where,
            found=f"a manifest that contradicts itself ({type(error).__name__}: {str(error)[:80]}), at {path!r}",
            expected="a whole checkpoint",
        ) from error


def _mismatch(where: str, path: str, fit: Fit) -> CheckpointMismatchError:
    more = [f"  and {fit.more_problems} more"] if fit.more_problems else []
    return CheckpointMismatchError.at(
        where,
        found=f"a checkpoint, {path!r}, that does not fit the objects",
        expected="the same names, kinds, dtypes and shapes",
        fix="\n".join(["Nothing has changed. These do not fit:", *(f"  {each}" for each in fit.problems), *more]),
    )


def _notes(manifest: Manifest, now: dict[str, Any]) -> list[str]:
    notes = []
    for key, then in manifest.layout.items():
        # Gradient buckets are often made after a checkpoint was restored.
        if key == "source" or now.get(key) == then or (key == "gradient_buckets" and not now[key]):
            continue
        notes.append(printable(f"{key}: {_shown(then)} when it was saved, {_shown(now.get(key))} now", ""))
    return notes


def _printable(value: Any) -> Any:
    """Return a nest from JSON without control characters."""
    if isinstance(value, dict):
        return {printable(key, ""): _printable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return printable(value, "") if isinstance(value, str) else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_NOTE else f"{text[:_LONGEST_NOTE]}..."


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
            return self.problem(path, f"{_named(value)} here, nothing in the checkpoint{_IN_PART}")
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
        can_be = here is None or here.kind in _REPLACEABLE or (value is ABSENT and here.kind != ROWS)
        return can_be and path not in self._lasting

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
    if isinstance(value, Rows):
        return f"Rows {dtype_text(np.asarray(value).dtype, '')}[*{''.join(f', {n}' for n in value.shape[1:])}]"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype.str}{list(value.shape)}"
    return f"a {type(value).__name__}"
