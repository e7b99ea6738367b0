"""MIN and MAX of floats as MIN and MAX of integers, for libraries whose MIN and MAX of floats may lose a NaN.

The bits of a float become a signed integer of the same order: -0.0 is less than +0.0, and a NaN is the greatest number
for MAX and the least for MIN.  Converted back, the result has the bits of `mpistrategy.arrays.dtypes.Extreme`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray

#: By the size of a float: the integers, and the bits of infinity and of NaN.
_BITS: dict[int, tuple[np.dtype[Any], int, int]] = {
    4: (np.dtype(np.int32), 0x7F800000, 0x7FC00000),
    8: (np.dtype(np.int64), 0x7FF0000000000000, 0x7FF8000000000000),
}
#: `most` is the greatest integer: all bits but the sign.
_TO_KEYS = "keys = (bits & most) > infinity ? nan : bits < 0 ? bits ^ most : bits"
_TO_FLOATS = "const T ordered = keys < 0 ? keys ^ most : keys; bits = (ordered & most) > infinity ? nan : ordered"


@contextmanager
def in_order(cupy: Any, buffer: DeviceArray, op: str) -> Iterator[DeviceArray]:
    """Yield the array to combine for a contiguous buffer: its keys, which become floats again, or the buffer itself."""
    if op not in ("MIN", "MAX") or buffer.dtype.kind != "f" or buffer.itemsize not in _BITS:
        yield buffer
        return
    dtype, infinity, nan = _BITS[buffer.itemsize]
    keys, limits = buffer.view(dtype), np.iinfo(dtype)
    to_keys, to_floats = kernels_for(cupy)
    to_keys(keys, limits.max, infinity, limits.min if op == "MIN" else limits.max, keys)
    yield keys
    to_floats(keys, limits.max, infinity, nan, keys)


@lru_cache(maxsize=1)
def kernels_for(cupy: Any) -> tuple[Any, Any]:
    """Return the kernels; to be called before the ranks agree, since it may fail.

    They are compiled for all floats here; for arrays of 2 GiB and more CuPy compiles them at the first such array.
    """
    to_keys = cupy.ElementwiseKernel("T bits, T most, T infinity, T nan", "T keys", _TO_KEYS, "keys_of_floats")
    to_floats = cupy.ElementwiseKernel("T keys, T most, T infinity, T nan", "T bits", _TO_FLOATS, "floats_of_keys")
    for dtype, *_ in _BITS.values():
        number = cupy.zeros(1, dtype)
        to_floats(to_keys(number, 1, 0, 0), 1, 0, 0)
    return to_keys, to_floats
