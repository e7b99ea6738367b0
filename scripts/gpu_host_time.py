"""Time of the host in all-reduces of arrays in GPU memory, beside torch's by NCCL; scripts/gpu_lane runs it.

    python scripts/gpu_host_time.py FILE.json

One rank: nothing waits for a peer.  The file gets, for each operation, the microseconds until a call returns, those of
the same by torch.distributed where Python has a torch with CUDA, and how many functions of Python a call enters.  Torch
puts a list into one tensor, sums that, and copies back, as its DDP does; a result of its own is a copy that is summed.
On the stand-in (tests/cuda_on_cpu) the time is that of this thread on its core.  The folders tests and tests/doubles
must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import cuda_counts

import mpistrategy as ms
from mpistrategy.cli.bench import shapes

#: The most functions of Python that a call may enter.
LIMITS = {
    "SUM of 4 KiB": 75,
    "SUM of 4 KiB, in place": 70,
    "SUM of 161 arrays": 85,
    "SUM of 161 arrays, in place": 100,
    "SUM of 1000 arrays": 105,
    "SUM of an arena of 161 arrays": 84,
}
#: The gradients of ResNet-50, small ones of their kinds, and many.
LISTS = ([tuple(min(length, 8) for length in shape) for shape in shapes.resnet50()], shapes.tiny1000())
ROUNDS, CALLS = 15, 10
_now = time.thread_time if cuda_counts.IS_COUNTED else time.perf_counter


def operations(cupy: Any, strategy: Any) -> dict[str, Callable[[Any], Any]]:
    """Return for each operation what a step does, given its context."""
    small = cupy.ones(1024, "float32")
    gradients, many = ([cupy.ones(shape, "float32") for shape in listed] for listed in LISTS)
    arena = strategy.arena(gradients)
    return {
        "SUM of 4 KiB": lambda ctx: ctx.all_reduce("SUM", small),
        "SUM of 4 KiB, in place": lambda ctx: ctx.all_reduce("SUM", small, out=small),
        "SUM of 161 arrays": lambda ctx: ctx.all_reduce("SUM", gradients),
        "SUM of 161 arrays, in place": lambda ctx: ctx.all_reduce("SUM", gradients, out=gradients),
        "SUM of 1000 arrays": lambda ctx: ctx.all_reduce("SUM", many),
        "SUM of an arena of 161 arrays": lambda ctx: ctx.all_reduce("SUM", arena),
    }


@contextmanager
def torchs() -> Iterator[dict[str, Callable[[], Any]]]:
    """Give torch's calls by operation; none without a torch that has the GPU."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        yield {}
        return
    if not torch.cuda.is_available():
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        small = torch.ones(1024, device="cuda")
        gradients, many = ([torch.ones(shape, device="cuda") for shape in listed] for listed in LISTS)

        def summed(tensors: list[Any]) -> Any:
            flat = torch._utils._flatten_dense_tensors(tensors)
            dist.all_reduce(flat)
            return torch._utils._unflatten_dense_tensors(flat, tensors)

        yield {
            "SUM of 4 KiB": lambda: dist.all_reduce(small.clone()),
            "SUM of 4 KiB, in place": lambda: dist.all_reduce(small),
            "SUM of 161 arrays": lambda: summed(gradients),
            "SUM of 161 arrays, in place": lambda: torch._foreach_copy_(gradients, summed(gradients)),
            "SUM of 1000 arrays": lambda: summed(many),
        }
        dist.destroy_process_group()


def microseconds(cupy: Any, works: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the median times of the host for calls, in turns; the device is idle when a round begins."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(ROUNDS + 1):  # the first one is not counted
        for took, work in zip(times, works, strict=True):
            cupy.cuda.runtime.deviceSynchronize()
            start = _now()
            for _ in range(CALLS):
                work()
            took += [(_now() - start) / CALLS] if number else []
    cupy.cuda.runtime.deviceSynchronize()
    return [1e6 * statistics.median(took) for took in times]


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
    with torchs() as peers:
        for name, call in operations(cupy, strategy).items():
            peer = [peers[name]] if name in peers else []

            def in_step(
                call: Callable[[Any], Any] = call, peer: list[Callable[[], Any]] = peer
            ) -> tuple[list[float], int]:
                work = partial(call, ms.get_replica_context())
                for _ in range(3):
                    work()
                return microseconds(cupy, [work, *peer]), python_calls(work)

            (ours, *theirs), entered = strategy.run(in_step)
            found[name] = {"us": round(ours, 1), "python_calls": entered, "most_python_calls": LIMITS[name]}
            if theirs:
                found[name]["torch_us"] = round(theirs[0], 1)
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
