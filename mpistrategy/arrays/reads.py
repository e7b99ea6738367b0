"""When the memory of other libraries' arrays on a GPU has been read.

Such a library knows nothing of CuPy's current stream.  It may write the memory of an array, or use it for another one,
as soon as the call that was given the array has returned.  So the call waits until the memory has been read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import as_device_array
from mpistrategy.arrays.foreign import is_in_gpu_memory, library_of
from mpistrategy.arrays.gpu import cupy_for, is_cupy
from mpistrategy.arrays.values import IndexedSlices


def event_of_reads(given: Iterable[Any]) -> Any:
    """Return an event behind what is on CuPy's current stream; None unless some arrays are other libraries'.

    Args:
        given: the arrays, and IndexedSlices, that the work on the stream reads.
    """
    parts = [part for each in given for part in _parts(each)]
    found = next(filter(_has_other_streams, parts), None)
    if found is None:
        return None
    cupy = cupy_for("arrays in GPU memory")
    with as_device_array(found, "an array in GPU memory").device:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream())
    return event


def _parts(value: Any) -> tuple[Any, ...]:
    return (value.values, value.indices) if isinstance(value, IndexedSlices) else (value,)


def _has_other_streams(value: Any) -> bool:
    """Return whether the library of an array in GPU memory works on another stream than CuPy's current one."""
    if type(value) is np.ndarray or is_cupy(value) or not is_in_gpu_memory(value):
        return False
    if library_of(value) != "torch":
        return True
    try:
        stream = sys.modules["torch"].cuda.current_stream().cuda_stream
    except AttributeError:  # a torch without CUDA
        return True
    return bool(stream != cupy_for("an array in GPU memory").cuda.get_current_stream().ptr)
