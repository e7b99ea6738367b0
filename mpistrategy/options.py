"""The enumerations and option objects of the public API."""

from __future__ import annotations

import enum
import math
import os
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from mpistrategy.errors import OptionError, ReduceOpError
from mpistrategy.objects.settings import checked_count, checked_number, checked_type
from mpistrategy.objects.shown import did_you_mean

E = TypeVar("E", bound=enum.Enum)


def member_of(kind: type[E], value: Any) -> E | None:
    """Return the member of an enumeration that `value` is or names, in any letter case; None for anything else."""
    if isinstance(value, kind):
        return value
    return kind.__members__.get(value.upper()) if isinstance(value, str) else None


def checked_member(kind: type[E], value: Any, where: str, argument: str) -> E:
    """Return `member_of(kind, value)`; raise OptionError, which names the argument, where there is none."""
    member = member_of(kind, value)
    if member is None:
        raise OptionError.at(
            where,
            found=f"{argument}={value!r}",
            expected=f"one of {kind.__name__}: {', '.join(kind.__members__)}",
            fix=did_you_mean(value, kind.__members__),
        )
    return member


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are combined.

    AUTO lets the strategy choose (ON_WRITE); NONE makes no distributed variable and is refused in a scope of
    several replicas; ON_WRITE keeps the copies equal at every write; ON_READ lets them differ and combines them
    when they are read in cross-replica context.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the replicas' values of a variable are combined."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class ReduceOp(enum.Enum):
    """How the values of several replicas are combined.

    TensorFlow has SUM and MEAN (the sum divided by the number of replicas); MIN, MAX and PROD are additions.  For MIN
    and MAX, -0.0 is less than +0.0, and NaN wins, with the bits of `np.nan`.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    @property
    def _on_the_wire(self) -> str:
        """The operation between ranks: a mean is sent as a sum."""
        return "SUM" if self is ReduceOp.MEAN else self.value

    def _divisor(self, dtype: np.dtype[Any], count: int) -> int:
        """Return the divisor of a sum of `count` values in its dtype on the wire; means of integers differ."""
        return count if self is ReduceOp.MEAN and dtype.kind not in "iu" else 1

    @classmethod
    def _parse(cls, value: Any, where: str) -> ReduceOp:
        """Return the ReduceOp that `value` names.

        Args:
            value: a ReduceOp, its name in any letter case, or VariableAggregation.SUM / MEAN.
            where: the public name that the error names.

        Raises:
            ReduceOpError: for anything else.
        """
        member = member_of(cls, value.name if isinstance(value, VariableAggregation) else value)
        if member is not None:
            return member
        others = "For MPI's other operations call mpi4py: see `mpistrategy guide horovod`."
        raise ReduceOpError.at(
            where,
            found=f"reduce_op={value!r}",
            expected=f"a ReduceOp or one of the strings {', '.join(map(repr, cls.__members__))}",
            fix=f"{did_you_mean(value, cls.__members__)} {others}",
        )


#: A mean, as an argument; see `Op`.
Mean: TypeAlias = Literal[ReduceOp.MEAN, VariableAggregation.MEAN, "MEAN", "mean", "Mean"]
#: A reduce operation, as an argument: a ReduceOp or its name.  Other mixtures of letter case work, too.
Op: TypeAlias = (
    Mean
    | Literal[ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD, VariableAggregation.SUM]
    | Literal["SUM", "MIN", "MAX", "PROD", "sum", "min", "max", "prod", "Sum", "Min", "Max", "Prod"]
    | ReduceOp
)
#: A sum or a mean, as the argument `aggregation` of optimizers.
SumOrMean: TypeAlias = Mean | Literal[ReduceOp.SUM, VariableAggregation.SUM, "SUM", "sum", "Sum"]
#: Arguments of `Variable`.
Aggregation: TypeAlias = (
    VariableAggregation
    | Literal["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA", "none", "sum", "mean", "only_first_replica"]
)
Synchronization: TypeAlias = (
    VariableSynchronization | Literal["AUTO", "NONE", "ON_WRITE", "ON_READ", "auto", "none", "on_write", "on_read"]
)
#: Arguments of `MirroredStrategy`, and of optimizers.
CheckLevel: TypeAlias = Literal["always", "off", "ALWAYS", "OFF"]
OnError: TypeAlias = Literal["abort", "raise", "ABORT", "RAISE"]
NonFinite: TypeAlias = Literal["raise", "skip", "warn", "RAISE", "SKIP", "WARN"]


class InputReplicationMode(enum.Enum):
    """How often a function that makes input is called: once a worker, or once a replica.

    Here a worker is a rank with one replica, so the two are the same.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


#: The same as an argument.
ReplicationMode: TypeAlias = InputReplicationMode | Literal["PER_WORKER", "PER_REPLICA", "per_worker", "per_replica"]


class CommunicationImplementation(enum.Enum):
    """The transport of arrays in GPU memory: the best one (AUTO), MPI (RING) or NCCL."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


#: Arguments of `CommunicationOptions`.
Implementation: TypeAlias = CommunicationImplementation | Literal["AUTO", "RING", "NCCL", "auto", "ring", "nccl"]
Wire: TypeAlias = Literal["bfloat16", "BFLOAT16", "float16", "FLOAT16"]
WIRES = ("bfloat16", "float16")


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for one collective, or the defaults of a strategy.

    Attributes:
        bytes_per_pack: small values are packed into buffers of at most this many bytes; 0 lets the library choose.
        timeout_seconds: how long a rank waits in a collective before the job ends, with a roll call of the ranks: who
            waits where, and who is missing.  0 for no limit; None for MPISTRATEGY_TIMEOUT_SECONDS, else 600.  Only time
            in which this rank waits counts; see `Strategy.expect_long`.
        implementation: a `CommunicationImplementation` or its name in any letter case.  "NCCL" and "RING" (MPI) choose
            the transport of arrays in GPU memory, where it is available.  "AUTO" uses MPISTRATEGY_GPU_PATH (mpi,
            staged, nccl), or lets the library choose.  The first call with such arrays decides for the strategy.
            Arrays on the host always use MPI.
        wire: "bfloat16" halves the bytes between nodes in sums and means of float32 (and of 16-bit floats, which are
            summed in float32).  Each node's contribution is rounded to bfloat16 (unit roundoff u = 2^-8), the
            contributions are added in float32, and the sum is rounded once.  The result is equal on all ranks, and
            differs from the exact one by at most (2 u + u^2) times the sum of the nodes' magnitudes.  Nothing changes
            within a node, for other dtypes and operations, and where only one rank gets the result.  Needs the package
            ml_dtypes.  By NCCL, all of N ranks' contributions travel so, and each sum of two is rounded: the result
            differs by at most ((1 + u)^N - 1) times the sum of the ranks' magnitudes, about N u.  "float16" does the
            same by NCCL alone, with u = 2^-11; sums of 65520 or more become infinite, and sums below 2^-14 err by
            up to 2^-25 for each rounding.  Elsewhere it sends all digits, as None, the default, does everywhere.

    Raises:
        OptionError: for a negative bytes_per_pack, a negative timeout_seconds, an unknown implementation or
            wire.
        OptionTypeError: for a bytes_per_pack that is not an int, or a timeout_seconds that is not a number.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: Implementation = CommunicationImplementation.AUTO
    wire: Wire | None = None

    def __post_init__(self) -> None:
        where, wire = "CommunicationOptions", cast("Any", self.wire)
        if self.timeout_seconds not in (None, math.inf):
            checked_number(where, "timeout_seconds", self.timeout_seconds, "seconds >= 0, or None")
        if wire is not None and not (isinstance(wire, str) and wire.lower() in WIRES):
            raise OptionError.at(where, found=f"wire={wire!r}", expected='None, "bfloat16" or "float16"')
        vars(self).update(
            bytes_per_pack=checked_count(where, "bytes_per_pack", self.bytes_per_pack, least=0),
            implementation=checked_member(CommunicationImplementation, self.implementation, where, "implementation"),
            wire=wire and wire.lower(),
        )

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options with the fields of `options` that differ from the defaults."""
        if options is None:
            return self
        checked_type("options", "options", options, CommunicationOptions, "a CommunicationOptions or None")
        chosen = {
            field.name: value for field in fields(options) if (value := getattr(options, field.name)) != field.default
        }
        return replace(self, **chosen)


#: Chooses the transport of arrays in GPU memory for all strategies, where it is available.
GPU_PATH = "MPISTRATEGY_GPU_PATH"
_PATH_WORDS = ("auto", "mpi", "staged", "nccl")
_BY_IMPLEMENTATION = {CommunicationImplementation.RING: "ring", CommunicationImplementation.NCCL: "nccl"}


def path_word(options: CommunicationOptions, chosen: str = "") -> str:
    """Return the transport that is requested for arrays in GPU memory.

    Args:
        options: options whose `implementation` may request "ring" (MPI: "mpi" or "staged") or "nccl".
        chosen: the request of the algorithm, which comes first; "" for none.

    Returns:
        The request, or the value of MPISTRATEGY_GPU_PATH: "auto", "mpi", "staged" or "nccl".

    Raises:
        OptionError: for another value of the variable.
    """
    implementation: Any = options.implementation
    word = chosen or _BY_IMPLEMENTATION.get(implementation) or os.environ.get(GPU_PATH, "").lower() or "auto"
    if word not in (*_PATH_WORDS, *_BY_IMPLEMENTATION.values()):
        raise OptionError.at(GPU_PATH, found=repr(word), expected=" or ".join(map(repr, _PATH_WORDS)))
    return word


#: The words for no and for yes in a variable of the environment, in any letter case.
NO_WORDS, YES_WORDS = ("0", "off", "false", "no"), ("1", "on", "true", "yes")
YES_OR_NO = "1, on, true or yes; or 0, off, false or no"


def is_on(text: str) -> bool:
    """Return whether a variable of the environment with this text switches something on: "" and `NO_WORDS` do not."""
    return text.lower() not in ("", *NO_WORDS)
