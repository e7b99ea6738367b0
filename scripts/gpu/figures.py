"""Figures of arrays in GPU memory, by the library's public calls.

    mpiexec -n 2 python scripts/gpu/figures.py FILE.json PART

PART is one of: limits (what the device and the bus can do), staged, mpi, nccl (all-reduces on this path, beside NCCL's
own calls), host (time of the host on one rank, beside torch's by NCCL), optimizers (steps of 161 variables on one rank,
beside torch's fused Adam), hidden (a GPU for each rank: an all-reduce beside matrix products).  Rank 0 writes
{"figures": numbers, "text": words, "over": what is above its limit} as JSON.  On a processor in the place of a GPU the
figures mean nothing, and none is judged.  Without what a part takes its text says so, and there are no figures.
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

import cupy
import numpy as np
from delayed_writes import delayed_fill
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy.cli.bench import shapes
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.options import GPU_PATH

MIB = 2**20
IS_GPU = "STANDIN_DEVICES" not in os.environ
SIZES = (4096, MIB, 64 * MIB) if IS_GPU else (4096, 65536)
REPEATS = 20 if IS_GPU else 2
#: The gradients of ResNet-50; small ones where a processor does a GPU's work.
RESNET50 = shapes.resnet50() if IS_GPU else [tuple(min(n, 8) for n in shape) for shape in shapes.resnet50()]
#: Seconds of 4 KiB by NCCL; a list's time beside NCCL's own call; the host's time and Adam's step beside torch's.
NCCL_SMALL, NCCL_LIST, HOST_TORCH, ADAM_TORCH = 40e-6, 1.2, 1.2, 1.3

Figures = dict[str, float]
Part = Callable[[], tuple[Figures, list[str]]]


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


def to_the_end(work: Callable[[], object]) -> float:
    """Return the median seconds from a barrier until the last thing on the stream is done."""
    stream, times = cupy.cuda.get_current_stream(), []
    for _ in range(REPEATS + 2):
        MPI.COMM_WORLD.Barrier()
        stream.synchronize()
        began = time.perf_counter()
        work()
        stream.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def of_the_host(work: Callable[[], object]) -> float:
    """Return the median seconds until a call returns; the device is idle when a round begins."""
    times = []
    for _ in range(16):
        cupy.cuda.runtime.deviceSynchronize()
        began = time.perf_counter()
        for _ in range(10):
            work()
        times.append((time.perf_counter() - began) / 10)
    return statistics.median(times[1:])


def torch_with_cuda() -> Any:
    """Return torch; None without one that has the GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def sums(strategy: ms.Strategy, value: Any, out: Any = None, wire: Any = None) -> Callable[[], Any]:
    """Return an all-reduce of a value."""
    options = ms.CommunicationOptions(wire=wire)

    def step() -> Any:
        return ms.get_replica_context().all_reduce("SUM", value, options, out=out)

    return partial(strategy.run, step)


def limits() -> tuple[Figures, list[str]]:
    """Copies on the device, read and written, and over the bus by all ranks at the same time; bytes a second."""
    import cupyx

    size = 64 * MIB if IS_GPU else MIB
    source, target, host = cupy.empty(size, "uint8"), cupy.empty(size, "uint8"), cupyx.empty_pinned((size,), np.uint8)
    return {
        "device copy": 2 * size / on_stream(lambda: cupy.copyto(target, source)),
        "host to device": size / to_the_end(lambda: source.set(host)),
        "device to host": size / to_the_end(lambda: source.get(out=host)),
    }, []


def own_nccl() -> Callable[[Any], Callable[[], None]]:
    """Return a function that makes NCCL's own call, in place, for a buffer of float32."""
    from cupy.cuda import nccl

    world = MPI.COMM_WORLD
    name = world.bcast(nccl.get_unique_id() if world.rank == 0 else None)
    joined = nccl.NcclCommunicator(world.size, name, world.rank)

    def call(buffer: Any) -> Callable[[], None]:
        pointer, stream = buffer.data.ptr, cupy.cuda.get_current_stream().ptr
        return partial(joined.allReduce, pointer, pointer, buffer.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

    return call


def on_path(path: str) -> tuple[Figures, list[str]]:
    """All-reduces on one path."""
    os.environ[GPU_PATH] = path
    world, over = MPI.COMM_WORLD, []
    with ms.MirroredStrategy("gpu" if path == "nccl" and world.size > 1 else "shared") as strategy:
        sums(strategy, cupy.ones(1024, "float32"))()
        paths = device_paths(strategy.extended.communicator)
        if path not in paths.by_name:
            raise NotHereError("; ".join(paths.reasons.values()))
        found: Figures = {}
        for nbytes in SIZES:
            array = cupy.ones(nbytes // 4, "float32")
            assert float(sums(strategy, array)().sum()) == world.size * array.size, "a wrong sum"
            found[f"{nbytes} bytes"] = to_the_end(sums(strategy, array, array))
        gradients = [cupy.ones(shape, "float32") for shape in RESNET50]
        found["resnet50"] = to_the_end(sums(strategy, gradients))
        if path == "nccl":
            call = own_nccl()
            for name, size in (("4096 bytes", 1024), ("resnet50", sum(map(prod, RESNET50)))):
                found[f"NCCL's own, {name}"] = to_the_end(call(cupy.ones(size, "float32")))
            over += ["4096 bytes"] if found["4096 bytes"] > NCCL_SMALL else []
            over += ["resnet50"] if found["resnet50"] > NCCL_LIST * found["NCCL's own, resnet50"] else []
    return found, over


def host() -> tuple[Figures, list[str]]:
    """Time of the host for a call on one rank, beside torch's."""
    torch, found, over = torch_with_cuda(), {}, []
    with ms.MirroredStrategy("shared") as strategy:
        small, gradients = cupy.ones(1024, "float32"), [cupy.ones(shape, "float32") for shape in RESNET50]
        calls = {
            "4 KiB, in place": sums(strategy, small, small),
            "161 arrays, in place": sums(strategy, gradients, gradients),
            "an arena of 161 arrays": sums(strategy, strategy.arena(gradients)),
        }
        found = {name: of_the_host(call) for name, call in calls.items()}
    if torch is not None:
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        tensor, tensors = torch.ones(1024, device="cuda"), [torch.ones(shape, device="cuda") for shape in RESNET50]

        def of_list() -> None:
            flat = torch._utils._flatten_dense_tensors(tensors)
            torch.distributed.all_reduce(flat)
            torch._foreach_copy_(tensors, torch._utils._unflatten_dense_tensors(flat, tensors))

        of_one = partial(torch.distributed.all_reduce, tensor)
        peers: dict[str, Callable[[], object]] = {"4 KiB, in place": of_one, "161 arrays, in place": of_list}
        for name, call in peers.items():
            found[f"torch, {name}"] = of_the_host(call)
            over += [name] if found[name] > HOST_TORCH * found[f"torch, {name}"] else []
        torch.distributed.destroy_process_group()
    return found, over


def optimizers() -> tuple[Figures, list[str]]:
    """Steps of 161 variables on one rank."""
    torch, found, over = torch_with_cuda(), Figures(), []
    with ms.MirroredStrategy("shared") as strategy:
        gradients = [cupy.ones(shape, "float32") for shape in RESNET50]
        makers: dict[str, Callable[[], Any]] = {
            "SGD": lambda: ms.optimizers.SGD(0.1),
            "momentum": lambda: ms.optimizers.SGD(0.1, momentum=0.9),
            "Adam": ms.optimizers.Adam,
        }
        for name, make in makers.items():
            with strategy.scope():
                variables, optimizer = [ms.Variable(np.ones(shape, np.float32)) for shape in RESNET50], make()

            def step(optimizer: Any = optimizer, variables: Any = variables) -> None:
                optimizer.apply_gradients(zip(gradients, variables, strict=True))

            found[name] = on_stream(partial(strategy.run, step))
            found[f"{name}, host"] = of_the_host(partial(strategy.run, step))
    if torch is not None:
        parameters = [torch.ones(shape, device="cuda", requires_grad=True) for shape in RESNET50]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        fused = torch.optim.Adam(parameters, fused=True)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        fused.step()
        torch.cuda._sleep(100_000_000)  # cycles: all steps are on the stream before the first begins
        start.record()
        for _ in range(REPEATS):
            fused.step()
        stop.record()
        stop.synchronize()
        found["torch's fused Adam, host"] = of_the_host(fused.step)
        found["torch's fused Adam"] = float(start.elapsed_time(stop)) / 1e3 / REPEATS
        over += ["Adam"] if found["Adam"] > ADAM_TORCH * found["torch's fused Adam"] else []
    return found, over


def hidden() -> tuple[Figures, list[str]]:
    """An all-reduce beside matrix products, a GPU for each rank; on several nodes also what `wire` saves."""
    with ms.MirroredStrategy("gpu") as strategy:
        width, nbytes = (8192, 64 * MIB) if IS_GPU else (64, 65536)
        matrix, total = cupy.ones((width, width), "float32"), cupy.ones(nbytes // 4, "float32")

        def compute() -> None:
            for _ in range(4):
                matrix @ matrix

        def both() -> None:
            handle = ms.get_replica_context().all_reduce_async("SUM", total, out=total)
            compute()
            handle.wait()

        found = {
            "products": to_the_end(compute),
            "all-reduce": to_the_end(sums(strategy, total, total)),
            "both at once": to_the_end(partial(strategy.run, both)),
        }
        for wire in ("float16", "bfloat16"):
            found[f"wire {wire}"] = to_the_end(sums(strategy, total, total, wire))
    return found, []


PARTS: dict[str, Part] = {
    **{each.__name__: each for each in (limits, host, optimizers, hidden)},
    **{path: partial(on_path, path) for path in ("staged", "mpi", "nccl")},
}


def in_words(value: float) -> str:
    """Return seconds, or bytes a second, in words."""
    return f"{value / 1e9:.1f} GB/s" if value > 1e3 else f"{value * 1e6:.0f} us"


def main() -> None:
    """Measure what the command line names."""
    file, part = sys.argv[1:]
    found: Figures = {}
    over: list[str] = []
    try:
        found, over = PARTS[part]()
        text = "; ".join(f"{name}: {in_words(value)}" for name, value in found.items())
    except NotHereError as error:
        text = f"not to be had here: {' '.join(str(error).split())}"
    if MPI.COMM_WORLD.rank == 0:
        report = {"figures": found, "text": text, "over": over if IS_GPU else []}
        Path(file).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
