"""The GPUs of the tests: real ones, or a processor in their place (tests/cuda_on_cpu), always below the real CuPy.

``python3 scripts/gpu`` runs the tests with GPUs, ``python3 scripts/gpu --on-cpu`` with the processor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

import mpistrategy as ms
from mpistrategy.mpi.gpu import device_selection

IS_HERE = os.environ.get("MPISTRATEGY_TEST_GPU") == "1"
#: Whether the GPU is one, and not the processor.
IS_GPU = IS_HERE and "STANDIN_DEVICES" not in os.environ
#: The paths of arrays in GPU memory that this machine has.
PATHS = tuple(os.environ.get("MPISTRATEGY_TEST_PATHS", "staged").split(",")) if IS_HERE else ()
REASON = "needs CuPy and a GPU, or its stand-in: python3 scripts/gpu, with --on-cpu on a machine without a GPU"
needs_gpu = pytest.mark.skipif(not IS_HERE, reason=REASON)


def cupy_or_skip() -> Any:
    """Return CuPy; skip the test, or the file that calls this at its head, where there is no GPU."""
    if not IS_HERE:
        pytest.skip(REASON, allow_module_level=True)
    import cupy

    return cupy


def strategy(path: str = "", **options: Any) -> ms.MirroredStrategy:
    """Return a strategy whose ranks share the GPUs; on the path by NCCL, which refuses that, each has its own."""
    return ms.MirroredStrategy("gpu" if path == "nccl" else "shared", **options)


def number(made: ms.MirroredStrategy) -> int:
    """Return the number of the GPU that this rank drives."""
    devices: Any = made.run(lambda: ms.get_replica_context().devices)
    return int(devices[0].rpartition(":")[2])


class Spoken:
    """An array of which only DLPack is known."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@contextmanager
def visible(*names: str, error: BaseException | None = None) -> Iterator[None]:
    """Let this process see GPUs of these names, or fail to look; a machine without GPUs needs nothing else for that."""
    found = tuple(map(device_selection.Gpu, names)), *(("", "") if names else ("no driver", "Get one"))
    with mock.patch.object(device_selection, "visible_gpus", side_effect=error, return_value=found):
        yield
