"""Checkpoint: saves the state of a program's objects, and restores it on any number of ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from mpistrategy import context
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.arrays import arrays_of, arrays_of_file
from mpistrategy.checkpoint.restoring import Restored, restore
from mpistrategy.checkpoint.saving import Saving
from mpistrategy.checkpoint.state import State, strategy_of
from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.faults.injection import collective
from mpistrategy.strategy.strategy import Strategy

__all__ = ["Checkpoint", "Restored", "Saving"]


class Checkpoint:
    """The state of some objects: saved whole or not at all, restored on any number of ranks.

    Make it with the same names for the same objects on all ranks; in `strategy.scope()`, unless variables among the
    objects belong to the strategy already.  A checkpoint is a folder of plain files: nothing in them is ever executed.
    Only the user can read it; in a folder that is setgid, the group can, too.

    Kept are:

    * Variables: mirrored ones once; of ON_READ ones every replica's copy.  As many ranks as there were get their own
      back; on another number the total of a SUM is kept (integers exactly), and a MEAN's mean.
    * Optimizers: steps, slots, learning rate and skipped steps.  They need not be built to be restored.
    * Gradient accumulators, in the middle of a group of steps: sums; their total, on another number of ranks.
    * Metrics, and other objects that have variables as their `variables`.
    * NumPy's random generators, and `strategy.rng(seed)`.
    * Iterators of distributed datasets: they go on with the next batch.
    * Arrays, numbers, strings, None; dicts, lists and tuples of everything.  What is equal on all ranks is kept once;
      what is not comes back on as many ranks as there were.
    * Objects with `state_dict()` and `load_state_dict(state)`, where the state consists of the above.

    Args:
        objects: by name.  Arrays, dicts and lists are restored in place; a number is not: read it from `objects`.

    Attributes:
        objects: the objects by name; may be changed, on all ranks alike.

    Raises:
        OptionError: for a name that begins with ``_``, and one with ``/`` in it.

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

    def __init__(self, **objects: Any) -> None:
        refused = [name for name in objects if not name or name.startswith("_") or "/" in name]
        if refused:
            raise OptionError.at(
                "Checkpoint", found=f"the name {refused[0]!r}", expected="one that does not begin with _, without /"
            )
        self.objects = objects
        self._made_in: Strategy = context.current_strategy()
        self._pending: Saving | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy whose ranks save together: that of the objects' variables, or in whose scope this was made."""
        return strategy_of(self.objects, self._made_in)

    def save(self, directory: str | os.PathLike[str], *, wait: bool = True, overwrite: bool = False) -> Saving:
        """Write a checkpoint: the folder `directory`, which appears when it is whole.  Collective.

        Args:
            directory: what the folder is to be called, equal on all ranks, and on a file system that they share.
            wait: False takes copies, and lets the program go on while a thread writes; the checkpoint is there after
                `wait()` of what is returned, or after the next save or restore of this Checkpoint.
            overwrite: replace a checkpoint that is there.  Without, that is an error.

        Returns:
            The `Saving`.

        Raises:
            CheckpointWriteError: on every rank, for a full disk, a missing permission and the like on any of them;
                nothing half-made is left, and what was there still is.
            CheckpointExistsError: on every rank, when there is something under the name.
            OptionTypeError, AggregationError, DTypeError: on every rank, for objects without a state.
            OptionError: on every rank, for more names and plain values than are read again: 64 MiB of text, 2**21 lists
                and dicts (floats count as such), 2**22 numbers and words, 64 MiB of memory plus 8 times the text.
            ContextError: in a step function.
            CollectiveMismatchError: on every rank, when directories differ, names, or what the names stand for; the
                text says what stands for it on each rank.
        """
        return self.save_after(lambda: None, directory, wait=wait, overwrite=overwrite)

    @collective("save")
    def save_after(
        self,
        prepare: Callable[[], object],
        directory: str | os.PathLike[str],
        *,
        wait: bool = True,
        overwrite: bool = False,
    ) -> Saving:
        """Do `save`; rank 0 calls `prepare` once all ranks have agreed, before anything is written."""
        strategy = self.strategy
        context.require_cross_replica(strategy, "Checkpoint.save")
        communicator = strategy.extended.communicator
        # Cleaning up comes after the guard's call: then no rank writes any more.
        with contextlib.ExitStack() as cleaning, communicator.guard.call("Checkpoint.save") as call:
            path = checked_path(directory, call.where)
            self._commit_pending(call, cleaning)
            call.expect_more()
            state = State(self.objects, strategy, call.where)
            call.structure = state.structure()
            call.agree("save", destination=path, options=f"{wait=}, {overwrite=}")
            state.check_generators(communicator)
            saving = Saving(strategy, path, bool(overwrite))
            cleaning.enter_context(saving.cleaned_up())
            saving.begin(state, call, prepare, wait=bool(wait))
            if wait:
                saving.commit(call)
        if not wait:
            self._pending = saving
        return saving

    @collective("restore")
    def restore(self, directory: str | os.PathLike[str], *, partial: bool = False) -> Restored:
        """Give the objects the state that a checkpoint holds.  Collective; on any number of ranks.

        Everything is read and compared before the first object changes.  Objects that load their own state are asked
        last.

        Args:
            directory: what `save` was given.
            partial: restore the names that stand on both sides, and leave the others.

        Returns:
            What it was: a `Restored`.

        Raises:
            CheckpointMissingError: on every rank, when there is none.
            CheckpointDamagedError: on every rank, for a file that is not as it was written, another format, symbolic
                links; the text names it.
            CheckpointMismatchError: on every rank, with a list, when the objects have other names, dtypes or shapes.
            CheckpointReadError: on every rank, when files cannot be read; and for another user's, where everybody can
                write.
            ContextError: in a step function.
            CollectiveMismatchError: on every rank, as `save`.
        """
        strategy = self.strategy
        context.require_cross_replica(strategy, "Checkpoint.restore")
        communicator = strategy.extended.communicator
        with contextlib.ExitStack() as cleaning, communicator.guard.call("Checkpoint.restore") as call:
            path = checked_path(directory, call.where)
            self._commit_pending(call, cleaning)
            call.expect_more()
            state = State(self.objects, strategy, call.where)
            call.structure = state.structure()
            call.agree("restore", destination=path, options=f"{partial=}")
            state.check_generators(communicator)
            return restore(self.objects, state, strategy, path, bool(partial), call)

    def wait(self) -> None:
        """Wait for a save that was told not to.  Collective; nothing to do when there is none."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if not pending.has_failed:
                pending.wait()

    def _commit_pending(self, call: Call, cleaning: contextlib.ExitStack) -> None:
        """Make the checkpoint that is under way valid, before the next one."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_committed and not pending.has_failed:
            cleaning.enter_context(pending.cleaned_up())
            pending.commit(call)

    @staticmethod
    def arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
        """Return the arrays in a checkpoint by name, or in a ``.safetensors``, ``.npz`` or ``.npy`` file of others.

        Of this rank alone: nothing is sent.  Copies that were to be combined are; a rank's own stand as ``name@rank``.
        The file is mapped into memory, and read as you look at the arrays: copy them before it is overwritten in place
        or, on a network's file system, removed.  Writing into them does not change it.  Compressed arrays of a ``.npz``
        file are read into memory: at most 64 MiB plus 100 times the file's size, since a small file can be made to take
        any amount; `numpy.load` reads what has more (mostly zeros).  A file may be named by a symbolic link.

        Raises:
            CheckpointMissingError, CheckpointDamagedError, CheckpointReadError, OptionError: as `restore`.
        """
        text = checked_path(path, "Checkpoint.arrays")
        return arrays_of(text) if os.path.isdir(text) else arrays_of_file(text)

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self.objects) or 'nothing'}>"


def checked_path(directory: Any, where: str) -> str:
    """Return an absolute path that names something.

    Raises:
        OptionTypeError, OptionError: for what is none.
    """
    try:
        text = os.fspath(directory)
    except TypeError as error:
        raise OptionTypeError.at(where, found=f"{directory!r}", expected="a path") from error
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError.at(where, found=f"{text!r}", expected="the path of a folder")
    path = os.path.abspath(text)
    if not os.path.basename(path):
        raise OptionError.at(where, found=f"{text!r}", expected="a folder below the root")
    return path
