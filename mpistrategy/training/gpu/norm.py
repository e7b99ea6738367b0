"""The norm of many arrays in GPU memory, and which of them are not finite, without waiting for either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.training.gpu import launching
from mpistrategy.training.gpu import norm_kernel as on_gpu
from mpistrategy.training.gpu.update_kernel import TYPES

_INSTEAD = "norms of arrays in GPU memory are computed one by one"
#: The norm and the scale, before one byte for each array.
_HEAD_BYTES = 16


@dataclass(frozen=True)
class Norm:
    """What is known of arrays once the current stream has come to it.

    Attributes:
        told: in GPU memory: the norm, the scale, and for each array whether it is not finite.
        order: which array each of the latter belongs to.
    """

    told: DeviceArray
    order: Array

    @property
    def scale(self) -> DeviceArray:
        """What the arrays are to be multiplied by; a number of float64 in GPU memory."""
        return self.told[8:_HEAD_BYTES].view(np.float64)

    def read(self) -> tuple[float, int | None]:
        """Wait; return the norm, and the first array that is not finite."""
        told = self.told.get()
        broken = self.order[np.flatnonzero(told[_HEAD_BYTES:])]
        return float(told[:8].view(np.float64)[0]), int(broken.min()) if broken.size else None


def norm_of(arrays: Sequence[Any], most: float = np.inf) -> Norm | None:
    """Put the computation on the current stream; None for arrays that are not floats in GPU memory.

    Args:
        arrays: on one GPU.
        most: the scale makes the norm at most this.
    """
    if not arrays or not all(is_on_device(each) and each.dtype.name in TYPES for each in arrays):
        return None
    cupy = cupy_for("a norm in GPU memory")
    with arrays[0].device:
        dtypes = sorted({each.dtype for each in arrays}, key=str)
        functions = [
            launching.compiled(cupy, on_gpu.squares_source(d), on_gpu.squares_name(d), on_gpu.OPTIONS, _INSTEAD)
            for d in dtypes
        ]
        last = launching.compiled(cupy, on_gpu.sum_source(), on_gpu.SUM_NAME, on_gpu.OPTIONS, _INSTEAD)
        if last is None or None in functions:
            return None
        order: list[int] = []
        calls: list[tuple[Any, launching.Launch, Array]] = []
        held: list[Any] = []  # copies are kept until all launches are on the stream
        for dtype, function in zip(dtypes, functions, strict=True):
            numbers = [number for number, each in enumerate(arrays) if each.dtype == dtype]
            chosen = [
                arrays[number] if arrays[number].flags.c_contiguous else arrays[number].copy() for number in numbers
            ]
            held += chosen
            sizes = [each.size for each in chosen]
            shape = (dtype.itemsize, on_gpu.TABLE, on_gpu.ARRAYS, on_gpu.BLOCK_ELEMENTS)
            rows = launching.addresses(chosen)[None]
            for launch in launching.launches(sizes, *shape):
                calls.append((function, launch, launch.filled(rows)))
                order += [numbers[index] for index in launch.arrays]
        blocks = sum(launch.blocks for _, launch, _ in calls)
        sums = cupy.empty((max(1, blocks), 2), np.float64)
        first = entry = 0
        told = cupy.zeros(_HEAD_BYTES + len(order), np.uint8)
        for function, launch, table in calls:
            places = (np.uint64(sums.data.ptr + 16 * first), np.uint64(told.data.ptr + _HEAD_BYTES + entry))
            function((launch.blocks,), (on_gpu.THREADS,), (table, np.int32(launch.count), *places))
            first, entry = first + launch.blocks, entry + launch.count
        last((1,), (on_gpu.THREADS,), (sums, np.uint32(blocks), np.float64(most), told))
    return Norm(told, np.array(order, np.int64))
