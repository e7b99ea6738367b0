"""MPI's operations for ours: where MPI's own may lose a NaN, one that keeps it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrategy.arrays import COMBINE


@cache
def operation(op: str, dtype: np.dtype[Any]) -> MPI.Op:
    """Return MPI's operation; for MIN and MAX of floats one of our own, since MPI's may lose a NaN."""
    if op not in ("MIN", "MAX") or dtype.kind != "f":
        known: MPI.Op = getattr(MPI, op)
        return known
    combine = COMBINE[op]

    def keep_nan(these: Any, those: Any, datatype: MPI.Datatype) -> None:
        target = np.frombuffer(those, dtype)
        combine(np.frombuffer(these, dtype), target, out=target)

    return MPI.Op.Create(keep_nan, commute=True)
