"""The MPI operations for our names; our own where MPI's differ from NumPy's, or depend on the order of ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays.dtypes import COMBINE


@cache
def operation(op: str, dtype: np.dtype[Any]) -> MPI.Op:
    """Return MPI's operation for host memory, or one of our own.

    MPI's MIN and MAX of floats may lose a NaN, and take either of 0.0 and -0.0; ours are commutative in every bit.
    Open MPI 5 saturates sums of integers of 8 and 16 bits where the processor has AVX; ours wrap around.
    """
    combine = COMBINE[op]
    if dtype.kind != "f" if op in ("MIN", "MAX") else dtype.kind not in "iu" or dtype.itemsize >= 4:
        return {"SUM": MPI.SUM, "PROD": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}[op]

    def combined(these: Any, those: Any, datatype: MPI.Datatype) -> None:
        target = np.frombuffer(those, dtype)
        with np.errstate(all="ignore"):
            combine(np.frombuffer(these, dtype), target, out=target)

    return MPI.Op.Create(combined, commute=True)
