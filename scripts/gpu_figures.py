"""Figures of arrays in GPU memory; scripts/gpu_lane runs this, on 1 and on 2 ranks that share a GPU.

    mpiexec -n 2 python scripts/gpu_figures.py FILE.json PART...

PART is one of: limits (what the device and the bus can do), packing (many arrays into one), check (the packing kernel
against NumPy), staged, mpi, nccl (all-reduces on this path). Rank 0 writes what it found as JSON. With
MPISTRATEGY_TEST_GPU=1 the GPU is real; else it is the tests' double, and the figures mean nothing. The folder tests
must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import cupy_here
import numpy as np
from delayed_writes import delayed_fill

import mpistrategy as ms
from mpistrategy.cli.bench import shapes
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.options import GPU_PATH
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.routes import gpu as gpu_route

MIB = 2**20
REAL = cupy_here.IS_GPU  # else small sizes do: figures mean nothing
COPIED = 256 * MIB if REAL else MIB
TRANSFERRED = 64 * MIB if REAL else MIB
REDUCED = (4096, MIB, 64 * MIB) if REAL else (4096, 65536)
REPEATS = 20 if REAL else 2
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
#: A list that would put every array behind the first at an odd place, were packs not padded.
SCALAR_FIRST = "a scalar first"

Figures = dict[str, Any]


def on_stream(cupy: Any, function: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the device's seconds for one call: all are on the stream before the first begins."""
    function()
    waiting, start, stop = cupy.empty(1), cupy.cuda.Event(), cupy.cuda.Event()
    delayed_fill(cupy, waiting, 0.0, 0.05)
    start.record()
    for _ in range(repeats):
        function()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3 / repeats


def seconds_of(cupy: Any, strategy: Any, function: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the median of the seconds from a barrier until the last thing on the stream is done."""
    stream = cupy.cuda.get_current_stream()
    times = []
    for _ in range(repeats + 2):
        if strategy is not None:
            strategy.barrier()
        stream.synchronize()
        started = time.perf_counter()
        function()
        stream.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def limits(cupy: Any, strategy: Any) -> Figures:
    """What the device's memory and the bus can do; the bus with all ranks at the same time, too."""
    import cupyx

    source, target = cupy.empty(COPIED, "uint8"), cupy.empty(COPIED, "uint8")
    host = cupyx.empty_pinned((TRANSFERRED,), np.uint8)
    stream = cupy.cuda.get_current_stream().ptr
    copy = cupy.cuda.runtime.memcpyAsync

    def to_device() -> None:
        copy(source.data.ptr, host.ctypes.data, TRANSFERRED, TO_DEVICE, stream)

    def to_host() -> None:
        copy(host.ctypes.data, source.data.ptr, TRANSFERRED, TO_HOST, stream)

    copied = on_stream(cupy, lambda: copy(target.data.ptr, source.data.ptr, COPIED, ON_DEVICE, stream))
    return {
        "device copy, bytes read and written": 2 * COPIED / copied,
        "host to device, pinned": TRANSFERRED / seconds_of(cupy, strategy, to_device),
        "device to host, pinned": TRANSFERRED / seconds_of(cupy, strategy, to_host),
    }


def packing_figures(cupy: Any, strategy: Any) -> Figures:
    """Lists of gradients packed and scattered, beside a plain copy of as many bytes."""
    found: Figures = {}
    tiny = shapes.tiny1000()
    lists = {"tiny1000": tiny, SCALAR_FIRST: [(1,), *tiny]}
    if REAL:
        lists = {"resnet50": shapes.resnet50(), SCALAR_FIRST: [(1,), *shapes.resnet50()], "tiny1000": tiny}
    for name, wanted in lists.items():
        arrays = [cupy.empty(shape, "float32") for shape in wanted]
        for array in arrays:
            array[...] = 1.0
        packs = packing.plan(packing.layouts_of(arrays), 2**40, wire=packing.own_dtype, alignment=packing.GPU_ALIGNMENT)
        assert len(packs) == 1
        (pack,) = packs
        bucket, other = cupy.empty(pack.size, pack.dtype), cupy.empty(pack.size, pack.dtype)
        views = [view for _, view in pack.views(bucket)]
        copied = on_stream(cupy, partial(_copy, cupy, bucket, other))
        packed = on_stream(cupy, lambda p=pack, a=arrays, b=bucket: gpu_route.fill(p, a, b))
        scattered = on_stream(cupy, lambda v=views, a=arrays: gpu_route.move(v, a))
        started = time.perf_counter()
        for _ in range(REPEATS):
            gpu_route.fill(pack, arrays, bucket)
        host = (time.perf_counter() - started) / REPEATS
        found[name] = {
            "bytes": pack.nbytes,
            "copy": 2 * pack.nbytes / copied,
            "packing": 2 * pack.nbytes / packed,
            "scattering": 2 * pack.nbytes / scattered,
            "seconds of the host for a call": host,
        }
    return found


def _copy(cupy: Any, source: Any, target: Any) -> None:
    stream = cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, ON_DEVICE, stream)


def check(cupy: Any, strategy: Any) -> Figures:
    """Lists of arrays of odd sizes at odd places, moved by the kernel, against NumPy."""
    random = np.random.default_rng(3)
    dtypes = ["float32", "int8", "float16", "complex64"]
    lists = 30 if REAL else 10 if cupy_here.IS_REAL else 3
    for _ in range(lists):
        sources, targets, expected = [], [], []
        for _ in range(int(random.integers(1, 300))):
            dtype = dtypes[int(random.integers(len(dtypes)))]
            size, here, there = (int(number) for number in random.integers(0, (9000, 17, 17)))
            values = random.integers(0, 120, size).astype(dtype)
            source, target = cupy.empty(size + here, dtype)[here:], cupy.empty(size + there, dtype)[there:]
            source[...] = cupy.asarray(values)
            sources.append(source)
            targets.append(target)
            expected.append(values)
        gpu_route.move(sources, targets)
        for target, values in zip(targets, expected, strict=True):
            assert np.array_equal(target.get(), values), f"{target.dtype}, {values.size} elements"
    return {"lists that were right": lists}


def path_figures(cupy: Any, strategy: Any) -> Figures:
    """All-reduces on the path that the environment names."""
    found: Figures = {}

    def reduce_all(value: Any, out: Any = None) -> Any:
        return strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", value, out=out))

    for nbytes in REDUCED:
        array = cupy.empty(nbytes // 4, "float32")
        array[...] = 1.0
        total = reduce_all(array)
        assert float(total.sum()) == strategy.num_replicas_in_sync * (nbytes // 4), "a wrong sum"
        found[str(nbytes)] = seconds_of(cupy, strategy, lambda a=array: reduce_all(a), 10 if REAL else 2)
    if REAL:
        gradients = [cupy.asarray(np.ones(shape, np.float32)) for shape in shapes.resnet50()]
        found["resnet50"] = seconds_of(cupy, strategy, lambda: reduce_all(gradients), 5)
        found["bytes of resnet50"] = 4 * sum(map(prod, shapes.resnet50()))
    paths = device_paths(strategy.extended.communicator)
    if "nccl" in paths.by_name:
        found |= _bare_nccl(cupy, strategy, paths.by_name["nccl"], found.get("bytes of resnet50", 0))
    return {"seconds": found, "path": sorted(paths.by_name), "why": sorted(set(paths.reasons.values()))}


def _bare_nccl(cupy: Any, strategy: Any, path: Any, nbytes_of_list: int) -> Figures:
    """Return the seconds of NCCL's own call for buffers of as many bytes."""
    sizes = filter(None, (*REDUCED, *([256 * MIB] if REAL else []), nbytes_of_list))
    call = partial(nccls_own, cupy, path)
    return {
        f"NCCL, {nbytes}": seconds_of(cupy, strategy, call(cupy.ones(nbytes // 4, "float32")), 10 if REAL else 2)
        for nbytes in sizes
    }


def nccls_own(cupy: Any, path: Any, buffer: Any) -> Callable[[], None]:
    """Return the call of NCCL, without anything of ours, that sums a buffer of float32 in place."""
    from cupy.cuda import nccl

    pointer, stream = buffer.data.ptr, cupy.cuda.get_current_stream().ptr
    arguments = pointer, pointer, buffer.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream
    return lambda: path._nccl.allReduce(*arguments)


PARTS: dict[str, Callable[[Any, Any], Figures]] = {
    "limits": limits,
    "packing": packing_figures,
    "check": check,
    **dict.fromkeys(("staged", "mpi", "nccl"), path_figures),
}
ALONE = ("packing", "check")


def main() -> None:
    """Measure what the command line names."""
    file, *parts = sys.argv[1:]
    with cupy_here.installed() as cupy:
        found: Figures = {}
        for part in parts:
            strategy = None
            if part not in ALONE:
                os.environ[GPU_PATH] = part if PARTS[part] is path_figures else "staged"
                strategy = cupy_here.strategy()
            found[part] = PARTS[part](cupy, strategy)
            if strategy is None or strategy.extended.communicator.rank == 0:
                Path(file).write_text(json.dumps(found), encoding="utf-8")
            if strategy is not None:
                strategy.close()


if __name__ == "__main__":
    main()
