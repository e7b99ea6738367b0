"""What each operation asks CUDA for on the stand-in (tests/cuda_on_cpu), beside its budget; scripts/gpu_lane runs this.

    mpiexec -n 2 python scripts/gpu_counts.py FILE.json

Rank 0 writes the counts on each path as JSON; status 1: one is over its budget. The folders tests and
tests/cuda_on_cpu/python must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gpu_budgets import PATHS, over

import mpistrategy as ms
from mpistrategy.cli.bench import shapes
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.optimizers import SGD, Adam, Optimizer
from mpistrategy.options import GPU_PATH

#: Copies of so many bytes to the host are notes and norms, and no payload.
NOTE_BYTES = 1024


def operations(cupy: Any, strategy: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return what is counted, and the bytes of its arrays."""
    sizes = [tuple(min(length, 8) for length in shape) for shape in shapes.resnet50()]
    small = cupy.ones(1024, "float32")
    gradients = [cupy.ones(shape, "float32") for shape in sizes]
    total = 4 * sum(map(prod, sizes))

    def in_step(function: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: strategy.run(lambda: function(ms.get_replica_context()))

    def step_of(make: Callable[[], Optimizer]) -> Callable[[], Any]:
        with strategy.scope():
            variables, optimizer = [ms.Variable(np.ones(shape, np.float32)) for shape in sizes], make()
        return lambda: strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))

    def out_of(value: Any) -> Callable[[], Any]:
        return in_step(lambda ctx: ctx.all_reduce("SUM", value, out=value))

    return {
        "SUM of 4 KiB": (in_step(lambda ctx: ctx.all_reduce("SUM", small)), small.nbytes),
        "SUM of 4 KiB, in place": (out_of(small), small.nbytes),
        "SUM of 161 arrays": (in_step(lambda ctx: ctx.all_reduce("SUM", gradients)), total),
        "MEAN of 161 arrays": (in_step(lambda ctx: ctx.all_reduce("MEAN", gradients)), total),
        "SGD with momentum, 161 variables": (step_of(lambda: SGD(0.1, momentum=0.9)), total),
        "Adam, 161 variables": (step_of(lambda: Adam(0.1)), total),
        "Adam, clipped and checked": (step_of(lambda: Adam(0.1, global_clipnorm=1.0, nonfinite="raise")), total),
    }


def counts_of(work: Callable[[], Any], cupy: Any, nbytes: int) -> list[int]:
    """Return the counts of one call after the first two, in the order of `COUNTED`."""
    from cuda_counts import counted  # of the folder tests

    for _ in range(2):
        work()
    cupy.cuda.runtime.deviceSynchronize()
    with counted() as found:
        work()
    copies = found["copies_on_device"] + found["copies_to_host"] + found["copies_to_device"] + found["fills"]
    payload = found["bytes_to_host"] if found["bytes_to_host"] > NOTE_BYTES else 0
    kinds = [found[name] for name in ("launches", "records", "stream_waits", "host_waits")]
    return [kinds[0], copies, *kinds[1:], round(payload / nbytes)]


def main() -> int:
    """Count on all paths."""
    import cupy

    (file,) = sys.argv[1:]
    found, wrong = {}, []
    for path in PATHS:
        os.environ[GPU_PATH] = path
        with ms.MirroredStrategy("shared") as strategy:
            made = operations(cupy, strategy)
            found[path] = {name: counts_of(work, cupy, nbytes) for name, (work, nbytes) in made.items()}
            ranks = strategy.extended.communicator
            is_first, names = ranks.rank == 0, list(device_paths(ranks).by_name)
        wrong += over(path, found[path]) if names == [path] else [f"{path} is not to be had here"]
    if is_first:
        Path(file).write_text(json.dumps({"counts": found, "over": wrong}), encoding="utf-8")
        print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
