"""Reading a checkpoint: everything is read and checked on all ranks before the first object changes.

1. Rank 0 reads the manifest, and tells the others what they need of it.
2. Some ranks read the shards and compare their checksums.
3. Each rank gets the plain values that it had, and compares the checkpoint with its objects (`Fit`).
4. The arrays go to the ranks (`delivering`), and the objects change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mpistrategy.checkpoint.delivering import deliver
from mpistrategy.checkpoint.reading import Reading
from mpistrategy.checkpoint.state import IN_PART, Fit, State
from mpistrategy.checkpoint.storage.files import reading
from mpistrategy.checkpoint.storage.manifest import Manifest
from mpistrategy.errors import CheckpointDamagedError, CheckpointMismatchError, MpiStrategyError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.objects.text import printable

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
                    f"{manifest.items[missing].kind} in the checkpoint, nothing here{IN_PART}",
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
