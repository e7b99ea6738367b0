"""The MPI operations for our names; our own where MPI's differ from NumPy's, or depend on the order of ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays.dtypes import COMBINE


@cache
def operation(op: str, dtype: np.dtype[Any]) -> MPI.Op:
    """Return MPI's operation, or one of our own, for host memory; see `is_own`."""
    if not is_own(op, dtype):
        known: MPI.Op = getattr(MPI, op)
        return known
    combine = COMBINE[op]

    def combined(these: Any, those: Any, datatype: MPI.Datatype) -> None:
        target = np.frombuffer(those, dtype)
        with np.errstate(all="ignore"):
            combine(np.frombuffer(these, dtype), target, out=target)

    return MPI.Op.Create(combined, commute=True)


def is_own(op: str, dtype: np.dtype[Any]) -> bool:
    """Return whether `operation` is our own.

    MPI's MIN and MAX of floats may lose a NaN, and take either of 0.0 and -0.0; ours are commutative in every bit.
    Open MPI 5 saturates sums of integers of 8 and 16 bits where the processor has AVX; ours wrap around.
    """
    if op in ("MIN", "MAX"):
        return dtype.kind == "f"
    return dtype.kind in "iu" and dtype.itemsize < 4
