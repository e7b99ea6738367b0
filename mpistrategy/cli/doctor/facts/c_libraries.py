"""Facts from libraries of the process: threads of linear algebra, and which GPUs can read each other."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def blas_threads(environment: Mapping[str, str], cores: int) -> tuple[int, str]:
    """Return how many threads NumPy's linear algebra takes, and how that is known.

    threadpoolctl asks the libraries, where it is installed (it comes with scikit-learn); else the variables say.

    Args:
        environment: the variables of the process.
        cores: how many it may use; the default number of threads.
    """
    told = next((name for name in VARIABLES if environment.get(name, "").isdigit()), "")
    source = f"{told}={environment[told]}" if told else f"no {VARIABLES[0]} is set"
    threads = int(environment[told]) if told else cores
    with suppress(ImportError):
        from threadpoolctl import threadpool_info

        asked = [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]
        threads = max(asked, default=threads)
    return threads, source


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
