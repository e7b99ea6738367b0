"""Figures of kernels and of NCCL on arrays in GPU memory; scripts/gpu_lane runs this.

    mpiexec -n RANKS python scripts/gpu_kernels.py FILE.json PART

PART is one of: optimizers (one rank: fused steps beside torch's and beside a copy of as many bytes), nccl1 (one rank:
our NCCL path beside bare NCCL), hidden (a GPU for each rank: how much of an all-reduce a matrix product hides). Rank 0
writes what it found as JSON. On a stand-in for a GPU the figures mean nothing. The folders scripts, tests and
tests/doubles must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import cuda_counts
import numpy as np
from gpu_figures import ON_DEVICE, nccls_own, on_stream, seconds_of

import mpistrategy as ms
from mpistrategy.cli.bench import shapes
from mpistrategy.mpi.gpu.transports import nccl
from mpistrategy.training import formulas
from mpistrategy.training.gpu_update import FusedUpdate

Figures = dict[str, Any]
IS_GPU = not cuda_counts.IS_COUNTED
MIB = 2**20
SIZES = (4096, MIB, 64 * MIB) if IS_GPU else (4096, 65536)
REPEATS = 20 if IS_GPU else 2
STEPS: dict[str, tuple[formulas.Kernel, tuple[str, ...]]] = {
    "SGD": (partial(formulas.sgd, rate=0.1), ()),
    "SGD with momentum": (partial(formulas.momentum, rate=0.1, decay=0.9, nesterov=False), ("momentum",)),
    "Adam": (partial(formulas.adam, size=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7), ("m", "v")),
}


def passes(slots: int) -> int:
    """Return how often a step goes over memory as large as the variables: all is read once, all but gradients written.

    The kernel reads each element into registers first, and writes at the end: its source has one load and one store.
    """
    return (2 + slots) + (1 + slots)


def sizes_of_resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of the 161 arrays; small ones on a stand-in."""
    made = shapes.resnet50()
    return made if IS_GPU else [tuple(min(length, 8) for length in shape) for shape in made]


def optimizers(cupy: Any) -> Figures:
    """Steps of 161 variables by the fused kernels, beside torch's and beside a copy of the bytes that must move."""
    wanted = sizes_of_resnet50()
    parameters, gradients = ([cupy.ones(shape, "float32") for shape in wanted] for _ in range(2))
    nbytes = 4 * sum(map(prod, wanted))
    one, other = (cupy.empty(nbytes, "uint8") for _ in range(2))
    stream, copy = cupy.cuda.get_current_stream().ptr, cupy.cuda.runtime.memcpyAsync
    of_copy = on_stream(cupy, lambda: copy(other.data.ptr, one.data.ptr, nbytes, ON_DEVICE, stream), REPEATS)
    found: Figures = {"bytes": nbytes, "copy": 2 * nbytes / of_copy, "torch": _torchs_adam(wanted)}
    for name, (kernel, kept) in STEPS.items():
        slots = [{slot: cupy.zeros(shape, "float32") for slot in kept} for shape in wanted]
        update = FusedUpdate(parameters, slots)

        def step(update: FusedUpdate = update, kernel: formulas.Kernel = kernel) -> None:
            assert update.run(kernel, gradients), "there is no kernel"

        seconds, moved = on_stream(cupy, step, REPEATS), passes(len(kept)) * nbytes
        found[name] = {"seconds": seconds, "passes": passes(len(kept)), "of a copy": moved / seconds / found["copy"]}
        if not IS_GPU:
            step()
            with cuda_counts.counted() as counts:
                step()
            found[name]["launches"] = counts["launches"]
            found[name]["copied"] = sum(counts[each] for each in ("bytes_on_device", "bytes_to_host"))
    return found


def _torchs_adam(wanted: list[tuple[int, ...]]) -> float | None:
    """Return the seconds of a step of torch's fused Adam; None without a torch that has the GPU."""
    try:
        import torch

        if not torch.cuda.is_available():
            return None
    except ImportError:
        return None
    parameters = [torch.ones(shape, device="cuda", requires_grad=True) for shape in wanted]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(parameters, 0.001, fused=True)
    for _ in range(3):
        optimizer.step()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(100_000_000)  # cycles: all steps are on the stream before the first begins
    start.record()
    for _ in range(REPEATS):
        optimizer.step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / REPEATS


def nccl1(cupy: Any) -> Figures:
    """Our NCCL path on one rank beside the same call of NCCL."""
    strategy = ms.MirroredStrategy("shared")
    ranks = strategy.extended.communicator
    path = nccl.join(ranks)
    assert not isinstance(path, str), path
    found: Figures = {"version": nccl.version()}
    for nbytes in SIZES:
        buffer = cupy.ones(nbytes // 4, "float32")
        calls = {"ours": partial(path.reduce, ranks, buffer, "SUM"), "NCCL": nccls_own(cupy, path, buffer)}
        found[str(nbytes)] = {name: seconds_of(cupy, None, call, REPEATS) for name, call in calls.items()}
        assert float(buffer.sum()) == nbytes // 4, "a wrong sum"
    path.free()
    strategy.close()
    return found


def hidden(cupy: Any) -> Figures:
    """Which share of an all-reduce's time goes by while the program's stream computes; a GPU for each rank.

    Started on several nodes, it shows what `wire` saves; on one node that changes nothing.
    """
    strategy = ms.MirroredStrategy("gpu")
    width, nbytes = (8192, 64 * MIB) if IS_GPU else (64, 65536)
    matrix, total = cupy.ones((width, width), "float32"), cupy.ones(nbytes // 4, "float32")
    products = 4

    def compute() -> None:
        for _ in range(products):
            matrix @ matrix

    def reduce(wire: Any = None) -> None:
        options = ms.CommunicationOptions(wire=wire)
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", total, options, out=total))

    def both() -> None:
        def step() -> None:
            handle = ms.get_replica_context().all_reduce_async("SUM", total, out=total)
            compute()
            handle.wait()

        strategy.run(step)

    found = {
        name: seconds_of(cupy, strategy, work, REPEATS)
        for name, work in (("compute", compute), ("all-reduce", reduce), ("both", both))
    }
    for wire in ("float16", "bfloat16"):
        found[f"all-reduce, wire {wire}"] = seconds_of(cupy, strategy, partial(reduce, wire), REPEATS)
    found["hidden"] = (found["compute"] + found["all-reduce"] - found["both"]) / found["all-reduce"]
    strategy.close()
    return found


PARTS: dict[str, Callable[[Any], Figures]] = {"optimizers": optimizers, "nccl1": nccl1, "hidden": hidden}


def main() -> None:
    """Measure what the command line names."""
    import cupy

    file, part = sys.argv[1:]
    began = time.perf_counter()
    found = PARTS[part](cupy)
    print(part, round(time.perf_counter() - began, 1), "s", flush=True)
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        Path(file).write_text(json.dumps(found, default=np.generic.item), encoding="utf-8")


if __name__ == "__main__":
    main()
