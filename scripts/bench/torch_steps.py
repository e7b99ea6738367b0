"""Steps of torch models without communication, with `mpistrategy.torch` and by DDP on ours and on gloo; all-reduces.

The variants take turns, and must end with the same parameters.  Needs torch: scripts/test --frameworks.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import mpistrategy as ms
import mpistrategy.torch as mst
from timing import medians, seconds_in_turns

WORLD = MPI.COMM_WORLD
COUNTS = (1, 2**14, 2**18, 2**24)
STEPS = 3


def mlp() -> tuple[Any, Any, Any]:
    layers = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024)]
    return nn.Sequential(*layers), torch.randn(32, 1024), torch.randint(1024, (32,))


def cnn() -> tuple[Any, Any, Any]:
    layers = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers, *head), torch.randn(32, 1, 28, 28), torch.randint(10, (32,))


MODELS = {"mlp": mlp, "cnn": cnn}


def steps_of(variant: str, model: str, gloo: Any) -> tuple[Callable[[], None], Any]:
    """Return some training steps, and the network that they train."""
    torch.manual_seed(WORLD.rank)
    net, x, y = MODELS[model]()
    mst.broadcast(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    called = net
    if variant == "DistributedOptimizer":
        optimizer = mst.DistributedOptimizer(optimizer)
    elif variant.startswith("DDP"):
        group = gloo if variant.endswith("gloo") else torch.distributed.group.WORLD
        called = nn.parallel.DistributedDataParallel(net, process_group=group)

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(called(x), y).backward()
            optimizer.step()

    return steps, net


def training(model: str, rounds: int, gloo: Any) -> None:
    """Print how long a step takes, until the slowest rank has made it."""
    variants = ("alone", "DistributedOptimizer", "DDP on mpistrategy", "DDP on gloo")
    runs = {variant: steps_of(variant, model, gloo) for variant in variants}
    seconds = medians(seconds_in_turns({variant: steps for variant, (steps, _) in runs.items()}, rounds))
    first, *parameters = (
        nn.utils.parameters_to_vector(runs[variant][1].parameters()).detach() for variant in variants[1:]
    )
    apart = max(float((vector - first).abs().max()) for vector in parameters)
    if WORLD.rank == 0:
        print(f"{model}: {len(first) / 1e6:.1f} M parameters; the variants' differ by {apart:.1e} at most")
        for variant, median in seconds.items():
            print(f"  {variant:22} {1e3 * median / STEPS:8.2f} ms a step", flush=True)


def measure(options: argparse.Namespace) -> None:
    """Print single all-reduces, and the steps of the models."""
    torch.set_num_threads(1)
    if len(set(WORLD.allgather(socket.gethostname()))) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    strategy = ms.MirroredStrategy()
    mst.init_process_group(strategy)
    gloo = torch.distributed.new_group(backend="gloo")
    for count in COUNTS:
        tensor = torch.zeros(count)
        calls = {
            "mpistrategy": partial(torch.distributed.all_reduce, tensor),
            "gloo": partial(torch.distributed.all_reduce, tensor, group=gloo),
            "mpi4py": partial(WORLD.Allreduce, MPI.IN_PLACE, tensor.numpy()),
        }
        seconds = medians(seconds_in_turns(calls, options.rounds, max(1, min(50, 2**22 // count))))
        if WORLD.rank == 0:
            print(f"{4 * count:>10} bytes", {name: f"{1e6 * median:.1f} us" for name, median in seconds.items()})
    with strategy.scope():
        for model in options.models:
            training(model, options.rounds, gloo)
    torch.distributed.destroy_process_group()
