"""Reading a checkpoint: everything is read and checked on all ranks before the first object changes.

Each rank reads some of the shards and compares their checksums.  Then each array that was saved once is sent by the
rank that has read it.  Of an ON_READ variable each rank gets its own copy back on the same number of ranks, else its
part of the combined copies.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.checkpoint.fitting import Fit
from mpistrategy.checkpoint.kinds.variables import store
from mpistrategy.checkpoint.saving import REPLACED
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage.files import Folder, reading
from mpistrategy.checkpoint.storage.manifest import NAME, ONE, OWN, Item, Manifest, parse, read_text
from mpistrategy.checkpoint.storage.plain_values import dtype_of
from mpistrategy.checkpoint.storage.shards import open_shard
from mpistrategy.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointMissingError, MpiStrategyError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import VariableAggregation, VariableSynchronization
from mpistrategy.own_files import is_trusted, printable
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.policies import share_of
from mpistrategy.variables.variable import Variable

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
    """

    path: str
    ranks: int
    written_by: str
    layout: dict[str, Any]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def restore(
    objects: dict[str, Any], state: State, strategy: Strategy, path: str, partial: bool, call: Call
) -> Restored:
    """Restore `objects`, whose state is `state`, from the checkpoint at `path`.  Collective."""
    communicator = strategy.extended.communicator
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
        fit = Fit(manifest, state, strategy, partial)
        changes = {name: fit.restore_of(name, value) for name, value in objects.items()}
        for missing in [other for other in manifest.names if other not in objects]:
            if partial:
                fit.left_out.append(missing)
            else:
                fit.problem(missing, f"{manifest.items[missing].kind} in the checkpoint, nothing here")
        notes, layout = tuple(_notes(manifest, strategy)), _printable(manifest.layout)
    if fit.problems:
        raise _mismatch(call.where, path, fit)
    with reading(call.where, path), Folder.parent_of(path) as parent, parent.trusted_folder(name) as folder:
        mine = range(communicator.rank, manifest.ranks, communicator.size)
        shards = {number: _read(folder, manifest, number, fit) for number in mine}
    call.agree("read shards", patiently=True)
    for prepare in fit.prepare:
        prepare()
    copies = _Copies(manifest, shards, strategy)
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
    return Restored(path, manifest.ranks, manifest.written_by, layout, notes, left_out)


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


def _notes(manifest: Manifest, strategy: Strategy) -> list[str]:
    now, notes = strategy.layout(), []
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


class _Copies:
    """The copies in the shards that the ranks have read, and what each rank gets.  All methods are collective."""

    def __init__(self, manifest: Manifest, shards: dict[int, dict[str, Array]], strategy: Strategy) -> None:
        self._manifest = manifest
        self._shards = shards
        self._communicator = strategy.extended.communicator

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
        by_replica = var.synchronization is VariableSynchronization.ON_READ and not var.strategy.extended.is_local
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


def combined(copies: Any, how: str, count: int) -> Array:
    """Return the combined copies of a variable, added in rank order; integers wrap around, as everywhere."""
    total, dtype = None, np.dtype(bool)
    for copy in copies:
        if total is None:
            total, dtype = copy.astype(wire_dtype(copy.dtype)), copy.dtype
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(total, copy, out=total)
    assert total is not None
    with np.errstate(over="ignore"):
        return np.asarray(total / count if how == "MEAN" else total).astype(dtype)
