"""Time of the host in all-reduces of arrays in GPU memory, less that of their CuPy calls; scripts/gpu_lane runs it.

    python scripts/gpu_host_time.py FILE.json

One rank: nothing waits for a peer.  The file gets, for each operation, the microseconds of a call, those of its CuPy
calls made bare, the difference with its limit, and how many calls of Python functions a call makes.  Bare are: one
bucket taken from CuPy's pool, one launch of the packing kernel with an argument that is ready (or one copy), and one
view of the bucket for each result.  On the stand-in (tests/cuda_on_cpu) the time is that of this thread on its core.
The folders tests and tests/doubles must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import cuda_counts
import numpy as np

import mpistrategy as ms
from mpistrategy.cli.bench.cases import shapes
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.routes import copy_kernel, gpu_copy

#: The most microseconds of the host that a call may take more than its CuPy calls, and the most functions of Python
#: that it may enter.
LIMITS = {
    "SUM of 4 KiB": (20, 75),
    "SUM of 4 KiB, in place": (20, 70),
    "SUM of 161 arrays": (150, 85),
    "SUM of 161 arrays, in place": (150, 95),
    "SUM of 1000 arrays": (1000, 105),
    "SUM of an arena of 161 arrays": (30, 76),
}
ROUNDS, CALLS = 15, 10
_ON_DEVICE = 3  # cudaMemcpyKind
_now = time.thread_time if cuda_counts.IS_COUNTED else time.perf_counter


def bare_copy(cupy: Any, array: Any) -> Callable[[], Any]:
    """Return what copies an array as its all-reduce does."""
    copy, stream = cupy.cuda.runtime.memcpyAsync, cupy.cuda.get_current_stream().ptr

    def work() -> Any:
        made = cupy.empty(array.size, array.dtype)
        copy(made.data.ptr, array.data.ptr, array.nbytes, _ON_DEVICE, stream)
        return made

    return work


def bare_list(cupy: Any, arrays: list[Any], back: bool) -> Callable[[], Any]:
    """Return what packs arrays, and makes views of the results, or unpacks them, as their all-reduce does."""
    (pack,) = packing.plan(packing.layouts_of(arrays))
    kernel, threads = copy_kernel.kernel(cupy), (copy_kernel.THREADS,)
    sources = np.fromiter((array.data.ptr for array in arrays), np.uint64, len(arrays))
    kept = cupy.empty(pack.size, pack.dtype)
    targets = pack.starts * np.uint64(pack.dtype.itemsize) + np.uint64(kept.data.ptr)
    calls = [
        ((launch.blocks,), launch.argument(sources, targets), np.int32(launch.count))
        for launch in gpu_copy.launches(tuple([array.nbytes for array in arrays]))
    ]
    places = [(member.start * pack.dtype.itemsize, member.shape) for member in pack.members]

    def launch() -> None:
        for grid, argument, count in calls:
            kernel(grid, threads, (argument, count))

    def work() -> Any:
        made = cupy.empty(pack.size, pack.dtype)
        launch()
        if back:
            launch()
            return made
        memory = made.data
        return [cupy.ndarray(shape, pack.dtype, memory + start) for start, shape in places]

    return work


def operations(cupy: Any, strategy: Any) -> dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]]:
    """Return for each operation what a step does, given its context, and the same CuPy calls."""
    small = cupy.ones(1024, "float32")
    gradients = [cupy.ones(tuple(min(length, 8) for length in shape), "float32") for shape in shapes.resnet50()]
    many = [cupy.ones(shape, "float32") for shape in shapes.tiny1000()]
    arena = strategy.arena(gradients)

    def nothing() -> None:
        return None

    return {
        "SUM of 4 KiB": (lambda ctx: ctx.all_reduce("SUM", small), bare_copy(cupy, small)),
        "SUM of 4 KiB, in place": (lambda ctx: ctx.all_reduce("SUM", small, out=small), nothing),
        "SUM of 161 arrays": (lambda ctx: ctx.all_reduce("SUM", gradients), bare_list(cupy, gradients, False)),
        "SUM of 161 arrays, in place": (
            lambda ctx: ctx.all_reduce("SUM", gradients, out=gradients),
            bare_list(cupy, gradients, True),
        ),
        "SUM of 1000 arrays": (lambda ctx: ctx.all_reduce("SUM", many), bare_list(cupy, many, False)),
        "SUM of an arena of 161 arrays": (lambda ctx: ctx.all_reduce("SUM", arena), nothing),
    }


def microseconds(cupy: Any, work: Callable[[], Any]) -> float:
    """Return the median time of the host for a call; the device is idle when a round begins."""
    work()
    times = []
    for _ in range(ROUNDS):
        cupy.cuda.runtime.deviceSynchronize()
        start = _now()
        for _ in range(CALLS):
            work()
        times.append((_now() - start) / CALLS)
    cupy.cuda.runtime.deviceSynchronize()
    return 1e6 * statistics.median(times)


def python_calls(work: Callable[[], Any]) -> int:
    """Return how many functions of Python a call enters."""
    entered = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    for _ in range(3):  # the first call from this line is another one: plans are of call sites
        sys.setprofile(see)
        entered = 0
        work()
        sys.setprofile(None)
    return entered - 1  # `work` itself


def measured(cupy: Any, strategy: Any) -> dict[str, dict[str, float]]:
    """Return the figures of each operation."""
    found = {}
    for name, (call, bare) in operations(cupy, strategy).items():

        def in_step(call: Callable[[Any], Any] = call) -> tuple[float, int]:
            work = partial(call, ms.get_replica_context())
            for _ in range(3):
                work()
            return microseconds(cupy, work), python_calls(work)

        ours, entered = strategy.run(in_step)
        plain = microseconds(cupy, bare)
        found[name] = {
            "us": round(ours, 1),
            "bare_us": round(plain, 1),
            "more_us": round(ours - plain, 1),
            "limit_us": LIMITS[name][0],
            "python_calls": entered,
            "most_python_calls": LIMITS[name][1],
        }
    return found


def main() -> None:
    """Measure, and write what was found."""
    import cupy

    (file,) = islice(sys.argv, 1, None)
    strategy = ms.MirroredStrategy("shared")
    found = measured(cupy, strategy)
    strategy.close()
    Path(file).write_text(json.dumps(found), encoding="utf-8")
    for name, figures in found.items():
        print(name, figures)


if __name__ == "__main__":
    main()
