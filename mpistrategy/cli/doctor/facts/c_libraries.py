"""Facts from C libraries: threads of linear algebra, and which GPUs can read each other."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_ASK = {
    "openblas": [
        f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "", "_64")
    ],
    "mkl_rt": ["MKL_Get_Max_Threads"],
    "blis": ["bli_thread_get_num_threads"],
}


def blas_threads(
    files: Sequence[str],
    environment: Mapping[str, str],
    cores: int,
    load: Callable[[str], object] = ctypes.CDLL,
) -> tuple[int, str]:
    """Return how many threads NumPy's linear algebra takes, and how that is known.

    Args:
        files: the libraries that the process has loaded.
        environment: its variables.
        cores: how many it may use; the default number of threads.
        load: opens a library.
    """
    for path in files:
        for part, names in _ASK.items():
            if part not in os.path.basename(path):
                continue
            try:
                library = load(path)
            except OSError:
                continue
            for name in names:
                ask = getattr(library, name, None)
                if ask is not None:
                    return int(ask()), _said(environment)
    told = next((int(environment[name]) for name in VARIABLES if environment.get(name, "").isdigit()), cores)
    return told, _said(environment)


def _said(environment: Mapping[str, str]) -> str:
    told = (f"{name}={environment[name]}" for name in VARIABLES if environment.get(name, "").isdigit())
    return next(told, f"no {VARIABLES[0]} is set")


def pairs_without_peer_access(count: int, library: Any = None) -> tuple[tuple[int, int], ...]:
    """Return the pairs of GPUs that cannot read each other's memory; none if NVIDIA's driver does not say.

    Args:
        count: how many GPUs this process sees.
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
