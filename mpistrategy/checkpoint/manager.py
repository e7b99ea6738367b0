"""CheckpointManager: a folder with one checkpoint for each saved step; the newest complete one is restored."""

from __future__ import annotations

import contextlib
import json
import os
import re
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from mpistrategy import context
from mpistrategy.checkpoint.checkpoint import Checkpoint, Restored, Saving, checked_path
from mpistrategy.checkpoint.saving import REPLACED, SAVING
from mpistrategy.checkpoint.storage.files import (
    TOKEN,
    Folder,
    check_is_trusted,
    make_folders,
    reading,
    unique_name,
    writing,
)
from mpistrategy.checkpoint.storage.lock import locked_file
from mpistrategy.checkpoint.storage.manifest import is_checkpoint
from mpistrategy.errors import (
    CheckpointDamagedError,
    CheckpointMissingError,
    CheckpointReadError,
    OptionError,
    OptionTypeError,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.objects.nearest import NamesOurs, refuses
from mpistrategy.objects.settings import Fixed, Settable, Setting, checked_count, or_none

_STEP = re.compile(r"step-([0-9]{12})")
_UNFINISHED = re.compile(rf"\.step-[0-9]{{12}}\.saving-{TOKEN}")
_LOCK = ".lock"


class CheckpointManager(NamesOurs, Settable):
    """Saves checkpoints of one Checkpoint in a folder, keeps the last ones, and restores the newest complete one.

    Args:
        checkpoint: the Checkpoint.
        directory: the folder; made by the first save.  One job at a time may save into it, and locks its file
            ``.lock``, which only its user can open.
        keep: how many checkpoints to keep; None keeps all.

    Attributes:
        skipped: the checkpoints that the last `restore` skipped, and why.
        restored: what the last `restore` restored, or None.

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
    skipped: Mapping[str, str]
    restored: Restored | None

    _words_of = "CheckpointManager"

    @refuses(
        max_to_keep="Write keep.",
        checkpoint_name="Leave it out: a checkpoint is named by its step.",
        checkpoint_interval="Call save at the steps to be saved.",
        step_counter="Pass the step to save.",
        init_fn="Call it where restore returns None.",
        keep_checkpoint_every_n_hours="Save these with a Checkpoint in another folder.",
    )
    def __init__(self, checkpoint: Checkpoint, directory: str | os.PathLike[str], keep: int | None = 3) -> None:
        where = "CheckpointManager"
        if not isinstance(checkpoint, Checkpoint):
            raise OptionTypeError.at(where, found=f"checkpoint={checkpoint!r}", expected="a Checkpoint")
        self.checkpoint = checkpoint
        self.directory = checked_path(directory, where)
        self.keep = keep
        self.skipped, self.restored = {}, None
        self._lock: Folder | None = None
        self._unlock: Any = None
        self._is_ready = False
        self._damaged: set[int] = set()
        self._saved: int | None = None
        #: The step that was saved or restored last, as all ranks know; and a save with wait=False that came after it.
        self._latest: int | None = None
        self._begun: tuple[int, Saving] | None = None

    @property
    def latest(self) -> int | None:
        """The step that was saved or restored last, or None.  Rank-local.

        A save with ``wait=False`` counts once its checkpoint is in the folder, as this rank sees it.
        """
        if self._begun is not None and os.path.lexists(self.path_of(self._begun[0])):
            return self._begun[0]
        return self._latest

    def path_of(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be."""
        return os.path.join(self.directory, f"step-{_checked(step):012}")

    def steps(self) -> list[int]:
        """Return the steps with checkpoints in the folder, in order.  Rank-local.

        Whether a checkpoint is damaged is not checked.  Folders with anything else in them do not count.
        """
        with reading("CheckpointManager.steps", self.directory):
            try:
                with Folder.at(self.directory) as folder:
                    return _checkpoints_in(folder)
            except FileNotFoundError:
                return []

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
            CheckpointExistsError: on every rank, if the step has a checkpoint, another job saves here, or another user
                owns the lock.
            Exception: what `Checkpoint.save` raises, on every rank.
        """
        strategy = self.checkpoint.strategy
        context.require_cross_replica(strategy, "CheckpointManager.save")
        communicator = strategy.extended.communicator
        with Call(communicator.guard, "CheckpointManager.save", called=name) as call:
            path = self.path_of(step)
            self._wait(call.where)
            call.expect_more()
            call.agree("begin", destination=path)

            def prepare() -> None:
                with writing(call.where, self.directory):
                    self._make_ready()
                    self._remove_damaged(_checked(step))

            saving = self.checkpoint._save_after(prepare, path, wait=wait)
            self._saved = _checked(step)
            if wait:
                self._latest, self._begun = self._saved, None
            else:
                self._begun = self._saved, saving
            self._remove_old(call)
        return saving

    def restore(self, *, partial: bool = False, name: str | None = None) -> int | None:
        """Restore the newest complete checkpoint; return its step, or None if there is none.  Collective.

        Damaged, unreadable and incomplete checkpoints are skipped (see `skipped`), and those of other users if
        everybody can write to the folder.  A complete checkpoint that does not fit the objects raises.

        Args:
            partial: as for `Checkpoint.restore`.
            name: is compared between the ranks instead of the call site.

        Raises:
            CheckpointMismatchError, ContextError: on every rank.
            CheckpointReadError: on every rank, if the folder is another user's in one that everybody can write to.
        """
        strategy = self.checkpoint.strategy
        context.require_cross_replica(strategy, "CheckpointManager.restore")
        communicator = strategy.extended.communicator
        with Call(communicator.guard, "CheckpointManager.restore", called=name) as call:
            self.checkpoint._settle(call.where)  # what has failed is raised by the next save, wait or close
            call.expect_more()
            found = self._there() if communicator.rank == 0 else ""
            call.agree("look for checkpoints", destination=self.directory, options=f"{partial=}")
            steps, skipped = json.loads(communicator.allgather_text(found)[0])
            self.skipped, self.restored, self._damaged = dict(skipped), None, set()
            for step in reversed(steps):
                path = self.path_of(step)
                try:
                    self.restored = self.checkpoint.restore(path, partial=partial)
                except (CheckpointDamagedError, CheckpointMissingError, CheckpointReadError) as error:
                    self.skipped[os.path.basename(path)] = str(error)
                    self._damaged |= {step} if isinstance(error, CheckpointDamagedError) else set()
                    continue
                self._latest, self._begun = int(step), None
                return self._latest
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
        self._wait(where, name)
        guard = self.checkpoint.strategy.extended.communicator.guard
        if not guard.closed:
            with Call(guard, where, called=name) as call:
                self._remove_old(call)

    def _wait(self, where: str, name: str | None = None) -> None:
        """Wait for a save with ``wait=False``, for the public call `where`; raise what has failed."""
        self.checkpoint._wait(where, name)
        if self._begun is not None and self._begun[1].is_committed:
            self._latest = self._begun[0]
        self._begun = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception the other ranks may never make a collective close.
        if error is None:
            self.close()
        self._release()

    def _there(self) -> str:
        """Return the steps in the folder, and the names that only look like checkpoints, as JSON."""
        skipped = []
        with reading("CheckpointManager.restore", self.directory):
            try:
                folder = Folder.at(self.directory)
            except FileNotFoundError:
                return json.dumps([[], []])
            with folder:
                check_is_trusted(folder.state, os.stat(os.path.dirname(self.directory)), self.directory)
                for name in folder.names():
                    if name.startswith((SAVING.format("step-")[:-8], REPLACED.format("step-")[:-10])):
                        skipped.append((name, "incomplete: the job ended while it was written"))
                    elif name.startswith("step-") and not _STEP.fullmatch(name):
                        skipped.append((name, "not the name of a checkpoint"))
                return json.dumps([_steps_in(folder), skipped])

    def _make_ready(self) -> None:
        """Lock the folder once, and remove incomplete checkpoints of ended jobs."""
        if self._is_ready and (self._lock is None or self._lock.descriptor >= 0):  # a forked child has no lock
            return
        make_folders(self.directory)
        with Folder.at(self.directory) as folder:
            # What `restore` would not take is not saved, either.
            check_is_trusted(folder.state, os.stat(os.path.dirname(self.directory)), self.directory)
            self._lock = locked_file(folder, _LOCK)
            if self._lock is not None:
                self._unlock = weakref.finalize(self, self._lock.close)
                folder.sweep(_UNFINISHED)
        self._is_ready = True

    def _release(self) -> None:
        if self._unlock is not None:
            self._unlock()
        self._lock, self._unlock, self._is_ready = None, None, False

    def _remove_damaged(self, step: int) -> None:
        """Remove the checkpoint of a step that `restore` found damaged; anything else there stays."""
        if step in self._damaged:
            with Folder.at(self.directory) as folder:
                _remove(folder, os.path.basename(self.path_of(step)))
            self._damaged.remove(step)

    def _remove_old(self, call: Call) -> None:
        """Remove the oldest checkpoints beyond `keep`, on rank 0; on return they are gone for all ranks.  Collective.

        One that cannot be removed stays: the new one is safe.
        """
        call.expect_more()
        if self.keep is not None and self._is_ready:  # not another rank than 0, and something has been saved
            with contextlib.suppress(OSError), Folder.at(self.directory) as folder:
                steps = [step for step in _checkpoints_in(folder) if step not in self._damaged]
                others = [step for step in steps if step != self._saved]
                for step in others[: max(0, len(steps) - self.keep)]:
                    with contextlib.suppress(OSError):  # another user's, in a group's folder
                        _remove(folder, os.path.basename(self.path_of(step)))
        call.agree("remove old checkpoints", options=f"keep={self.keep}")

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self.directory!r}, keep={self.keep}>"


def _steps_in(folder: Folder) -> list[int]:
    found = (_STEP.fullmatch(name) for name in folder.names())
    return sorted(int(match[1]) for match in found if match is not None)


def _checkpoints_in(folder: Folder) -> list[int]:
    """Return the steps of `_steps_in` whose folders are checkpoints, and nothing else."""
    found = []
    for step in _steps_in(folder):
        with contextlib.suppress(OSError), folder.folder(f"step-{step:012}") as there:
            found += [step] if is_checkpoint(there) else []
    return found


def _remove(folder: Folder, name: str) -> None:
    """Remove a checkpoint.  Under a hidden name: if the job ends meanwhile, the next one sweeps what is left.

    Anything else than a checkpoint stays.

    Raises:
        OSError: if it cannot be removed.
    """
    with folder.folder(name) as there:
        if not (folder.owns(there) and is_checkpoint(there)):
            return
    hidden = unique_name(SAVING.format(name))
    folder.rename(name, hidden)
    folder.remove(hidden)


def _checked(step: Any) -> int:
    if type(step) is not int and not hasattr(type(step), "__index__"):
        raise OptionTypeError.at("CheckpointManager", found=f"step={step!r}", expected="an int")
    number = int(step)
    if not 0 <= number < 10**12:
        raise OptionError.at("CheckpointManager", found=f"step={number}", expected="an int from 0 to 999999999999")
    return number
