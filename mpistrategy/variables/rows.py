"""Rows written into a variable in GPU memory: in the order of the rows, with NumPy's bits, and on the GPU.

Atomic additions would give other bits on each rank.  So rows are written in rounds: each takes one row of every index,
the first in the first round, and writes no row of the variable twice.  Which they are, the host finds out of the
indices, which it has checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import placed_as
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray

#: Where a row is named more often, so many launches would take longer than the way through the host.
MOST_ROUNDS = 64


def rounds_of(indices: Array, method: str) -> list[Array] | None:
    """Return the rows of each round, as positions in `indices`; None where there would be too many rounds."""
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: ordered.size])
    counts = np.diff(np.r_[starts, ordered.size])
    if method == "scatter_update":
        return [order[starts + counts - 1]]
    most = int(counts.max(initial=0))
    if most > MOST_ROUNDS:
        return None
    return [np.sort(order[starts[counts > number] + number]) for number in range(most)]


def write(storage: DeviceArray, indices: Array, values: Array, method: str) -> bool:
    """Write rows, on the current stream and device; return False, and nothing has been done, for too many rounds."""
    rounds = rounds_of(indices, method)
    if rounds is None:
        return False
    rows = placed_as(values, storage)
    combine: Callable[[Any, Any], Any] = {
        "scatter_add": np.add,
        "scatter_sub": np.subtract,
        "scatter_max": np.maximum,
    }.get(method, lambda _, row: row)
    for positions in rounds:
        where, mine = (placed_as(each.astype(np.int64), storage) for each in (indices[positions], positions))
        storage[where] = combine(storage[where], rows[mine])
    return True
