"""Figures of arrays in GPU memory, by the library's public calls.

    mpiexec -n 2 python scripts/gpu/figures.py FILE.json PART

PART is one of: staged, mpi, nccl (all-reduces on this path), host (time of the host on one rank, beside torch's by
NCCL), optimizers (steps of 161 variables on one rank, beside torch's fused Adam).  Rank 0 writes {"figures": numbers,
"text": words} as JSON.  Without what a part takes there are no figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import cupy
import numpy as np
from delayed_writes import delayed_fill
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy.cli.bench.cases import resnet50
from mpistrategy.mpi.interface.gpu_transport import chosen_path
from mpistrategy.options import GPU_PATH

try:
    import torch
except ImportError:
    torch = None

WORLD = MPI.COMM_WORLD
MIB = 2**20
IS_GPU = "STANDIN_DEVICES" not in os.environ
HAS_TORCH = IS_GPU and torch is not None and torch.cuda.is_available()
SIZES = (4096, MIB, 64 * MIB) if IS_GPU else (4096, 65536)
REPEATS = 20 if IS_GPU else 2
#: The gradients of ResNet-50; small ones where a processor does a GPU's work.
RESNET50 = resnet50() if IS_GPU else [tuple(min(n, 8) for n in shape) for shape in resnet50()]

Figures = dict[str, float]


class NotHereError(Exception):
    """This machine has not what a part takes; the text says what."""


def on_stream(work: Callable[[], object]) -> float:
    """Return the device's seconds for one call: all are on the stream before the first begins."""
    work()
    waiting, start, stop = cupy.empty(1), cupy.cuda.Event(), cupy.cuda.Event()
    delayed_fill(cupy, waiting, 0.0, 0.2)  # seconds: longer than the host takes for all of them
    start.record()
    for _ in range(REPEATS):
        work()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3 / REPEATS


def until(end: Callable[[], object], work: Callable[[], object], calls: int = 1) -> float:
    """Return the median seconds of a call from a barrier, when the device is idle, until `end` returns."""
    times = []
    for _ in range(REPEATS + 2):
        WORLD.Barrier()
        cupy.cuda.runtime.deviceSynchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        end()
        times.append((time.perf_counter() - began) / calls)
    return median(times[2:])


def to_the_end(work: Callable[[], object]) -> float:
    """Return the seconds until the last thing on the stream is done."""
    return until(cupy.cuda.get_current_stream().synchronize, work)


def of_the_host(work: Callable[[], object]) -> float:
    """Return the seconds until a call returns."""
    return until(lambda: None, work, calls=10)


def sums(strategy: ms.Strategy, value: Any, out: Any = None, wire: Any = None) -> Callable[[], Any]:
    """Return an all-reduce of a value."""
    options = ms.CommunicationOptions(wire=wire)
    return partial(strategy.run, lambda: ms.get_replica_context().all_reduce("SUM", value, options, out=out))


def on_path(path: str) -> Figures:
    """All-reduces on one path."""
    os.environ[GPU_PATH] = path
    figures: Figures = {}
    with ms.MirroredStrategy("gpu" if path == "nccl" and WORLD.size > 1 else "shared") as strategy:
        sums(strategy, cupy.ones(1024, "float32"))()
        chosen = chosen_path(strategy.extended.communicator)
        if chosen.name != path:
            raise NotHereError(chosen.reason)
        for nbytes in SIZES:
            array = cupy.ones(nbytes // 4, "float32")
            assert float(sums(strategy, array)().sum()) == WORLD.size * array.size, "a wrong sum"
            figures[f"{nbytes} bytes"] = to_the_end(sums(strategy, array, array))
        figures["resnet50"] = to_the_end(sums(strategy, [cupy.ones(shape, "float32") for shape in RESNET50]))
    return figures


def host() -> Figures:
    """Time of the host for a call on one rank, beside torch's."""
    with ms.MirroredStrategy("shared") as strategy:
        small, gradients = cupy.ones(1024, "float32"), [cupy.ones(shape, "float32") for shape in RESNET50]
        figures = {
            "4 KiB, in place": of_the_host(sums(strategy, small, small)),
            "161 arrays, in place": of_the_host(sums(strategy, gradients, gradients)),
            "an arena of 161 arrays": of_the_host(sums(strategy, strategy.arena(gradients))),
        }
    if HAS_TORCH:
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        figures["torch, 4 KiB"] = of_the_host(partial(torch.distributed.all_reduce, torch.ones(1024, device="cuda")))
        torch.distributed.destroy_process_group()
    return figures


def optimizers() -> Figures:
    """Steps of 161 variables on one rank."""
    figures: Figures = {}
    with ms.MirroredStrategy("shared") as strategy:
        gradients = [cupy.ones(shape, "float32") for shape in RESNET50]
        for name, make in (("SGD", partial(ms.optimizers.SGD, 0.1)), ("Adam", ms.optimizers.Adam)):
            with strategy.scope():
                optimizer: Any = make()
                variables = [ms.Variable(np.ones(shape, np.float32)) for shape in RESNET50]
            pairs = list(zip(gradients, variables, strict=True))
            step = partial(strategy.run, partial(optimizer.apply_gradients, pairs))
            figures |= {name: on_stream(step), f"{name}, host": of_the_host(step)}
    if HAS_TORCH:
        parameters = [torch.ones(shape, device="cuda", requires_grad=True) for shape in RESNET50]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        fused = torch.optim.Adam(parameters, fused=True)
        figures["torch's fused Adam"] = on_stream(fused.step)  # both are on the device's default stream
    return figures


PARTS: dict[str, Callable[[], Figures]] = {
    "host": host,
    "optimizers": optimizers,
    **{path: partial(on_path, path) for path in ("staged", "mpi", "nccl")},
}


def main() -> None:
    """Measure what the command line names."""
    file, part = sys.argv[1:]
    figures: Figures = {}
    try:
        figures = PARTS[part]()
        text = "; ".join(f"{name}: {1e6 * seconds:.0f} us" for name, seconds in figures.items())
    except NotHereError as error:
        text = f"not to be had here: {' '.join(str(error).split())}"
    if WORLD.rank == 0:
        Path(file).write_text(json.dumps({"figures": figures, "text": text}), encoding="utf-8")


if __name__ == "__main__":
    main()
