"""How many threads the linear algebra of this process takes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

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
