"""Times steps of three torch models: without communication, with mpistrategy.torch, DDP and Horovod.

    scripts/mpirun -n 2 scripts/bench torch_steps [--models mlp cnn transformer]
    ... --all-reduce                         single all-reduces beside gloo and mpi4py
    ... --memory VARIANT [--models mlp]      the memory that gradients take

Needs torch: scripts/test_frameworks --only-install.  Horovod takes part where Python has it.  Horovod 0.28.1 compiles
against torch 2.13 and MPICH as C++17, with cmake and a compiler: set CMAKE_CXX_STANDARD to 17 in CMakeLists.txt and
horovod/torch/CMakeLists.txt of its sdist, and build a wheel with HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1
HOROVOD_WITHOUT_GLOO=1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import mpistrategy as ms
import mpistrategy.torch as mst
from turns import times_in_turns

try:
    import horovod.torch as hvd
except ImportError:
    hvd = None

WORLD = MPI.COMM_WORLD
#: DDP's names say by which backend it travels.
VARIANTS = (
    *("compute", "optimizer", "DDP-mpistrategy", "DDP-mpistrategy-views", "DDP-gloo", "DDP-gloo-views"),
    *(["Horovod"] if hvd else []),
)
OURS = VARIANTS[1:4]


class Transformer(torch.nn.Module):
    """A small language model: 10 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(256, 384)
        layer = torch.nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = torch.nn.Linear(384, 256)

    def forward(self, words: Any) -> Any:
        return self.head(self.layers(self.words(words))).flatten(0, 1)


def mlp() -> tuple[Any, Any, Any]:
    layers = [torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4096), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4096, 1024)), torch.randn(32, 1024), torch.randint(1024, (32,))


def cnn() -> tuple[Any, Any, Any]:
    nn = torch.nn
    layers = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))
    return net, torch.randn(32, 1, 28, 28), torch.randint(10, (32,))


def transformer() -> tuple[Any, Any, Any]:
    return Transformer(), torch.randint(256, (4, 64)), torch.randint(256, (256,))


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


GROUPS: dict[str, Any] = {}


def start_groups(strategy: ms.Strategy) -> None:
    """Make the process groups of torch: ours is the default one."""
    if len(set(WORLD.allgather(socket.gethostname()))) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mst.init_process_group(strategy)
    GROUPS["mpistrategy"] = torch.distributed.group.WORLD
    GROUPS["gloo"] = torch.distributed.new_group(backend="gloo")


@contextlib.contextmanager
def at_work(variant: str) -> Iterator[None]:
    """Let Horovod's thread, which looks for work all the time, run only while Horovod is timed."""
    if variant == "Horovod":
        hvd.init()
    try:
        yield
    finally:
        if variant == "Horovod":
            hvd.shutdown()


def step_of(variant: str, model: str, strategy: ms.Strategy) -> tuple[Callable[[], None], Any]:
    """Return a training step, and the model that it trains."""
    torch.manual_seed(WORLD.rank)
    net, x, y = MODELS[model]()
    mst.broadcast(net, strategy=strategy)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    called = net
    if variant == "optimizer":
        optimizer = mst.DistributedOptimizer(optimizer, strategy=strategy)
    elif variant == "Horovod":
        with at_work(variant):
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    elif variant != "compute":
        group = GROUPS[variant.split("-")[1]]
        views = variant.endswith("views")
        called = torch.nn.parallel.DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=views)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(called(x), y).backward()
        optimizer.step()

    return step, net


def times_of(model: str, rounds: int, strategy: ms.Strategy) -> None:
    """Print how long a step takes, until the slowest rank has made it: each variant in turn."""
    steps = {variant: step_of(variant, model, strategy) for variant in VARIANTS}

    def at_its_turn(variant: str) -> Callable[[], None]:
        step = steps[variant][0]

        def three_steps() -> None:
            with at_work(variant):
                for _ in range(3):
                    step()

        return three_steps

    found = times_in_turns({variant: at_its_turn(variant) for variant in VARIANTS}, rounds)
    mine, *others = (list(steps[name][1].parameters()) for name in VARIANTS[1:])
    alike = max(
        float((one - other).detach().abs().max()) for theirs in others for one, other in zip(mine, theirs, strict=True)
    )
    if WORLD.rank == 0:
        middle = {variant: statistics.median(times) / 3 for variant, times in found.items()}
        size = sum(tensor.numel() for tensor in mine)
        print(f"{model}: {size / 1e6:.1f} M parameters; the variants' differ by {alike:.1e} at most", flush=True)
        for variant, value in middle.items():
            print(f"  {variant:22} {1e3 * value:8.2f} ms a step")
        for ours in OURS:
            for other in VARIANTS[4:]:
                more = middle[ours] - middle["compute"], middle[other] - middle["compute"]
                print(f"  ({ours} - compute) / ({other} - compute) = {more[0] / more[1]:.2f}", flush=True)


def all_reduces(rounds: int) -> None:
    """Print how long one all-reduce takes: torch's by both backends, and mpi4py's, in turns."""
    for count in (1, 2**14, 2**18, 2**24):
        tensor = torch.zeros(count)
        array = tensor.numpy()
        calls = {
            "mpistrategy": partial(torch.distributed.all_reduce, tensor),
            "gloo": partial(torch.distributed.all_reduce, tensor, group=GROUPS["gloo"]),
            "mpi4py": partial(WORLD.Allreduce, MPI.IN_PLACE, array),
        }
        found = times_in_turns(calls, rounds, repeats=max(1, min(50, 2**22 // count)))
        if WORLD.rank == 0:
            words = ", ".join(f"{name} {1e6 * statistics.median(times):.1f} us" for name, times in found.items())
            print(f"all_reduce of {4 * count} bytes: {words}", flush=True)


class Watch:
    """The most memory that this process has while it is entered, in its share of what processes have in common."""

    def __enter__(self) -> Watch:
        self.most, self._over = 0, threading.Event()
        self.before = _share_of_memory()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.most = max(self.most, _share_of_memory())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def grown(self) -> float:
        return (self.most - self.before) / 2**20


def _share_of_memory() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def memory_of(model: str, variants: Sequence[str], strategy: ms.Strategy) -> None:
    """Print how much memory five steps take more than before the first, of each variant.

    What one variant gives back the next one takes without growing: ask for one in each job.
    """
    for variant in variants:
        step, net = step_of(variant, model, strategy)
        WORLD.Barrier()
        with at_work(variant), Watch() as watch:
            for _ in range(5):
                step()
            WORLD.Barrier()
        grown = WORLD.allreduce(watch.grown, MPI.MAX)
        if WORLD.rank == 0:
            size = sum(tensor.nbytes for tensor in net.parameters()) / 2**20
            print(f"{model}, {size:.0f} MiB of parameters: {variant:18} {grown:8.1f} MiB more at most", flush=True)
        del step, net


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--all-reduce", action="store_true", help="time single all-reduces, not steps")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--memory", nargs="+", choices=VARIANTS, metavar="VARIANT", help="measure their memory, not times"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    strategy = ms.MirroredStrategy()
    start_groups(strategy)
    if arguments.all_reduce:
        all_reduces(arguments.rounds)
    for model in arguments.models if not arguments.all_reduce else ():
        if arguments.memory:
            memory_of(model, arguments.memory, strategy)
        else:
            times_of(model, arguments.rounds, strategy)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
