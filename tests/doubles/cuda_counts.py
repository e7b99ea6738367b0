"""What the stand-in for CUDA (tests/cuda_on_cpu) has been asked to do, counted in this process."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

#: As `Counted` of cuda_on_cpu/work.hpp.
NAMES = (
    *("launches", "copies_on_device", "bytes_on_device", "copies_to_host", "bytes_to_host"),
    *("copies_to_device", "bytes_to_device", "fills", "records", "stream_waits", "host_waits"),
    *("allocations", "pinned_allocations", "nccl_calls"),
)
#: What the guide's tables tell of each call.
COLUMNS = (
    *("launches", "copies_on_device", "copies_to_host", "copies_to_device", "records", "stream_waits", "host_waits"),
)
#: The most of each, by path and call.
Budgets = Mapping[tuple[str, str], tuple[int, ...]]
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


def count_repeated(call: Callable[[], object]) -> Counter[str]:
    """Return the counts of a call that was made twice before."""
    import cupy

    call()
    call()
    cupy.cuda.runtime.deviceSynchronize()
    with counted() as counts:
        call()
    return counts


def over(counts: Counter[str], most: tuple[int, ...]) -> str:
    """Return which counts are above their budget, in words; "" for none."""
    found = tuple(counts[column] for column in COLUMNS)
    is_over = any(mine > budget for mine, budget in zip(found, most, strict=True))
    return f"{found} and not {most}" if is_over else ""
