"""The CuPy that tests work with: the real one with a GPU where MPISTRATEGY_TEST_GPU=1 says that there is one, else the
double.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import gpu_doubles
import pytest

import mpistrategy as ms

IS_REAL = os.environ.get("MPISTRATEGY_TEST_GPU") == "1"
#: Which paths of arrays in GPU memory this machine has: with a real GPU as MPISTRATEGY_TEST_PATHS says.
PATHS = tuple(os.environ.get("MPISTRATEGY_TEST_PATHS", "staged").split(",")) if IS_REAL else ("staged", "mpi")

#: For tests that ask the double what it has seen, and for those that need two GPUs.
double_only = pytest.mark.skipif(IS_REAL, reason="asks the double what happened")


@contextmanager
def installed() -> Iterator[ModuleType]:
    """Let ``import cupy`` find the CuPy meanwhile, and the library one GPU."""
    if not IS_REAL:
        with gpu_doubles.pretended("GPU-0") as _:
            import cupy

            yield cupy
        return
    import cupy

    try:
        yield cupy
    finally:
        cupy.cuda.runtime.deviceSynchronize()


def strategy() -> ms.MirroredStrategy:
    """Return a strategy whose ranks work on the one GPU."""
    return ms.MirroredStrategy("shared")
