"""torch.distributed with gloo, as PyTorch's users have it on CPUs; and the benchmark's network in torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from libraries import Start, TrainingStep
from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Variant
from mpistrategy.cli.bench.raw import RawRanks

PACKAGE = "torch"


class TorchGloo:
    """Sums in place; lists in buckets."""

    BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's default

    def __init__(self, ranks: RawRanks, nodes: int) -> None:
        import torch
        import torch.distributed

        self.torch = torch
        torch.set_num_threads(1)
        if nodes == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = None
        address = ""
        if ranks.rank == 0:
            host = socket.gethostbyname(socket.gethostname()) if nodes > 1 else "127.0.0.1"
            store = torch.distributed.TCPStore(host, 0, ranks.size, is_master=True, wait_for_workers=False)
            address = f"{host} {store.port}"
        host, port = ranks.broadcast_text(address).split()
        if store is None:
            store = torch.distributed.TCPStore(host, int(port), ranks.size, is_master=False)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=timedelta(seconds=120)
        )
        self.name = f"torch {torch.__version__} gloo"

    def one_array(self, array: Array) -> Iterator[Variant]:
        """Yield a sum of `array` in place."""
        tensor = self.torch.from_numpy(array)
        all_reduce = self.torch.distributed.all_reduce

        def call() -> None:
            all_reduce(tensor)

        yield Variant(self.name, call, [array])

    def gradients(self, arrays: Sequence[Array]) -> Iterator[Variant]:
        """Yield a sum of the arrays in place, packed into buckets that travel at the same time."""
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

        yield Variant(f"{self.name}, buckets", call, arrays)

    def training_steps(
        self, parameters: Sequence[Array], inputs: Array, classes: Array, rate: float
    ) -> Iterator[TrainingStep]:
        """Yield the step of the network with these weights and biases, apart and with DistributedDataParallel."""
        torch = self.torch
        for name, apart in (("torch, no communication", True), ("torch DDP gloo", False)):
            bare = network(parameters)
            model = bare if apart else torch.nn.parallel.DistributedDataParallel(bare)
            optimizer = torch.optim.SGD(model.parameters(), rate)
            yield training_step(name, model, optimizer, inputs, classes, apart=apart)

    def close(self) -> None:
        """Leave the process group.  Collective."""
        self.torch.distributed.destroy_process_group()


def network(parameters: Sequence[Array]) -> Any:
    """Return the network with these weights and biases."""
    import torch

    layers: list[Any] = []
    for weights, bias in zip(parameters[::2], parameters[1::2], strict=True):
        layer = torch.nn.Linear(*weights.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weights).T)
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def training_step(
    name: str, model: Any, optimizer: Any, inputs: Array, classes: Array, *, apart: bool = False
) -> TrainingStep:
    """Return a step of `model`, a network as above or what a library has put around it, by `optimizer`."""
    import torch

    rows, targets = torch.from_numpy(inputs), torch.from_numpy(classes)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()

    return TrainingStep(name, step, [parameter.detach().numpy().T for parameter in model.parameters()], apart)


PEER: Start = TorchGloo
