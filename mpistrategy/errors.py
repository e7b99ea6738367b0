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
        op: the reduce operation, and what else tells calls of one name apart.
        structure: of the values, e.g. ``{'a':*,'b':[*,*]}``.
        dtypes, shapes: of the arrays, in the order of the leaves.
        destination, options: as the ranks compare them.
        name: the argument `name`, or that of the variable.
        place: the lines of the program that are compared, innermost first; "" with a name.
        site: the line of the call, for people.
        left: why the rank makes no call, e.g. that its program has ended; "" for one that makes a call.
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
        where, found, expected, fix: the parts of the text; "" where it was not built of parts, as a table is not.
        rank: the rank whose mistake it is, where the other ranks raise the error because of it; else None.
    """

    where = found = expected = fix = ""
    rank: int | None = None
    # Of an error that several ranks raise: whether another rank prints it whole, and whether others have other errors.
    _is_printed_elsewhere = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Below the text in a traceback, and not in str(error).
        named = next((kind.__name__ for kind in type(self).__mro__ if kind.__name__ in __all__), "errors")
        self.add_note(f"More about it: mpistrategy guide {named}")

    @classmethod
    def at(cls, where: str, *, found: str, expected: str, fix: str = "") -> Self:
        """Build the error from its four parts.

        Args:
            where: the public name that was called, e.g. ``"ReplicaContext.all_reduce"``.
            found: what was given.
            expected: what would have been right.
            fix: what to write instead; may be empty when `expected` says it.
        """
        text = f"{where}: found {found}; expected {expected}."
        error = cls(f"{text} {fix}" if fix else text)
        error.where, error.found, error.expected, error.fix = where, found, expected, fix
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # Who prints the error means nothing elsewhere.
        return type(self), self.args, {name: kept for name, kept in vars(self).items() if not name.startswith("_")}


class ContextError(MpiStrategyError, RuntimeError):
    """A method was called in the wrong one of replica, cross-replica and update context."""


class ReduceOpError(MpiStrategyError, ValueError):
    """A reduce operation that does not exist."""


class OptionError(MpiStrategyError, ValueError):
    """An option or a constructor argument outside its allowed values."""


class OptionTypeError(MpiStrategyError, TypeError):
    """An option or an argument of the wrong type."""


class LeafError(MpiStrategyError, ValueError):
    """A leaf of a structure that is not an array and cannot be converted to one (None, an arbitrary object)."""


class DTypeError(MpiStrategyError, TypeError):
    """A dtype that the operation does not support (bool and strings in reductions), or that does not fit."""


class DTypeMismatchError(DTypeError, ValueError):
    """An array whose dtype differs from that of its target (a ValueError in TensorFlow)."""


class ShapeError(MpiStrategyError, ValueError):
    """A shape or an axis that does not fit."""


class BatchError(ShapeError, IndexError):
    """A global batch that cannot be split among the replicas: scalars, or arrays of different lengths."""


class OutOfRangeError(MpiStrategyError, IndexError):
    """An iterator was asked for an element after the last one."""


class StructureError(MpiStrategyError, ValueError):
    """Nested structures that should be equal and are not."""


class EmptyBatchError(MpiStrategyError, ValueError, IndexError):
    """A reduction of no values at all."""


class DeviceError(MpiStrategyError, ValueError):
    """A device string that cannot be read, or a device that does not exist."""


class DestinationError(MpiStrategyError, ValueError):
    """An invalid destination of a reduction or a broadcast."""


class PlacementError(MpiStrategyError, RuntimeError):
    """A value was read on a rank that does not have it."""


class AggregationError(MpiStrategyError, ValueError):
    """A variable's aggregation does not allow the operation in this context."""


class UnsupportedError(MpiStrategyError, NotImplementedError):
    """An operation that does not exist for this kind of value."""


class CopyError(MpiStrategyError, RuntimeError):
    """An object that belongs to this process and its ranks was copied or pickled."""


class ForkedProcessError(ContextError):
    """A strategy of several ranks was used in a forked child of a rank: it is closed there."""


class LaunchError(MpiStrategyError, RuntimeError):
    """MPI is missing or cannot be started, or the ranks were not started as one job with one program."""


class FallbackWarning(UserWarning):
    """A faster method is not available here; the library uses another one with the same results."""


class OptionWarning(UserWarning):
    """A setting that has no effect, such as a misspelt environment variable, or that takes most of the memory."""


class DatasetWarning(UserWarning):
    """The ranks iterate over different global batches, so rows are lost."""


class OutsideStepWarning(UserWarning):
    """A call outside every step and scope works on this rank alone, although there are other ranks.

    A collective used only this rank's value; a variable, a dataset or a random stream is this rank's own.
    """


class NonFiniteWarning(RuntimeWarning):
    """Reduced gradients contain NaN or infinities, and were applied because the program asked for it."""


class NonFiniteError(MpiStrategyError, FloatingPointError):
    """Reduced gradients contain NaN or infinities.  Raised on every rank; the step has changed nothing."""


class ReplicasDivergedError(MpiStrategyError, RuntimeError):
    """The copies of a mirrored variable differ.  Raised on every rank; the text names variables and ranks.

    Attributes:
        variables: the names of all variables that differ.
        ranks: the ranks that differ from the majority in one of them, or from rank 0 where there is none.
    """

    variables: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class CollectiveMismatchError(MpiStrategyError, RuntimeError):
    """The ranks called different collectives, or the same one with values that do not match.

    Raised on every rank before any data moved; the text is a table rank -> call.

    Attributes:
        calls: what each rank did, by rank; the same on all ranks.  Where ranks wait for each other in different
            strategies: the call and the site of those that this rank sees.  Empty where the ranks differ in something
            else than a call, such as the rows of their datasets.
        differ: the fields in which the calls differ: "call", "op", "structure", "values" (dtypes and shapes),
            "destination", "options", "name", "place"; or "strategy", where each waits in another one.
    """

    calls: Mapping[int, RankCall] = {}
    differ: tuple[str, ...] = ()


class CheckpointError(MpiStrategyError, RuntimeError):
    """Base: a checkpoint could not be written or read.  Raised on every rank."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is not a checkpoint under this name."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The name exists already, or another job writes there.  Nothing has changed."""


class CheckpointWriteError(CheckpointError, OSError):
    """Writing failed on some rank (a full disk, no permission).  Old files are unchanged; a note names what is left."""


class CheckpointReadError(CheckpointError, OSError):
    """Reading failed on some rank, although the files may be good (no permission, no file system)."""


class CheckpointDamagedError(CheckpointError, ValueError):
    """The checkpoint is incomplete or damaged: no manifest, a wrong size or checksum, another format."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A good checkpoint does not fit the objects: other names, shapes, dtypes or kinds.  No object has changed.

    The text lists the differences.
    """


class StaleStateWarning(UserWarning):
    """A checkpoint saved an object again that has not changed, and that the program may have replaced by a new one."""


class TraceError(MpiStrategyError, ValueError):
    """There is no readable trace in the given place."""


class InjectedFault(MpiStrategyError, RuntimeError):  # noqa: N818  (no mistake of anybody's)
    """Raised on purpose, as MPISTRATEGY_INJECT asks; the other ranks are not told."""


class RemoteError(MpiStrategyError, RuntimeError):
    """Another rank raised an exception in a call that all ranks make together.

    Attributes:
        rank: which; None where it is not known.
        error: the name and the text of that exception, as ``KeyError: 'x'``; "" where it is not known.
    """

    error = ""


class RankLeftError(RemoteError, CollectiveMismatchError):
    """Another rank has ended its program, and this one calls a collective.  The text is a table rank -> call."""


class CollectiveTimeoutError(RemoteError, TimeoutError):
    """A rank of a strategy with ``on_error="raise"`` has waited longer than `timeout_seconds` for the others.

    Elsewhere a late collective ends the job.  Either way a roll call says the same in words.

    Attributes:
        calls: by the number in the job, what is known of each rank: the call that it waits in, its operation and its
            site; or with `left` where it is, and why it does not answer.
        missing: the ranks that have not come.
        waited_seconds: by rank, how long it has waited; 0 for one that has not come.
    """

    calls: Mapping[int, RankCall] = {}
    missing: tuple[int, ...] = ()
    waited_seconds: Mapping[int, float] = {}
