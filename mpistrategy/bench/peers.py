"""Other libraries that users sum gradients with, where they are installed; none is ever required.

They run in the same processes as everything else, in turn with it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from mpistrategy.arrays import Array
from mpistrategy.bench.raw import RawRanks


class TorchGloo:
    """torch.distributed with gloo, as PyTorch users do it on CPUs."""

    BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's default

    def __init__(self, ranks: RawRanks) -> None:
        import torch
        import torch.distributed

        self.torch = torch
        torch.set_num_threads(1)
        store = None
        address = ""
        if ranks.rank == 0:
            host = _address()
            store = torch.distributed.TCPStore(host, 0, ranks.size, is_master=True, wait_for_workers=False)
            address = f"{host} {store.port}"
        host, port = ranks.broadcast_text(address).split()
        if store is None:
            store = torch.distributed.TCPStore(host, int(port), ranks.size, is_master=False)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=timedelta(seconds=120)
        )
        self.name = f"torch {torch.__version__} gloo"

    def all_reduce(self, array: Array) -> Callable[[], None]:
        """Return a call that sums `array` in place."""
        tensor = self.torch.from_numpy(array)
        all_reduce = self.torch.distributed.all_reduce

        def call() -> None:
            all_reduce(tensor)

        return call

    def all_reduce_each(self, arrays: Sequence[Array]) -> Callable[[], None]:
        """Return a call that sums the arrays in place, packed into buckets that travel at the same time."""
        torch = self.torch
        tensors = [torch.from_numpy(array) for array in arrays]
        buckets: list[list[Any]] = [[]]
        for tensor in tensors:
            if buckets[-1] and sum(t.nbytes for t in buckets[-1]) + tensor.nbytes > self.BUCKET_BYTES:
                buckets.append([])
            buckets[-1].append(tensor)
        flats = [torch.empty(sum(tensor.numel() for tensor in bucket)) for bucket in buckets]
        targets = [
            [part.view_as(tensor) for part, tensor in zip(flat.split([t.numel() for t in bucket]), bucket, strict=True)]
            for flat, bucket in zip(flats, buckets, strict=True)
        ]

        def call() -> None:
            works = []
            for flat, bucket, views in zip(flats, buckets, targets, strict=True):
                torch._foreach_copy_(views, bucket)
                works.append(torch.distributed.all_reduce(flat, async_op=True))
            for work, bucket, views in zip(works, buckets, targets, strict=True):
                work.wait()
                torch._foreach_copy_(bucket, views)

        return call

    def training_step(
        self, parameters: Sequence[Array], inputs: Array, classes: Array, rate: float, apart: bool
    ) -> tuple[Callable[[], None], list[Array]]:
        """Return a step of the network with these weights and biases, and views of them as they change.

        Args:
            parameters: weights (inputs, outputs) and biases, in turn.
            inputs: this rank's rows.
            classes: their classes.
            rate: the learning rate.
            apart: without communication; else with DistributedDataParallel.
        """
        torch = self.torch
        layers: list[Any] = []
        for weights, bias in zip(parameters[::2], parameters[1::2], strict=True):
            layer = torch.nn.Linear(*weights.shape)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(weights).T)
                layer.bias.copy_(torch.from_numpy(bias))
            layers += [layer, torch.nn.ReLU()]
        network = torch.nn.Sequential(*layers[:-1])
        views = [p.detach().numpy().T for p in network.parameters()]
        model = network if apart else torch.nn.parallel.DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        rows, targets = torch.from_numpy(inputs), torch.from_numpy(classes)

        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(rows), targets).backward()
            optimizer.step()

        return step, views

    def close(self) -> None:
        """Leave the process group.  Collective."""
        self.torch.distributed.destroy_process_group()


def _address() -> str:
    """Return an address of rank 0 that all ranks reach: loopback unless a network of theirs is named."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return socket.gethostbyname(socket.gethostname()) if interface else "127.0.0.1"


PEERS: dict[str, tuple[str, Callable[[RawRanks], Any]]] = {"torch": ("torch", TorchGloo)}


def open_peers(names: Sequence[str], ranks: RawRanks) -> tuple[list[Any], dict[str, str]]:
    """Start the named libraries; return those that run, and why each of the others does not.  Collective."""
    running, missing = [], {}
    for name in names:
        module, start = PEERS[name]
        if importlib.util.find_spec(module) is None:
            missing[name] = f"{module} is not installed"
        else:
            running.append(start(ranks))
    return running, missing
