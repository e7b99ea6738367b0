"""The CuPy that tests work with: the real one with a GPU where MPISTRATEGY_TEST_GPU=1 says that there is one, else the
double.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import ModuleType
from typing import Any

import cuda_counts
import gpu_doubles
import pytest
from replicas import RANK, SIZE

import mpistrategy as ms

IS_REAL = os.environ.get("MPISTRATEGY_TEST_GPU") == "1"
#: Whether its GPU is one, and not a processor in its place.
IS_GPU = IS_REAL and not cuda_counts.IS_COUNTED
if IS_REAL:
    from cupy import asarray, ndarray
else:
    from cupy_double import asarray, ndarray
__all__ = [
    "IS_GPU",
    "IS_REAL",
    "PATHS",
    "Spoken",
    "asarray",
    "double_only",
    "exported",
    "gpus",
    "installed",
    "ndarray",
    "number",
    "strategy",
]
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


@contextmanager
def gpus() -> Iterator[ms.MirroredStrategy]:
    """Give a strategy whose ranks drive the doubles' GPUs, one each, or the real ones that there are."""
    if IS_REAL:
        with installed(), closing(strategy()) as made:
            yield made
    else:
        with (
            gpu_doubles.pretended(*(f"GPU-{rank}" for rank in range(SIZE))),
            closing(ms.MirroredStrategy("gpu")) as made,
        ):
            yield made


def number(made: ms.MirroredStrategy) -> int:
    """Return the number of the GPU that this rank of `gpus` drives."""
    devices: Any = made.run(lambda: ms.get_replica_context().devices)
    found = int(devices[0].rpartition(":")[2])
    assert IS_REAL or found == RANK
    return found


def exported(array: Any, **options: Any) -> Any:
    """Return what DLPack says of an array; the double's own arrays stand for that."""
    is_double = isinstance(array, ndarray) and not IS_REAL
    return array if is_double else array.__dlpack__(**options)


class Spoken:
    """An array of which only DLPack is known."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return exported(self.array, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.array.device.id) if isinstance(self.array, ndarray) else (1, 0)
