"""CheckpointManager: a folder with one checkpoint for each saved step; the newest complete one is restored."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from mpistrategy.checkpoint import files
from mpistrategy.checkpoint.checkpoint import Checkpoint, Restored, Saving, checked_path
from mpistrategy.checkpoint.format import is_checkpoint
from mpistrategy.checkpoint.saving import SAVING
from mpistrategy.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMissingError,
    CheckpointReadError,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.objects.other_names import NamesOurs, refuses
from mpistrategy.objects.settings import Fixed, Settable, Setting, checked_count, checked_type, or_none

_STEP = re.compile(r"step-([0-9]{12,})")
_UNFINISHED = re.compile(rf"\.step-[0-9]{{12,}}\.saving-{files.TOKEN}")
_INCOMPLETE = "incomplete: the job ended while it was written, or no checkpoint by its name"


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
        self.checkpoint = checked_type("CheckpointManager", "checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        self.directory = checked_path(directory, "CheckpointManager")
        self.keep = keep
        self.skipped, self.restored = {}, None
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
            self.skipped = {name: _INCOMPLETE for name in names if not _STEP.fullmatch(name)}
            self.restored, self._damaged = None, set()
            for step in reversed(_steps_in(names)):
                path = self.path_of(step)
                try:
                    self.restored = self.checkpoint.restore(path, partial=partial)
                except (CheckpointDamagedError, CheckpointMissingError, CheckpointReadError) as error:
                    self.skipped[os.path.basename(path)] = str(error)
                    self._damaged |= {step} if isinstance(error, CheckpointDamagedError) else set()
                    continue
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
        if not os.path.lexists(self.directory):
            return []
        files.check_is_trusted(self.directory)
        return sorted(os.listdir(self.directory))

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
        weakref.finalize(self, self._lock.close)
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
                    hidden = os.path.join(self.directory, SAVING.format(f"step-{step:012}") + "0" * 16)
                    with contextlib.suppress(OSError):  # if the job ends meanwhile, the next one sweeps the rest
                        files.change(os.rename, self.path_of(step), hidden)
                        files.remove(hidden)
        call.agree("remove old checkpoints", options=f"keep={self.keep}")

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self.directory!r}, keep={self.keep}>"


def _steps_in(names: list[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match is not None)
