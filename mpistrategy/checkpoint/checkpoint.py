"""Checkpoint: saves the state of a program's objects and restores it on any number of ranks."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any, Protocol

from mpistrategy import context
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.restoring import Restored, arrays_of, restore
from mpistrategy.checkpoint.saving import Saving
from mpistrategy.checkpoint.state import State
from mpistrategy.errors import OptionError, OptionTypeError, StaleStateWarning
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.objects.other_names import NamesOurs
from mpistrategy.objects.settings import Setting, checked_type
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.variables.variable import Variable

__all__ = ["Checkpoint", "Restored", "Saving", "Stateful"]


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
    * Iterators of distributed datasets: they continue with the next batch.
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

    _words_of = "Checkpoint"
    objects: Setting[dict[str, Any]] = Setting(checked_objects)

    def __init__(self, **objects: Any) -> None:
        self.objects = objects
        self._made_in: Strategy = context.current_strategy()
        #: The last save.
        self._saving: Saving | None = None
        self._last: dict[str, int] = {}
        self._has_warned = False
        if objects:
            _ = self.strategy  # raises here, not at the first save

    @property
    def strategy(self) -> Strategy:
        """The strategy whose ranks save together."""
        if not self._made_in._is_default:
            return self._made_in
        variables = (value for value in self.objects.values() if isinstance(value, Variable))
        of_variables: Any = next((var.strategy for var in variables if not var.strategy._is_default), None)
        joined: Any = of_variables or context.open_strategy("Checkpoint", "one that was")
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
        saving = None
        try:
            with self._call("Checkpoint.save", name) as call:
                path, _, state = self._agreed("save", directory, f"{wait=}, {overwrite=}", call)
                saving = Saving(communicator, path, bool(overwrite))
                digests = saving._begin(state, call, wait=bool(wait))
        except BaseException:  # after leaving the call: then no rank writes any more
            if saving is not None:
                saving._abandon()
            raise
        self._saving = saving
        self._look_for_stale(digests, communicator.rank)
        return saving

    def _look_for_stale(self, digests: dict[str, int], rank: int) -> None:
        """Warn once, on rank 0, of objects that are as they were in the last save, unless functions return them."""
        last, self._last = self._last, digests
        stale = [
            name for name in digests if last.get(name) == digests[name] and not _is_function(self.objects.get(name))
        ]
        if stale and not self._has_warned:
            self._has_warned = True
            if rank == 0:
                name, names = stale[0], ", ".join(map(repr, stale))
                warn(
                    f"Checkpoint.save: {names} unchanged since the last save. If the program has made a new object "
                    "under this name, the checkpoint still has the old one. Give a function: "
                    f"ms.Checkpoint({name}=lambda: {name}). For a constant, a function ends this warning, too.",
                    StaleStateWarning,
                )

    @collective("restore")
    def restore(self, directory: str | os.PathLike[str], *, partial: bool = False, name: str | None = None) -> Restored:
        """Restore the objects from a checkpoint.  Collective; on any number of ranks.

        Everything is read and compared before the first object changes.  `load_state_dict` is called last.

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
            path, objects, state = self._agreed("restore", directory, f"{partial=}", call)
            restored = restore(objects, state, path, bool(partial), call)
            self.objects.update({name: objects[name] for name in objects if not _is_function(self.objects.get(name))})
        self._last = {}
        return restored

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

    def _agreed(self, operation: str, directory: Any, options: str, call: Call) -> tuple[str, dict[str, Any], State]:
        """Wait for the previous save; return path, objects and their state, once all ranks agree on the call.

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
        return path, objects, state

    @staticmethod
    def arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
        """Return the arrays in a checkpoint by name.

        Rank-local.  Copies with an aggregation are combined; per-rank arrays are named ``name@rank``.
        All of it is read into memory.  The package safetensors reads single arrays in a file of it.

        Raises:
            CheckpointMissingError, CheckpointDamagedError, CheckpointReadError, OptionError: as `restore`.
        """
        return arrays_of(checked_path(path, "Checkpoint.arrays", "path"))

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self.objects) or 'nothing'}>"


def _is_function(value: Any) -> bool:
    """Return whether an object of a checkpoint is a function that returns the object to save."""
    return isinstance(value, functools.partial) or inspect.isroutine(value)


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
