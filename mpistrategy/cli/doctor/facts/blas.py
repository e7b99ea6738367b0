"""How many threads NumPy's linear algebra takes: what the loaded library says, else what the environment does."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_ASK = {
    "openblas": [
        f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "", "_64")
    ],
    "mkl_rt": ["MKL_Get_Max_Threads"],
    "blis": ["bli_thread_get_num_threads"],
}


def threads(
    files: Sequence[str],
    environment: Mapping[str, str],
    cores: int,
    load: Callable[[str], object] = ctypes.CDLL,
) -> tuple[int, str]:
    """Return how many threads, and how that is known.

    Args:
        files: the libraries that the process has loaded.
        environment: its variables.
        cores: how many it may use: as many threads start where nobody says anything.
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
