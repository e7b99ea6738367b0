"""Checkpoint saves the state of a program's objects and restores it on any number of ranks.

CheckpointManager keeps a folder with one checkpoint for each saved step; the newest complete one is restored.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, TracebackType
from typing import Any, Protocol, Self

from mpistrategy import context
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint import files
from mpistrategy.checkpoint.format import OWN, is_checkpoint
from mpistrategy.checkpoint.restoring import Reading, fetched
from mpistrategy.checkpoint.saving import Saving
from mpistrategy.checkpoint.state import Comparison, State
from mpistrategy.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMissingError,
    CheckpointReadError,
    OptionError,
    OptionTypeError,
    StaleStateWarning,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.mpi.interface.ranks import Alone
from mpistrategy.objects.other_names import NamesOurs, refuses
from mpistrategy.objects.settings import Fixed, Settable, Setting, checked_count, checked_type, or_none
from mpistrategy.objects.text import printable
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

__all__ = ["Checkpoint", "CheckpointManager", "Restored", "Saving", "Stateful"]

_STEP = re.compile(r"step-([0-9]{12,})")
_UNFINISHED = re.compile(rf"\.step-[0-9]{{12,}}\.saving-{files.TOKEN}")


def checked_objects(where: str, name: str, objects: Any) -> dict[str, Any]:
    """Return the objects of a checkpoint; raise OptionTypeError unless they are a dict, OptionError for a bad name."""
    checked: dict[Any, Any] = checked_type(where, name, objects, dict, "a dict of objects by name")
    for key in checked:
        if not isinstance(key, str) or not key or key.startswith("_") or "/" in key:
            raise OptionError.at(where, found=f"the name {key!r}", expected="one that does not begin with _, without /")
    return checked


class Stateful(Protocol):
    """An object that a checkpoint saves and restores by its own methods; any class that has them is one."""

    def state_dict(self) -> Any:
        """Return the state: a nest of objects that checkpoints save."""

    def load_state_dict(self, state: Any) -> object:
        """Take over a state that `state_dict` returned, with arrays of this rank's own; the result is ignored."""


@dataclass(frozen=True)
class Restored:
    """What `Checkpoint.restore` did.

    Attributes:
        path: the checkpoint.
        ranks: how many ranks saved it.
        written_by: the version of mpistrategy that saved it.
        layout: `Strategy.layout()` of that job.
        notes: differences between that layout and the present one; they may change the last bits of later sums.
        left_out: with partial=True, the names that are on one side only.
        objects: the restored objects by name: the program's objects, changed in place where possible, and new objects
            for numbers, strings, tuples and JAX arrays, and for the results of functions.
    """

    path: str
    ranks: int
    written_by: str
    layout: dict[str, Any]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    objects: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


class Checkpoint(NamesOurs):
    """The state of some objects: saved whole or not at all, restored on any number of ranks.

    Make it on all ranks with the same names for the same objects.  It belongs to the strategy in whose scope it is
    made; outside, to that of a variable among the objects, or else to the only strategy of several ranks that is open.
    A checkpoint is a folder of plain files; nothing in them is executed.  Only the user can read it; in a setgid
    folder, the group can, too.

    It saves:

    * Variables: a mirrored variable once; an ON_READ variable once for each replica.  On the same number of ranks each
      gets its own copy back; on another number the total of a SUM is kept (integers exactly), and a MEAN's mean.
    * Optimizers: steps, slots, learning rate and skipped steps.  They need not be built to be restored.
    * Gradient accumulators, also in the middle of a group of steps: on another number of ranks, the total is kept.
    * Metrics, and other objects with variables in an attribute `variables`.
    * NumPy's random generators, and `strategy.rng(seed)`.
    * Iterators of distributed datasets: they continue with the next batch; on another number of ranks only those of
      `distribute_dataset`.
    * Arrays, numbers, strings, None; dicts, lists and tuples of all of these.  Data that are equal on all ranks are
      saved once; per-rank data restore only on the same number of ranks.
    * torch's modules, restored in place, and tensors; JAX arrays, which a restore replaces in `objects`.
    * `Rows`: rows of a global array, restored on any number of ranks.
    * `Stateful` objects, which have `state_dict()` and `load_state_dict(state)`, if the state consists of the above.

    A checkpoint has the objects themselves.  Where the program makes a new object at each step (numbers, tuples, JAX
    arrays), give a function without arguments that returns the present object: ``ms.Checkpoint(state=lambda: state)``.
    Take the restored object from the result of `restore`: ``state = checkpoint.restore(path).objects["state"]``.

    Args:
        objects: by name.  Arrays, dicts and lists are restored in place; read a restored number from `objects`.
            A function is called by each save, and by each restore, which needs the structure.

    Attributes:
        objects: the objects by name; may be changed, in the same way on all ranks.

    Raises:
        OptionError: for a name that begins with ``_`` or contains ``/``.
        ContextError: outside scope(), where several strategies of several ranks are open, or none any more.

    >>> import os, tempfile, mpistrategy as ms
    >>> with ms.OneDeviceStrategy("CPU:0").scope():
    ...     weights = ms.Variable([1.0, 2.0])
    >>> checkpoint = ms.Checkpoint(weights=weights, progress={"epoch": 3})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = checkpoint.save(os.path.join(folder, "first")).path
    ...     _ = weights.assign([0.0, 0.0])
    ...     restored = checkpoint.restore(path)
    >>> print(weights.numpy(), checkpoint.objects["progress"], restored.ranks)
    [1. 2.] {'epoch': 3} 1
    """

    objects: Setting[dict[str, Any]] = Setting(checked_objects)

    def __init__(self, **objects: Any) -> None:
        self.objects = objects
        self._made_in: Strategy = context.current_strategy()
        #: The last save.
        self._saving: Saving | None = None
        self._last: dict[str, list[Any]] = {}
        self._has_warned = False
        if objects:
            _ = self.strategy  # raises here, not at the first save

    @property
    def strategy(self) -> Strategy:
        """The strategy whose ranks save together."""
        of_objects = [value.strategy for value in self.objects.values() if isinstance(value, Variable)]
        own = next((strategy for strategy in [self._made_in, *of_objects] if not strategy._is_default), None)
        joined: Any = own or context.open_strategy("Checkpoint", "one that was")
        return joined or self._made_in

    @collective("save")
    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        wait: bool = True,
        overwrite: bool = False,
        name: str | None = None,
    ) -> Saving:
        """Write a checkpoint: the folder `directory`, which appears when it is complete.  Collective.

        A small checkpoint is written by one rank, a large one by some ranks of each node.

        Args:
            directory: the folder, equal on all ranks, on a file system that they share.
            wait: False copies the state and returns while threads write.  The checkpoint comes into place when the
                threads of all ranks have finished; no further call is needed.  The end of the program waits for them.
                What fails in a thread is raised on every rank by the next `save` or `wait` of this Checkpoint, before
                that call does anything else.
            overwrite: replace an existing checkpoint; without it, that is an error.  A folder with anything else than
                a checkpoint in it is never replaced.
            name: is compared between the ranks instead of the call site.

        Returns:
            The `Saving`.

        Warns:
            StaleStateWarning: once, on rank 0, if an array, a number, or a nest of these has not changed since the last
                save, on no rank: the program may have a new one, of which this Checkpoint does not know.

        Raises:
            CheckpointWriteError: on every rank, if any rank cannot write (a full disk, a missing permission).  An
                older checkpoint is still there.  What was written is removed, at the latest by the next save.
            CheckpointExistsError: on every rank, if the name is taken.
            OptionTypeError, DTypeError: on every rank, for objects that cannot be saved.
            OptionError: on every rank, for more names and plain values than `restore` accepts: 64 MiB of text, 2**21
                lists and dicts, 2**22 numbers and words, and 64 MiB of memory plus 8 times the text.
            ContextError: in a step function.
            CollectiveMismatchError: on every rank, if the ranks differ in the directory, the names, or the objects
                under a name; the text shows the difference.
        """
        communicator = self.strategy.extended.communicator
        with contextlib.ExitStack() as on_error:
            with self._call("Checkpoint.save", name) as call:
                path, state = self._agreed("save", directory, f"{wait=}, {overwrite=}", call)
                saving = Saving(communicator, path, bool(overwrite))
                on_error.callback(saving._abandon)  # after leaving the call: then no rank writes any more
                saving._begin(state, call, wait=bool(wait))
            on_error.pop_all()
        self._saving = saving
        last, self._last = self._last, state.by_name()
        unchanged = [key for key in self._last if last.get(key) == self._last[key]]
        stale = [key for key in unchanged if not _is_function(self.objects.get(key))]
        if stale and communicator.rank == 0 and not self._has_warned:
            self._has_warned = True
            warn(
                f"Checkpoint.save: {', '.join(map(repr, stale))} unchanged since the last save. If the program has "
                "made a new object under this name, the checkpoint still has the old one. Give a function: "
                f"ms.Checkpoint({stale[0]}=lambda: {stale[0]}). For a constant, a function ends this warning, too.",
                StaleStateWarning,
            )
        return saving

    @collective("restore")
    def restore(self, directory: str | os.PathLike[str], *, partial: bool = False, name: str | None = None) -> Restored:
        """Restore the objects from a checkpoint.  Collective; on any number of ranks.

        Everything is read and compared before the first object changes.  After an error of a
        `load_state_dict` some objects are restored, and others are not.

        Args:
            directory: the folder that `save` wrote.
            partial: restore the names that are on both sides, and leave the others.
            name: is compared between the ranks instead of the call site.

        Returns:
            What was restored: a `Restored`.

        Raises:
            CheckpointMissingError: on every rank, if there is not a checkpoint.
            CheckpointDamagedError: on every rank, for a changed file, another format, or a symbolic link; the text
                names the file.
            CheckpointMismatchError: on every rank, with a list, if the objects have other names, dtypes or shapes.
            CheckpointReadError: on every rank, if files cannot be read, or belong to another user in a folder that
                everybody can write to.
            ContextError: in a step function.
            CollectiveMismatchError: on every rank, as `save`.
        """
        with self._call("Checkpoint.restore", name) as call:
            path, state = self._agreed("restore", directory, f"{partial=}", call)
            source = Reading(state.strategy.extended.communicator, path, state.objects, call)
            fit = Comparison(source, state, bool(partial))
            call.agree("compare a checkpoint with the objects")
            fit.fetch()
            call.expect_more()
            manifest, objects = source.manifest, state.objects
            objects |= {name: fit.restored(name) for name in manifest.names if name in objects}
            call.agree("restore a checkpoint")
            left_out = tuple(printable(name, "") for name in fit.one_sided)
            notes, now = [], state.strategy.layout()
            for key, then in manifest.layout.items():
                value = now.get(key)
                # Gradient buckets are often made after a checkpoint was restored.
                if then != value and key != "source" and (value or key != "gradient_buckets"):
                    notes.append(printable(f"{key}: {then!r:.500} when it was saved, {value!r:.500} now", ""))
            self.objects.update({name: objects[name] for name in objects if not _is_function(self.objects.get(name))})
        self._last = {}
        return Restored(
            path, manifest.ranks, printable(manifest.written_by, ""), manifest.layout, tuple(notes), left_out, objects
        )

    def wait(self, *, name: str | None = None) -> None:
        """Wait until a save with ``wait=False`` is in place, if there is one.  Collective.

        Args:
            name: is compared between the ranks instead of the call site.

        Raises:
            CheckpointWriteError, CheckpointExistsError: on every rank, if it has failed.
        """
        self._wait("Checkpoint.wait", name)

    def _wait(self, where: str, name: str | None = None, *, raises: bool = True) -> None:
        """Do `wait`, for the public call `where`; without `raises`, the next call raises an error of the save."""
        if self._saving is not None:
            self._saving._settle(where, name, raises=raises)

    def _call(self, where: str, name: str | None) -> Call:
        """Return a public call in cross-replica context, to be entered."""
        strategy = self.strategy
        context.require_cross_replica(strategy, where)
        return Call(strategy.extended.communicator.guard, where, called=name)

    def _agreed(self, operation: str, directory: Any, options: str, call: Call) -> tuple[str, State]:
        """Wait for the previous save; return the path, and the objects' state, once all ranks agree on the call.

        They expect one more agreement.
        """
        path = checked_path(directory, call.where)
        self._wait(call.where, raises=operation == "save")
        call.expect_more()
        objects = checked_objects(call.where, "objects", self.objects)
        objects = {name: value() if _is_function(value) else value for name, value in objects.items()}
        state = State(objects, self.strategy, call.where)
        call.structure = state.structure()
        call.agree(operation, destination=path, options=options)
        call.expect_more()
        return path, state

    @staticmethod
    def arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
        """Return the arrays in a checkpoint by name.

        Rank-local.  Copies with an aggregation are combined; per-rank arrays are named ``name@rank``.
        All of it is read into memory.  The package safetensors reads arrays that are equal on all ranks
        in a file of it.

        Raises:
            CheckpointMissingError, CheckpointDamagedError, CheckpointReadError, OptionError: as `restore`.
        """
        ranks = Alone()
        with Call(ranks.guard, "Checkpoint.arrays") as call:
            source = Reading(ranks, checked_path(path, call.where, "path"), None, call)
            items = {name: item for name, item in source.manifest.items.items() if item.dtype}
            arrays = {name: fetched(source, name, item.copies) for name, item in items.items() if item.copies != OWN}
            for rank, own in sorted(source.owns.items()):
                arrays |= {f"{name}@{rank}": own.arrays[name] for name in own.arrays if name not in arrays}
        return arrays

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self.objects) or 'nothing'}>"


def _is_function(value: Any) -> bool:
    """Return whether an object of a checkpoint is a function that returns the object to save."""
    return isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, functools.partial))


def checked_path(directory: Any, where: str, name: str = "directory") -> str:
    """Return an absolute path.

    Raises:
        OptionTypeError, OptionError: for anything else than the path of a folder or file.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise OptionTypeError.at(where, found=f"{name}={directory!r}", expected="a path")
    path = os.path.abspath(text := os.fspath(directory))
    if not text or "\0" in text or not os.path.basename(path):
        raise OptionError.at(where, found=f"{name}={text!r}", expected="the path of a folder below the root")
    return path


# ------------------------------------------------------------------------------------------------ one for each step


class CheckpointManager(NamesOurs, Settable):
    """Saves checkpoints of one Checkpoint in a folder, keeps the last few, and restores the newest complete checkpoint.

    Args:
        checkpoint: the Checkpoint.
        directory: the folder; made by the first save.  One job at a time may save into it, and locks its file
            ``.lock``, which only its user can open.
        keep: how many checkpoints to keep; None keeps all.

    Attributes:
        skipped: the checkpoints that the last `restore` skipped, and why.
        restored: the result of the last `restore`, or None.

    Raises:
        OptionTypeError, OptionError: for another object than a Checkpoint, an invalid path, and `keep` below 1.

    >>> import os, tempfile, mpistrategy as ms
    >>> with ms.OneDeviceStrategy("CPU:0").scope():
    ...     weights = ms.Variable([1.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manager = ms.CheckpointManager(ms.Checkpoint(weights=weights), os.path.join(folder, "run 1"), keep=2)
    ...     for step in (10, 20, 30):
    ...         _ = manager.save(step)
    ...     print(manager.steps(), manager.restore())
    [20, 30] 30
    """

    checkpoint: Fixed[Checkpoint] = Fixed()
    directory: Fixed[str] = Fixed()
    keep: Setting[int | None] = or_none(checked_count)

    @refuses(
        max_to_keep="Write keep.",
        checkpoint_name="Leave it out: a checkpoint is named by its step.",
        checkpoint_interval="Call save at the steps to be saved.",
        step_counter="Pass the step to save.",
        init_fn="Call it where restore returns None.",
        keep_checkpoint_every_n_hours="Save these with a Checkpoint in another folder.",
    )
    def __init__(self, checkpoint: Checkpoint, directory: str | os.PathLike[str], keep: int | None = 3) -> None:
        self.checkpoint = checked_type("CheckpointManager", "checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        self.directory = checked_path(directory, "CheckpointManager")
        self.keep = keep
        self.skipped: Mapping[str, str] = {}
        self.restored: Restored | None = None
        #: The lock of the folder, on rank 0 from the first save on.
        self._lock: files.Lock | None = None
        #: The steps that the last restore found damaged; and the last step that was saved.
        self._damaged: set[int] = set()
        self._saved: int | None = None
        #: The step that was saved or restored before the last save; and that save.
        self._latest: int | None = None
        self._begun: Saving | None = None

    @property
    def latest(self) -> int | None:
        """The step that was saved or restored last, or None.  Rank-local.

        A save with ``wait=False`` counts once a call has waited for it.
        """
        begun = self._begun
        return self._saved if begun is not None and begun._is_known and begun.is_committed else self._latest

    def path_of(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be."""
        return os.path.join(self.directory, f"step-{checked_count('CheckpointManager', 'step', step, 0):012}")

    def steps(self) -> list[int]:
        """Return the steps with checkpoints in the folder, in order.  Rank-local.

        Whether a checkpoint is damaged is not checked.  Folders with anything else in them do not count.
        """
        with files.reading("CheckpointManager.steps", self.directory):
            return [step for step in _steps_in(self._names()) if is_checkpoint(self.path_of(step))]

    @refuses(checkpoint_number="Write step.", options="Leave it out.", check_interval="Leave it out.")
    def save(self, step: int, *, wait: bool = True, name: str | None = None) -> Saving:
        """Save the checkpoint of a step, then remove the oldest beyond `keep`.  Collective.

        Only checkpoints are removed: not a folder of such a name with anything else in it.

        Args:
            step: an int from 0 on without a checkpoint, or with one that `restore` found damaged and that still has
                its manifest.  The greatest step is the newest.
            wait: as for `Checkpoint.save`; False: what fails in a thread is raised on every rank by the next `save`,
                `wait` or `close`, before that call does anything else.
            name: is compared between the ranks instead of the call site.

        Raises:
            CheckpointExistsError: on every rank, if the step has a checkpoint, or another job saves here.
            Exception: what `Checkpoint.save` raises, on every rank.
        """
        communicator = self.checkpoint.strategy.extended.communicator
        with self.checkpoint._call("CheckpointManager.save", name) as call:
            path = self.path_of(step)
            self.checkpoint._wait(call.where)
            call.expect_more()
            if communicator.rank == 0:
                with files.writing(call.where, self.directory):
                    self._make_ready()
            call.agree("begin", destination=path)
            self._latest, self._saved, self._begun = self.latest, int(step), None
            saving = self._begun = self.checkpoint.save(path, wait=wait, overwrite=self._saved in self._damaged)
            self._damaged.discard(self._saved)
            self._remove_old(call)
        return saving

    def restore(self, *, partial: bool = False, name: str | None = None) -> int | None:
        """Restore the newest complete checkpoint; return its step, or None if there is none.  Collective.

        Damaged, unreadable and incomplete checkpoints are skipped (see `skipped`), and checkpoints of other users if
        everybody can write to the folder.  A complete checkpoint that does not fit the objects raises.

        Args:
            partial: as for `Checkpoint.restore`.
            name: is compared between the ranks instead of the call site.

        Raises:
            CheckpointMismatchError, ContextError: on every rank.
            CheckpointReadError: on every rank, if the folder is another user's in a folder that everybody can write to.
        """
        communicator = self.checkpoint.strategy.extended.communicator
        with self.checkpoint._call("CheckpointManager.restore", name) as call:
            self.checkpoint._wait(call.where, raises=False)  # the next save, wait or close raises its error
            call.expect_more()
            text = ""
            if communicator.rank == 0:
                with files.reading(call.where, self.directory):
                    text = "/".join(name for name in self._names() if name.startswith(("step-", ".step-")))
            call.agree("look for checkpoints", destination=self.directory, options=f"{partial=}")
            names = [*filter(None, communicator.allgather_text(text)[0].split("/"))]
            why = "incomplete: the job ended while it was written, or no checkpoint by its name"
            self.skipped = {name: why for name in names if not _STEP.fullmatch(name)}
            self.restored, self._damaged = None, set()
            for step in reversed(_steps_in(names)):
                path = self.path_of(step)
                try:
                    self.restored = self.checkpoint.restore(path, partial=partial)
                except (CheckpointDamagedError, CheckpointMissingError, CheckpointReadError) as error:
                    self.skipped[os.path.basename(path)] = str(error)
                    self._damaged |= {step} if isinstance(error, CheckpointDamagedError) else set()
                else:
                    self._latest, self._begun = step, None
                    return step
        return None

    def wait(self, *, name: str | None = None) -> None:
        """Wait until a save with ``wait=False`` is in place; remove the oldest checkpoints beyond `keep`.  Collective.

        Args:
            name: is compared between the ranks instead of the call site.

        Raises:
            CheckpointWriteError, CheckpointExistsError: on every rank, if that save has failed.
        """
        self._finish("CheckpointManager.wait", name)

    def close(self, *, name: str | None = None) -> None:
        """Do `wait`, and let other jobs save here, also if a save has failed.  Collective."""
        try:
            self._finish("CheckpointManager.close", name)
        finally:
            self._release()

    def _finish(self, where: str, name: str | None) -> None:
        """Wait for a save with ``wait=False``, and remove old checkpoints, for the public call `where`."""
        self.checkpoint._wait(where, name)
        guard = self.checkpoint.strategy.extended.communicator.guard
        if not guard.closed:
            with Call(guard, where, called=name) as call:
                self._remove_old(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception the other ranks may never make a collective close.
        if error is None:
            self.close()
        self._release()

    # ------------------------------------------------------------------------------------------- the folder

    def _names(self) -> list[str]:
        """Return the names in the folder; none if there is no folder.  Raise if it is not to be trusted."""
        with contextlib.suppress(FileNotFoundError):
            files.check_is_trusted(self.directory)
            return sorted(os.listdir(self.directory))
        return []

    def _make_ready(self) -> None:
        """Lock the folder once, and remove incomplete checkpoints of ended jobs.  On rank 0, before a save."""
        if self._lock is not None and self._lock.process == os.getpid():  # a forked child has no lock
            return
        files.make_folders(self.directory)
        files.check_is_trusted(self.directory)  # what `restore` would not take is not saved, either
        path = os.path.join(os.path.realpath(self.directory), ".lock")
        try:
            self._lock = files.Lock(path, os.O_RDWR | os.O_CREAT)
        except BlockingIOError as error:
            raise CheckpointExistsError.at(
                "CheckpointManager",
                found=f"another job, or another manager of this one, that has locked {path!r}",
                expected="one writer for a folder",
                fix="Use a folder for each job, or close() the other manager first.",
            ) from error
        self.checkpoint.strategy.extended.communicator.guard.at_close.append(weakref.finalize(self, self._lock.close))
        if self._lock.is_held:
            files.sweep(self.directory, _UNFINISHED)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def _remove_old(self, call: Call) -> None:
        """Remove the oldest checkpoints beyond `keep`, on rank 0; on return they are gone for all ranks.  Collective.

        One that cannot be removed stays: the new one is safe.
        """
        call.expect_more()
        if self.keep is not None and self._lock is not None:  # not another rank than 0, and something has been saved
            with contextlib.suppress(CheckpointError):
                steps = [step for step in self.steps() if step not in self._damaged]
                other_steps = [step for step in steps if step != self._saved]
                for step in other_steps[: max(0, len(steps) - self.keep)]:
                    hidden = os.path.join(self.directory, f".step-{step:012}.saving-0000000000000000")
                    with contextlib.suppress(OSError):  # if the job ends meanwhile, the next one sweeps the rest
                        files.change(os.rename, self.path_of(step), hidden)
                        files.remove(hidden)
        call.agree("remove old checkpoints", options=f"keep={self.keep}")


def _steps_in(names: list[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match is not None)
