"""The exception tree: one base, one class for each kind of mistake.

Every class also derives from the built-in exception that TensorFlow raises for the same mistake, so
``except ValueError`` written for tf.distribute keeps working.  Every text says where, what was found, what was
expected, and how to fix it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = [
    "AggregationError",
    "BatchError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointMismatchError",
    "CheckpointMissingError",
    "CheckpointReadError",
    "CheckpointWriteError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ContextError",
    "CopyError",
    "DTypeError",
    "DTypeMismatchError",
    "DatasetWarning",
    "DestinationError",
    "DeviceError",
    "EmptyBatchError",
    "FallbackWarning",
    "ForkedProcessError",
    "InjectedFault",
    "LaunchError",
    "LeafError",
    "MpiStrategyError",
    "NonFiniteError",
    "NonFiniteWarning",
    "OptionError",
    "OptionTypeError",
    "OptionWarning",
    "OutOfRangeError",
    "OutsideStepWarning",
    "PlacementError",
    "RankCall",
    "RankLeftError",
    "ReduceOpError",
    "RemoteError",
    "ReplicasDivergedError",
    "ShapeError",
    "StaleStateWarning",
    "StructureError",
    "TraceError",
    "UnsupportedError",
]


def __dir__() -> list[str]:
    return list(__all__)


@dataclass(frozen=True)
class RankCall:
    """What one rank did when the ranks' calls differed.

    Attributes:
        call: the public name; "" for a rank that has left.
        op: the reduce operation, and further words that distinguish calls of the same name.
        structure: of the values, e.g. ``{'a':*,'b':[*,*]}``.
        dtypes, shapes: of the arrays, in the order of the leaves.
        destination, options: as the ranks compare them.
        name: the argument `name`, or the name of the variable.
        place: the lines of the program that are compared, innermost first; "" with a name.
        site: the line of the call, for people.
        left: why the rank makes no call, e.g. that its program has ended; "" for a rank that makes a call.
    """

    call: str = ""
    op: str = ""
    structure: str = ""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    destination: str = ""
    options: str = ""
    name: str = ""
    place: str = ""
    site: str = ""
    left: str = ""


class MpiStrategyError(Exception):
    """Base of every error that mpistrategy raises on purpose.

    A pickle or a copy has the text and the attributes that are public.

    Attributes:
        where, found, expected, fix: the parts of the text; "" for a text without parts, such as a table.
        rank: the rank whose mistake it is, where the other ranks raise the error because of it; else None.
    """

    where = found = expected = fix = ""
    rank: int | None = None
    # Of an error that several ranks raise: whether another rank prints it whole.
    _is_printed_elsewhere = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Below the text in a traceback, and not in str(error).
        page = next((kind.__name__ for kind in type(self).__mro__ if kind.__name__ in __all__), "errors")
        self.add_note(f"More about it: mpistrategy guide {page}")

    @classmethod
    def at(cls, where: str, *, found: str, expected: str, fix: str = "") -> Self:
        """Build the error from its four parts.

        Args:
            where: the public name that was called, e.g. ``"ReplicaContext.all_reduce"``.
            found: the value or the situation.
            expected: the right value or situation.
            fix: what to write instead; may be empty when `expected` says it.
        """
        text = f"{where}: found {found}; expected {expected}."
        error = cls(f"{text} {fix}" if fix else text)
        error.where, error.found, error.expected, error.fix = where, found, expected, fix
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # Who prints the error means nothing elsewhere.
        return type(self), self.args, {name: value for name, value in vars(self).items() if not name.startswith("_")}


class ContextError(MpiStrategyError, RuntimeError):
    """A method was called in the wrong one of replica, cross-replica and update context.

    Cause: a call in the wrong place: `strategy.reduce` inside a step, `apply_gradients` outside one, a scope inside
    another strategy's, a replica context kept from an earlier step, a strategy after its `close()`, a second thread in
    the same strategy, anything of this library in a function that JAX traces (`mpistrategy guide jax`). Or an object
    made outside `scope()` that would be this rank's own: a metric, an ON_READ variable, a variable with an
    aggregation; a Checkpoint where several strategies are open.
    Cure: move it where the message says. See the table in concepts (`mpistrategy guide concepts`).
    """


class ReduceOpError(MpiStrategyError, ValueError):
    """A reduce operation that does not exist.

    Cause: an operation that does not exist.
    Cure: `"SUM"`, `"MEAN"`, `"MIN"`, `"MAX"` or `"PROD"`, in any letter case.
    """


class OptionError(MpiStrategyError, ValueError):
    """An option or a constructor argument outside its allowed values.

    Cause: an argument, option or environment variable outside its values.
    Cure: the message lists them, and the nearest.
    """


class OptionTypeError(MpiStrategyError, TypeError):
    """An option or an argument of the wrong type.

    Cause: an argument of the wrong type, such as `args=x` in place of `args=(x,)`.
    Cure: as the message says.
    """


class LeafError(MpiStrategyError, ValueError):
    """A leaf of a structure that is not an array and cannot be converted to one (None, an arbitrary object).

    Cause: something in a nest is no array: an object, a masked or sparse array.
    Cure: the message names the leaf. Pass `x.filled(0)` for a masked array, `x.toarray()` for a sparse one. None is
    taken in `all_reduce`, `reduce` and `gather`, if it is None on every rank.
    """


class DTypeError(MpiStrategyError, TypeError):
    """A dtype that the operation does not support (bool and strings in reductions), or that does not fit.

    Cause: a dtype that cannot be reduced (bool, strings, objects, times), complex numbers under MIN or MAX, or indices
    that are no integers.
    Cure: convert, as in `mask.astype(np.int64)`, or reduce `np.abs(x)`.
    """


class DTypeMismatchError(DTypeError, ValueError):
    """An array whose dtype differs from the dtype of its target (a ValueError in TensorFlow).

    Cause: an array was assigned to a variable of another dtype.
    Cure: `x.astype(v.dtype)`.
    """


class ShapeError(MpiStrategyError, ValueError):
    """A shape or an axis that does not fit.

    Cause: an array whose shape is not the shape of the variable, of `out=`, or of earlier gradients; an axis that does
    not exist; a scalar given to `gather`.
    Cure: the message has both shapes. Gather scalars as arrays of one element: `np.atleast_1d(x)`.
    """


class BatchError(ShapeError, IndexError):
    """A global batch that cannot be split among the replicas: scalars, or arrays of different lengths.

    Cause: arrays in one batch have different numbers of rows, or none; a function gave no element on this rank; a
    dataset ended before its `len()`.
    Cure: the first axis is the rows, of every array. Give a rank without data a batch with 0 rows.
    """


class OutOfRangeError(MpiStrategyError, IndexError):
    """An iterator was asked for an element after the last one.

    Cause: `get_next()` after the last element.
    Cure: loop with `for`, or ask `get_next_as_optional().has_value()`.
    """


class StructureError(MpiStrategyError, ValueError):
    """Nested structures that should be equal and are not.

    Cause: two nests that should be equal are not (`out=` and the value, pairs of gradients and variables), or an
    arena's values were replaced: `arena.values["w"] = x`.
    Cure: build both alike; write `arena.values["w"][...] = x`.
    """


class EmptyBatchError(MpiStrategyError, ValueError, IndexError):
    """A reduction of no values at all.

    Cause: a reduction, a step or a check of nothing at all: an empty dict, no gradients.
    Cure: leave the call out on every rank.
    """


class DeviceError(MpiStrategyError, ValueError):
    """A device string that cannot be read, or a device that does not exist.

    Cause: a device string that cannot be read, a GPU that is not there or shared by two ranks, fewer devices than
    ranks on the node, or arrays on another GPU than the rank's.
    Cure: `devices="gpu"` takes the GPUs that exist; `"shared"` lets ranks share; start one rank for each GPU. See
    GPUs (`mpistrategy guide gpus`).
    """


class DestinationError(MpiStrategyError, ValueError):
    """An invalid destination of a reduction or a broadcast.

    Cause: `destinations=` is no device string, list of them, value or variable.
    Cure: pass the value itself (result on every rank), or `"task:0"`.
    """


class PlacementError(MpiStrategyError, RuntimeError):
    """A value was read on a rank that does not have it.

    Cause: a result was read that lives on one rank only, because `destinations="task:0"` or the like asked for that.
    Cure: give a value, a variable or `strategy.devices_by_rank` as destination: then every rank has it.
    """


class AggregationError(MpiStrategyError, ValueError):
    """A variable's aggregation does not allow the operation in this context.

    Cause: a variable's aggregation does not allow this: a write in a step to an ON_WRITE variable with aggregation
    NONE, or a read outside steps of an ON_READ variable with NONE.
    Cure: create it with `aggregation="SUM"`, `"MEAN"` or `"ONLY_FIRST_REPLICA"`. See concepts (`mpistrategy guide
    concepts`).
    """


class UnsupportedError(MpiStrategyError, NotImplementedError):
    """An operation that does not exist for this kind of value.

    Cause: the operation does not exist for this kind of value: `v[0] = 1` or `np.add(..., out=v)` of a variable,
    `scatter_add` of an ON_READ variable, MIN of `IndexedSlices`, CuPy arrays without CuPy.
    Cure: as the message says: `v.assign(...)`, `slices.to_dense()`, an install.
    """


class CopyError(MpiStrategyError, RuntimeError):
    """An object that belongs to this process and its ranks was copied or pickled.

    Cause: a strategy, variable, optimizer, arena or iterator was copied or pickled. They belong to this process and
    its ranks.
    Cure: send `v.read_value()`, save with a `Checkpoint`, or make a new one. `copy.deepcopy(strategy)` works.
    """


class ForkedProcessError(ContextError):
    """A strategy of several ranks was used in a forked child of a rank: it is closed there.

    Cause: a forked child (a data loader's worker, say) used a strategy of its parent.
    Cure: give the child arrays and let it return arrays, or start it with multiprocessing's `spawn`.
    `OneDeviceStrategy` works there.
    """


class LaunchError(MpiStrategyError, RuntimeError):
    """MPI is missing or cannot be started, or the ranks were not started as one job with one program.

    Cause: no MPI can be loaded; launcher and MPI do not match, so that each process believes it is alone; ranks run
    different versions of Python or of this package; or too many strategies are open.
    Cure: type what the message says. `mpistrategy doctor` looks closer. See MPI (`mpistrategy guide mpi`).
    """


class FallbackWarning(UserWarning):
    """A faster method is not available here; the library uses another one with the same results.

    Cause: a faster method is not available (NCCL, a GPU for each rank, NVTX); another one gives the same results.
    Cure: nothing need be done. The message says what is missing; `mpistrategy doctor` shows more.
    """


class OptionWarning(UserWarning):
    """A setting that has no effect, such as a misspelt environment variable, or that takes most of the memory.

    Cause: a setting has no effect (a misspelt `MPISTRATEGY_` variable).
    Cure: spell it as in environment (`mpistrategy guide environment`), take it away, or do what the message says.
    """


class DatasetWarning(UserWarning):
    """The ranks iterate over different global batches, so rows are lost.

    Cause: the ranks iterate over different global batches, so rows are lost: each rank takes its part of *its* batch.
    Cure: give all ranks the same batches (one seed for shuffling), or give each rank's own rows to
    `distribute_datasets_from_function`. See recipes (`mpistrategy guide recipes`).
    """


class OutsideStepWarning(UserWarning):
    """A call outside every step and scope works on this rank alone, although there are other ranks.

    A collective used only this rank's value; a variable, a dataset or a random stream is this rank's own.

    Cause: `get_replica_context().all_reduce(...)` was called outside every step, and used this rank's value alone, as
    in TensorFlow. Or a variable, or a dataset or random stream of `ms.get_strategy()`, was made outside the scope, and
    is this rank's own.
    Cure: call it in the function given to `strategy.run`, or use `strategy.reduce`; make variables in `with
    strategy.scope():`. What is meant for this rank alone is made in `with ms.OneDeviceStrategy().scope():`, which does
    not warn.
    """


class NonFiniteWarning(RuntimeWarning):
    """Reduced gradients contain NaN or infinities, and were applied because the program asked for it.

    Cause: reduced gradients have NaN or infinities, and `nonfinite="warn"` applies them all the same.
    Cure: look at the variable and the ranks that it names; `nonfinite="skip"` leaves such steps out.
    """


class NonFiniteError(MpiStrategyError, FloatingPointError):
    """Reduced gradients contain NaN or infinities.  Raised on every rank; the step has changed nothing.

    Cause: reduced gradients have NaN or infinities, and `nonfinite="raise"` was chosen.
    Cure: lower the learning rate, clip, or look at the data of the ranks named.
    """


class ReplicasDivergedError(MpiStrategyError, RuntimeError):
    """The copies of a mirrored variable differ.  Raised on every rank; the text names variables and ranks.

    Cause: copies of a mirrored variable differ: a random number or an assignment outside a step that differs by rank,
    or broken memory.
    Cure: restore the variables; then find the write with `assert_mirrored()` between parts of the program.

    Attributes:
        variables: the names of all variables that differ.
        ranks: the ranks that differ from the majority in one of them, or from rank 0 where there is none.
    """

    variables: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class CollectiveMismatchError(MpiStrategyError, RuntimeError):
    """The ranks called different collectives, or the same one with values that do not match.

    Raised on every rank before any data moved; the text is a table rank -> call.

    Cause: the ranks called different things, or the same with other dtypes, shapes, structures or options. Typical: a
    branch by rank, an early `break`, a dataset of another length, `result()` of a metric inside `if strategy.rank ==
    0:`.
    Cure: compare the lines of the table in the message. Move the call out of the branch, or give both branches the
    same `name=`. See when ranks disagree (`mpistrategy guide disagreement`).

    Attributes:
        calls: what each rank did, by rank; the same on all ranks.  Where ranks wait for each other in different
            strategies: the calls and the sites that this rank sees.  Empty where the ranks differ in something else
            than a call, such as the rows of their datasets.
        differ: the fields in which the calls differ: "call", "op", "structure", "values" (dtypes and shapes),
            "destination", "options", "name", "place"; or "strategy", where each waits in another one.
    """

    calls: Mapping[int, RankCall] = {}
    differ: tuple[str, ...] = ()


class CheckpointError(MpiStrategyError, RuntimeError):
    """Base: a checkpoint could not be written or read.  Raised on every rank."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is not a checkpoint under this name.

    Cause: nothing under this name.
    Cure: look at the folder; `manager.restore()` returns None in place of raising.
    """


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The name exists already, or another job writes there.  Nothing has changed.

    Cause: the name exists, another job saves into the folder, or a save of another Checkpoint with `wait=False` has
    not ended.
    Cure: use a folder for each job, `overwrite=True`, or `wait()` for the save. Close the other manager of this
    program.
    """


class CheckpointWriteError(CheckpointError, OSError):
    """Writing failed on some rank (a full disk, no permission).  The older checkpoints are unchanged.

    Cause: a full disk, no permission, or a file system that not all nodes share. What was written is removed, at the
    latest by the next save to that place.
    Cure: as the message says; the older checkpoints are unchanged.
    """


class CheckpointReadError(CheckpointError, OSError):
    """Reading failed on some rank, although the files may be good (no permission, no file system).

    Cause: files that cannot be read (permission, a lost file system, no memory), or that another user put into a
    folder that everybody can write to.
    Cure: copy what you trust to a folder of your own.
    """


class CheckpointDamagedError(CheckpointError, ValueError):
    """The checkpoint is incomplete or damaged: no manifest, a wrong size or checksum, another format.

    Cause: a file is missing, cut short or changed, is a symbolic link, or is of another format.
    Cure: restore an older one: `manager.restore()` takes the newest that is whole and names the others in `skipped`.
    """


class CheckpointMismatchError(CheckpointError, ValueError):
    """A good checkpoint does not fit the objects: other names, shapes, dtypes or kinds.  No object has changed.

    The text lists the differences.

    Cause: the checkpoint is good, but holds other names, kinds, shapes or dtypes than the objects.
    Cure: the message lists the differences. Data of each rank restore only on the same number of ranks.
    """


class StaleStateWarning(UserWarning):
    """A checkpoint saved an object again that has not changed, and that the program may have replaced by a new one.

    Cause: a save found an array, a number or a nest of these unchanged since the last save. The program may have made
    a new object, which the checkpoint does not know.
    Cure: give a function, `ms.Checkpoint(state=lambda: state)`; for a constant, too. See checkpoints (`mpistrategy
    guide checkpoints`).
    """


class TraceError(MpiStrategyError, ValueError):
    """There is no readable trace in the given place.

    Cause: no recordings in the folder, or files of another version.
    Cure: record first, with `MPISTRATEGY_TRACE=folder`. See tracing (`mpistrategy guide tracing`).
    """


class InjectedFault(MpiStrategyError, RuntimeError):  # noqa: N818  (no mistake of anybody's)
    """Raised on purpose, as MPISTRATEGY_INJECT asks; the other ranks get no message.

    Cause: `MPISTRATEGY_INJECT` asked for it.
    Cure: leave it out. See how to make a rank fail (`mpistrategy guide disagreement`).
    """


class RemoteError(MpiStrategyError, RuntimeError):
    """Another rank raised an exception in a call that all ranks make together.

    Cause: another rank raised an error in a call that all ranks make together, was interrupted there, or left its
    `with` block by an error; `.rank` and `.error` name it.
    Cure: read that rank's traceback. After "the variables are partly updated", restore them from a checkpoint.

    Attributes:
        rank: which; None where it is not known.
        error: the name and the text of that exception, as ``KeyError: 'x'``; "" where it is not known.
    """

    error = ""


class RankLeftError(RemoteError, CollectiveMismatchError):
    """Another rank has ended its program, and this one calls a collective.  The text is a table rank -> call.

    Cause: a rank has ended its program, and this one still calls a collective. It is a RemoteError and a
    CollectiveMismatchError.
    Cure: give all ranks the same number of steps; look for a `break`, `return` or `sys.exit()` that not all ranks come
    to.
    """


class CollectiveTimeoutError(RemoteError, TimeoutError):
    """A rank of a strategy with ``on_error="raise"`` has waited longer than `timeout_seconds` for the others.

    Elsewhere a late collective ends the job.  Either way a roll call says the same in words.

    Cause: with `on_error="raise"`, a rank waited longer than `timeout_seconds`. `.missing` are the ranks that did not
    come.
    Cure: find out where the missing ranks are; around a long piece of work on one rank, use
    `with strategy.expect_long(seconds):`. See a collective that is late (`mpistrategy guide disagreement`).

    Attributes:
        calls: by the number in the job: as `call` in which call the rank waits and where, in words; or as `left` where
            it is, or why it does not answer.
        missing: the ranks that have not come.
        waited_seconds: by rank, how long it has waited; 0 for a rank that has not come.
    """

    calls: Mapping[int, RankCall] = {}
    missing: tuple[int, ...] = ()
    waited_seconds: Mapping[int, float] = {}
