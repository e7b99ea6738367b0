"""The enumerations and option objects of the public API."""

from __future__ import annotations

import enum
import math
import numbers
import os
from dataclasses import dataclass, fields
from typing import Any

from mpistrategy.errors import OptionError, OptionTypeError, ReduceOpError


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought together.

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
    """How values of several replicas become one.

    SUM and MEAN (the sum divided by the number of replicas) are TensorFlow's; MIN, MAX and PROD are ours.  For MIN and
    MAX -0.0 is less than +0.0, and NaN wins, with the bits of `np.nan`.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    @property
    def on_the_wire(self) -> str:
        """The operation between ranks: a mean travels as a sum."""
        return "SUM" if self is ReduceOp.MEAN else self.value

    @classmethod
    def parse(cls, value: Any, where: str) -> ReduceOp:
        """Return the ReduceOp that `value` names.

        Args:
            value: a ReduceOp, its name in any letter case, or VariableAggregation.SUM / MEAN.
            where: the public name to blame in the error.

        Raises:
            ReduceOpError: for anything else.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        if value is VariableAggregation.SUM:
            return cls.SUM
        if value is VariableAggregation.MEAN:
            return cls.MEAN
        raise ReduceOpError.at(
            where,
            found=f"reduce_op={value!r}",
            expected=f"a ReduceOp or one of the strings {', '.join(cls.__members__)}",
        )


class CommunicationImplementation(enum.Enum):
    """Which transport carries arrays in GPU memory: the best one (AUTO), MPI (RING) or NCCL."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for one collective, or the defaults of a strategy.

    Attributes:
        bytes_per_pack: small values are packed into buffers of at most this many bytes; 0 lets the library choose.
        timeout_seconds: for how long a rank waits in a collective before the job ends, with a roll call that says who
            waits where and who has not come; 0 for no limit.  None means what MPISTRATEGY_TIMEOUT says, else 600.
            Only time in which this rank waits counts; see `Strategy.expect_long`.
        implementation: a `CommunicationImplementation` or its name in any letter case: "NCCL" and "RING" (MPI) say
            what carries arrays in GPU memory, where it can be; "AUTO" leaves it to MPISTRATEGY_GPU_PATH (mpi, staged,
            nccl, ipc), and that to the library.  Arrays on the host go by MPI whatever is asked for.
        wire: "bfloat16" halves what travels between nodes in sums and means of float32 (and of 16-bit floats, which
            are summed in it): each node's contribution is rounded to bfloat16 (unit roundoff u = 2^-8), the
            contributions are added up in float32, and the sum is rounded once.  The result is equal on all ranks and
            differs from the exact one by at most (2 u + u^2) times the sum of the nodes' magnitudes.  Nothing changes
            within a node, for other dtypes and operations, and where one rank alone wants the result.  Needs the
            package ml_dtypes.  None, the default, sends all digits.

    Raises:
        OptionError: for a negative bytes_per_pack, a negative timeout_seconds, an unknown implementation or
            wire.
        OptionTypeError: for a bytes_per_pack or a timeout_seconds that is no number.
    """

    bytes_per_pack: float = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    wire: str | None = None

    def __post_init__(self) -> None:
        where = "CommunicationOptions"
        given: Any = self.bytes_per_pack
        if isinstance(given, bool) or not isinstance(given, numbers.Real):
            raise OptionTypeError.at(where, found=f"bytes_per_pack={self.bytes_per_pack!r}", expected="an int >= 0")
        if not 0 <= self.bytes_per_pack < math.inf:
            raise OptionError.at(where, found=f"bytes_per_pack={self.bytes_per_pack!r}", expected="an int >= 0")
        seconds: Any = self.timeout_seconds
        if seconds is not None:
            if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
                raise OptionTypeError.at(where, found=f"timeout_seconds={seconds!r}", expected="seconds, or None")
            if not float(seconds) >= 0:
                raise OptionError.at(where, found=f"timeout_seconds={seconds!r}", expected="seconds >= 0, or None")
        chosen = self.implementation
        if isinstance(chosen, str) and chosen.upper() in CommunicationImplementation.__members__:
            object.__setattr__(self, "implementation", CommunicationImplementation[chosen.upper()])
        elif not isinstance(chosen, CommunicationImplementation):
            raise OptionError.at(
                where,
                found=f"implementation={chosen!r}",
                expected='"AUTO", "RING", "NCCL" or a CommunicationImplementation',
            )
        if self.wire not in (None, "bfloat16"):
            raise OptionError.at(where, found=f"wire={self.wire!r}", expected='None or "bfloat16"')

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options with every field that `options` sets to something else than the default."""
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise OptionTypeError.at("options", found=f"options={options!r}", expected="a CommunicationOptions or None")
        default = CommunicationOptions()
        chosen = {
            field.name: getattr(
                options if getattr(options, field.name) != getattr(default, field.name) else self, field.name
            )
            for field in fields(self)
        }
        return CommunicationOptions(**chosen)


#: Names the path of arrays in GPU memory for all strategies: a hint, which yields where it cannot be.
GPU_PATH = "MPISTRATEGY_GPU_PATH"
_PATH_WORDS = ("auto", "mpi", "staged", "nccl", "ipc")
_BY_IMPLEMENTATION = {CommunicationImplementation.RING: "ring", CommunicationImplementation.NCCL: "nccl"}


def path_word(options: CommunicationOptions, chosen: str = "") -> str:
    """Return the path that is asked for, for arrays in GPU memory.

    Args:
        options: whose `implementation` asks for "ring" (what MPI carries: "mpi" or "staged") or "nccl".
        chosen: what the algorithm asks for, which comes first; "" for one that does not.

    Returns:
        That, or what the variable MPISTRATEGY_GPU_PATH says: "auto", "mpi", "staged", "nccl" or "ipc".

    Raises:
        OptionError: for another word in the variable.
    """
    implementation: Any = options.implementation
    word = chosen or _BY_IMPLEMENTATION.get(implementation) or os.environ.get(GPU_PATH, "").lower() or "auto"
    if word not in (*_PATH_WORDS, *_BY_IMPLEMENTATION.values()):
        raise OptionError.at(GPU_PATH, found=repr(word), expected=" or ".join(map(repr, _PATH_WORDS)))
    return word
