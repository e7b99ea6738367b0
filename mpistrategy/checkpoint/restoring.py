"""Reading a checkpoint: everything is read and checked on all ranks before the first object changes.

Each rank reads some of the shards and compares their checksums.  Then each array that was saved once is sent by the
rank that has read it.  Of an ON_READ variable each rank gets its own copy back; on another number of ranks, its part
of the combined copies.

`Fit` compares the checkpoint with the objects, path by path, and lists everything that does not fit.  The comparison is
the same on all ranks, except for per-rank values.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.kinds import BY_NAME, KINDS
from mpistrategy.checkpoint.kinds.variables import store
from mpistrategy.checkpoint.saving import REPLACED
from mpistrategy.checkpoint.state import Restore, State
from mpistrategy.checkpoint.storage.files import Folder, reading
from mpistrategy.checkpoint.storage.manifest import (
    ABSENT,
    NAME,
    ONE,
    OWN,
    Item,
    Manifest,
    from_json,
    open_shard,
    parse,
    read_text,
)
from mpistrategy.checkpoint.storage.shards import combined, dtype_of, dtype_text
from mpistrategy.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointMissingError, MpiStrategyError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import VariableAggregation, VariableSynchronization
from mpistrategy.own_files import is_trusted, printable
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.policies import share_of
from mpistrategy.variables.variable import Variable

#: The longest text of a value in a note; buckets of gradients are long lists.
_LONGEST_NOTE = 500
#: What kinds raise over items that no save has written.
_UNSOUND = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)
_REPLACEABLE = {kind.name for kind in KINDS if kind.is_replaceable}
#: The longest text about one problem, and how many problems are shown.
_LONGEST, _MOST_PROBLEMS = 1000, 10


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
    """

    path: str
    ranks: int
    written_by: str
    layout: dict[str, Any]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def restore(
    objects: dict[str, Any], state: State, layout: dict[str, Any], path: str, partial: bool, call: Call
) -> Restored:
    """Restore `objects` from the checkpoint at `path`; `layout` is `Strategy.layout()` now.  Collective."""
    communicator = state.strategy.extended.communicator
    call.expect_more()
    told = ""
    if communicator.rank == 0:
        with reading(call.where, path):
            told = _manifest_at(path)
    call.agree("read a manifest")
    name, text = json.loads(communicator.allgather_text(told)[0])
    call.expect_more()
    manifest = parse(text.encode("latin-1"), path)
    with _sound(call.where, path):
        fit = Fit(manifest, state, communicator, partial)
        changes = {name: fit.restore_of(name, value) for name, value in objects.items()}
        for missing in [other for other in manifest.names if other not in objects]:
            if partial:
                fit.left_out.append(missing)
            else:
                fit.problem(missing, f"{manifest.items[missing].kind} in the checkpoint, nothing here")
        notes, saved_layout = tuple(_notes(manifest, layout)), _printable(manifest.layout)
    if fit.problems:
        raise _mismatch(call.where, path, fit)
    with reading(call.where, path), Folder.parent_of(path) as parent, parent.trusted_folder(name) as folder:
        mine = range(communicator.rank, manifest.ranks, communicator.size)
        shards = {number: _read(folder, manifest, number, fit) for number in mine}
    call.agree("read shards", patiently=True)
    for prepare in fit.prepare:
        prepare()
    copies = _Copies(manifest, shards, communicator)
    for item_path, target in fit.fetched.items():
        if target is None:
            fit.staged[item_path] = (copies.part_of if item_path in fit.shared else copies.of_array)(item_path)
        else:
            copies.into(item_path, target())
    call.expect_more()
    restored = {name: change() for name, change in changes.items()}
    objects.update(restored)
    call.agree("restore a checkpoint")
    left_out = tuple(printable(each, "") for each in fit.left_out)
    return Restored(path, manifest.ranks, manifest.written_by, saved_layout, notes, left_out)


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


def _read(folder: Folder, manifest: Manifest, number: int, fit: Fit) -> dict[str, Array]:
    """Return the needed arrays of a shard; CheckpointDamagedError if its checksum is wrong."""
    with open_shard(folder, manifest, number) as shard:
        return shard.read([path for path in fit.fetched if path in shard.stored])


def _manifest_at(path: str) -> str:
    """Return the name of the folder and the text of its manifest, as JSON."""
    with Folder.parent_of(path) as parent:
        name = _name_of(parent, os.path.basename(path))
        with parent.trusted_folder(name) as folder:
            return json.dumps([name, read_text(folder).decode("latin-1")])


def _name_of(parent: Folder, name: str) -> str:
    """Return the name of the checkpoint's folder: a replaced one if a job ended between the two renames."""
    if parent.kind_of(name):
        return name
    for other in parent.names():
        if other.startswith(REPLACED.format(name)) and parent.kind_of(other) == "folder":
            with parent.folder(other) as folder:
                if folder.kind_of(NAME) == "file" and is_trusted(folder.state, parent.state):
                    return other
    raise CheckpointMissingError.at(
        "a checkpoint", found=f"nothing at {os.path.join(parent.path, name)!r}", expected="a checkpoint"
    )


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


class Fit:
    """How these objects are restored from this checkpoint.

    Args:
        manifest: what the checkpoint has.
        state: the objects.
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

    def __init__(self, manifest: Manifest, state: State, communicator: Communicator, partial: bool) -> None:
        self.manifest = manifest
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
        if item.copies == ONE:
            return from_json(item.values[0])
        return from_json(item.values[self.rank]) if self.knows_own(path, item) else None

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


class _Copies:
    """The copies in the shards that the ranks have read, and what each rank gets.  All methods are collective."""

    def __init__(self, manifest: Manifest, shards: dict[int, dict[str, Array]], communicator: Communicator) -> None:
        self._manifest = manifest
        self._shards = shards
        self._communicator = communicator

    def of_array(self, path: str) -> Array:
        """Return this rank's array: the only one, its own, or the combined copies."""
        item = self._manifest.items[path]
        if item.copies == ONE:
            return self._sent(path, item, item.shard)
        if item.copies == OWN:
            return self._own(path)
        return self._together(path, item)

    def into(self, path: str, var: Variable) -> None:
        """Write into a variable its value, or this rank's part of it."""
        item = self._manifest.items[path]
        by_replica = var.synchronization is VariableSynchronization.ON_READ and not var.strategy.extended._is_local
        if by_replica and item.copies == var.aggregation.name and self._same_ranks:
            array = self._own(path)
        elif by_replica and var.aggregation is VariableAggregation.SUM:
            array = self._share(path)
        else:
            array = self.of_array(path)
        store(var, array)

    def part_of(self, path: str) -> Array:
        """Return this rank's array; on another number of ranks, its part of the sum."""
        item = self._manifest.items[path]
        return self._own(path) if item.copies != ONE and self._same_ranks else self._share(path)

    @property
    def _same_ranks(self) -> bool:
        return self._manifest.ranks == self._communicator.size

    def _own(self, path: str) -> Array:
        return self._shards[self._communicator.rank][path]

    def _share(self, path: str) -> Array:
        return share_of(self.of_array(path), self._communicator.rank, self._communicator.size)

    def _sent(self, path: str, item: Item, shard: int) -> Array:
        """Return the copy in a shard, sent by the rank that has read it."""
        root = shard % self._communicator.size
        if root == self._communicator.rank:
            array = self._shards[shard][path]
        else:
            array = np.empty(item.shape, dtype_of(item.dtype).newbyteorder("="))
        if array.nbytes:
            self._communicator.bcast(array, root)
        return array

    def _together(self, path: str, item: Item) -> Array:
        copies = 1 if item.copies == "ONLY_FIRST_REPLICA" else self._manifest.ranks
        return combined((self._sent(path, item, shard) for shard in range(copies)), item.copies, copies)
