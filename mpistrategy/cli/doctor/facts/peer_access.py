"""Which GPUs of a node cannot read each other's memory, as NVIDIA's driver says."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any


def missing(count: int, library: Any = None) -> tuple[tuple[int, int], ...]:
    """Return the pairs without access, among the GPUs that this process sees; none where the driver does not tell.

    Args:
        count: how many it sees.
        library: the loaded driver; None loads it.
    """
    if library is None:
        with suppress(OSError):
            library = ctypes.CDLL("libcuda.so.1")
    if library is None or library.cuInit(0) or not hasattr(library, "cuDeviceCanAccessPeer"):
        return ()
    pairs = []
    for one in range(count):
        for other in range(one + 1, count):
            both = ctypes.c_int(1)
            if library.cuDeviceCanAccessPeer(ctypes.byref(both), one, other) == 0 and not both.value:
                pairs.append((one, other))
    return tuple(pairs)
