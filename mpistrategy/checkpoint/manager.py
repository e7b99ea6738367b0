"""CheckpointManager: a folder of checkpoints, one for each step that was saved; the newest that is whole counts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import weakref
from types import TracebackType
from typing import Any, Self

from mpistrategy import context
from mpistrategy.checkpoint.checkpoint import Checkpoint, Restored, Saving, checked_path
from mpistrategy.checkpoint.saving import REPLACED, SAVING
from mpistrategy.checkpoint.storage.files import Folder, check_is_trusted, make_folders, reading, writing
from mpistrategy.checkpoint.storage.lock import locked_file
from mpistrategy.checkpoint.storage.manifest import NAME
from mpistrategy.errors import (
    CheckpointDamagedError,
    CheckpointMissingError,
    CheckpointReadError,
    OptionError,
    OptionTypeError,
)

_STEP = re.compile(r"step-([0-9]{12})")
_UNFINISHED = re.compile(r"\.step-[0-9]{12}\.saving-[0-9a-f]+")
_LOCK = ".lock"


class CheckpointManager:
    """Saves checkpoints of one Checkpoint in a folder, keeps the last ones, and restores the newest that is whole.

    Args:
        checkpoint: what is saved.
        directory: the folder; made when the first checkpoint is saved.  One job at a time may save into it: its lock,
            ``.lock``, is a file that nobody but its user can open.
        keep: how many checkpoints to keep; None keeps all.

    Attributes:
        skipped: of the latest `restore`: the checkpoints that were passed over, and why.
        restored: of the latest `restore`: what it was, or None.
        latest: the step that was saved or restored last, or None.

    Raises:
        OptionTypeError, OptionError: for what is no Checkpoint, no path, and a `keep` below 1.

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

    def __init__(self, checkpoint: Checkpoint, directory: str | os.PathLike[str], keep: int | None = 3) -> None:
        where = "CheckpointManager"
        if not isinstance(checkpoint, Checkpoint):
            raise OptionTypeError.at(where, found=f"checkpoint={checkpoint!r}", expected="a Checkpoint")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise OptionError.at(where, found=f"keep={keep!r}", expected="an int from 1 on, or None")
        self.checkpoint = checkpoint
        self.directory = checked_path(directory, where)
        self.keep = keep
        self.skipped: dict[str, str] = {}
        self.restored: Restored | None = None
        self.latest: int | None = None
        self._lock: Folder | None = None
        self._unlock: Any = None
        self._is_ready = False
        self._damaged: set[int] = set()
        self._saved: int | None = None

    def path_of(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be."""
        return os.path.join(self.directory, f"step-{_checked(step):012}")

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints here, in order; of this rank alone, and without reading them."""
        with reading("CheckpointManager.steps", self.directory):
            try:
                with Folder.at(self.directory) as folder:
                    return _steps_in(folder)
            except FileNotFoundError:
                return []

    def save(self, step: int, *, wait: bool = True) -> Saving:
        """Save the checkpoint of a step, then remove those that are too many.  Collective.

        Args:
            step: an int from 0 on, of which there is none here yet, or one that `restore` found damaged; the greatest
                counts as the newest.
            wait: as for `Checkpoint.save`.

        Raises:
            CheckpointExistsError: on every rank, when there is one of this step, another job saves here, or the lock is
                another user's.
            Exception: all that `Checkpoint.save` raises, on every rank.
        """
        strategy = self.checkpoint.strategy
        context.require_cross_replica(strategy, "CheckpointManager.save")
        communicator = strategy.extended.communicator
        with communicator.guard.call("CheckpointManager.save") as call:
            path = self.path_of(step)
            self.checkpoint.wait()
            call.expect_more()
            call.agree("begin", destination=path)

            def prepare() -> None:
                with writing(call.where, self.directory):
                    self._make_ready()
                    self._remove_damaged(_checked(step))

            saving = self.checkpoint.save_after(prepare, path, wait=wait)
            self._saved = self.latest = _checked(step)
            self._remove_old()
        return saving

    def restore(self, *, partial: bool = False) -> int | None:
        """Restore the newest checkpoint that is whole; return its step, or None when there is none.  Collective.

        Those that are damaged, unreadable or unfinished are passed over: see `skipped`; and so are other users', where
        everybody can write to the folder.  One that is whole but does not fit is not.

        Args:
            partial: as for `Checkpoint.restore`.

        Raises:
            CheckpointMismatchError, ContextError: on every rank.
            CheckpointReadError: on every rank, for a folder of another user's in one that everybody can write to.
        """
        strategy = self.checkpoint.strategy
        context.require_cross_replica(strategy, "CheckpointManager.restore")
        communicator = strategy.extended.communicator
        with communicator.guard.call("CheckpointManager.restore") as call:
            self.checkpoint.wait()
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
                self.latest = int(step)
                return self.latest
        return None

    def wait(self) -> None:
        """Wait for a save that was told not to, and remove those that are too many.  Collective."""
        self.checkpoint.wait()
        self._remove_old()

    def close(self) -> None:
        """Wait for a save that was told not to, and let others save here.  Collective."""
        self.wait()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception the peers may never come to a collective close.
        if error is None:
            self.close()
        self._release()

    def _there(self) -> str:
        """Return the steps here, and what else there is that looks like a checkpoint and is none."""
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
                        skipped.append((name, "not finished: the job ended while it was written"))
                    elif name.startswith("step-") and not _STEP.fullmatch(name):
                        skipped.append((name, "no name of a checkpoint"))
                return json.dumps([_steps_in(folder), skipped])

    def _make_ready(self) -> None:
        """Lock the folder, once, and sweep what jobs that have ended left unfinished."""
        if self._is_ready and (self._lock is None or self._lock.descriptor >= 0):  # a forked child has no lock
            return
        make_folders(self.directory)
        with Folder.at(self.directory) as folder:
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
        """Make room for a step whose checkpoint `restore` found damaged."""
        if step in self._damaged:
            with Folder.at(self.directory) as folder:
                folder.remove(os.path.basename(self.path_of(step)), first=NAME)
            self._damaged.remove(step)

    def _remove_old(self) -> None:
        """Remove the checkpoints that are too many; what cannot be removed stays, since the new one is safe."""
        if self.keep is None or not self._is_ready:  # another rank than 0, or nothing has been saved
            return
        with contextlib.suppress(OSError), Folder.at(self.directory) as folder:
            steps = [step for step in _steps_in(folder) if step not in self._damaged]
            others = [step for step in steps if step != self._saved]
            for step in others[: max(0, len(steps) - self.keep)]:
                with contextlib.suppress(OSError):  # another user's, in a group's folder
                    folder.remove(os.path.basename(self.path_of(step)), first=NAME)

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self.directory!r}, keep={self.keep}>"


def _steps_in(folder: Folder) -> list[int]:
    found = (_STEP.fullmatch(name) for name in folder.names())
    return sorted(int(match[1]) for match in found if match is not None)


def _checked(step: Any) -> int:
    if type(step) is not int and not hasattr(type(step), "__index__"):
        raise OptionTypeError.at("CheckpointManager", found=f"step={step!r}", expected="an int")
    number = int(step)
    if not 0 <= number < 10**12:
        raise OptionError.at("CheckpointManager", found=f"step={number}", expected="an int from 0 to 999999999999")
    return number
