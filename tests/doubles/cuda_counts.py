"""What the stand-in for CUDA (tests/cuda_on_cpu) has been asked to do, counted in this process."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

#: As `Counted` of cuda_on_cpu/work.hpp.
NAMES = (
    *("launches", "copies_on_device", "bytes_on_device", "copies_to_host", "bytes_to_host"),
    *("copies_to_device", "bytes_to_device", "fills", "records", "stream_waits", "host_waits"),
    *("allocations", "pinned_allocations", "nccl_calls"),
)
#: Whether the GPU is the stand-in, and nobody but us asks it: a CUDA-aware MPI, which mpi4py is told of so, does.
IS_COUNTED = "STANDIN_DEVICES" in os.environ and "MPI4PY_LIBMPI" not in os.environ


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what this process asks for meanwhile; the numbers are there afterwards."""
    told: Counter[str] = Counter()
    before = _now()
    yield told
    told.update({name: after - start for name, after, start in zip(NAMES, _now(), before, strict=True)})


def _now() -> list[int]:
    numbers = (ctypes.c_ulonglong * len(NAMES))()
    library = ctypes.CDLL("libcuda.so.1")
    assert library.standin_counts(numbers, len(NAMES)) == len(NAMES), "work.hpp counts other things"
    return list(numbers)
