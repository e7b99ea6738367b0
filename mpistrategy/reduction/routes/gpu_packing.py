"""Arrays in GPU memory become one buffer, by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray
from mpistrategy.reduction.layout.packing import Pack
from mpistrategy.reduction.routes.copy_kernel import AS_IT_IS
from mpistrategy.reduction.routes.gpu_copy import Move, kind_of, move_to


def fill(pack: Pack, arrays: Sequence[DeviceArray], bucket: DeviceArray) -> None:
    """Copy the arrays of a pack into `bucket`, converted to its dtype, on the current stream of the current device."""
    chosen = pack.chosen(arrays)
    before, after = (pack.dtype.itemsize,) * 2
    moves: list[Move] = []
    for array, each in zip(chosen, pack.slices, strict=True):
        if pack.converts:
            kind, before = _known(array.dtype, pack.dtype), array.dtype.itemsize
        else:
            kind = AS_IT_IS
        moves.append((kind, each.stop - each.start, before, after))
    pointers = pack.starts * np.uint64(after) + np.uint64(bucket.data.ptr)
    if not move_to(chosen, moves, pointers):
        for array, each in zip(chosen, pack.slices, strict=True):
            bucket[each] = array.ravel()


def _known(source: np.dtype[Any], target: np.dtype[Any]) -> int:
    kind = kind_of(source, target)
    assert kind is not None, f"{source} travels as {target}"
    return kind
