"""The recorded cases with arrays in GPU memory, where CONFORMANCE_GPU=cupy says so."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

MODE = os.environ.get("CONFORMANCE_GPU", "")
#: What these cases show has the names of CPUs in it.
_OF_CPUS = (
    "cross_device_ops/broadcast_tensor_to_short_device",
    "cross_device_ops/reduce_short_device_mean",
    "cross_device_ops/reduce_short_device_sum",
    "cross_device_ops/reduce_to_device_1_sum",
    "cross_device_ops/result_devices",
    "extended/context_batch_reduce_to",
    "extended/context_non_slot_devices",
    "extended/context_reduce_to",
    "extended/reduce_to_inside_update_fn",
    "extended/reduce_to_destination_short_device",
    "strategy/devices",
)


def place(array: Any) -> Any:
    """Return an array where the cases work: numbers in GPU memory, if they are to be there."""
    if not MODE or not isinstance(array, np.ndarray) or array.dtype.kind not in "fiuc":
        return array
    import cupy

    return cupy.asarray(array)


def is_left_out(case_id: str) -> bool:
    """Return whether a case cannot be replayed on GPUs; the default strategy is one of a CPU."""
    name, _, kind = case_id.partition("@")
    return bool(MODE) and (name in _OF_CPUS or kind == "def")


def devices(usual: Any, gpus: str = "shared") -> Any:
    """Return what a strategy of these cases is made with: GPUs, which ranks may share, or what is usual."""
    return gpus if MODE else usual
