"""Horovod's torch MNIST example with mpistrategy: the lines that differ are marked.

Horovod's program is examples/pytorch/pytorch_mnist.py.  The data are made here, so that nothing is downloaded.
Start it with: mpiexec -n 2 python scripts/examples/torch_mnist.py --steps 100
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn import functional

import mpistrategy as ms  # was: import horovod.torch as hvd
import mpistrategy.torch as mst

GLOBAL_BATCH = 12  # Horovod's is each rank's


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = torch.nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = torch.nn.Linear(320, 50)
        self.fc2 = torch.nn.Linear(50, 10)

    def forward(self, x: Any) -> Any:
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2))
        x = functional.relu(self.fc1(x.view(-1, 320)))
        return functional.log_softmax(self.fc2(x), dim=1)


def digits(rows: int = 1200) -> Any:
    """Return pictures of 10 classes: a bright square at a place of its own, in noise."""
    generator = torch.Generator().manual_seed(7)
    classes = torch.arange(rows) % 10
    pictures = torch.randn(rows, 1, 28, 28, generator=generator) * 0.3
    for number, kind in enumerate(classes.tolist()):
        pictures[number, 0, 5 * (kind // 5) + 4 : 5 * (kind // 5) + 9, 5 * (kind % 5) + 1 : 5 * (kind % 5) + 6] += 1
    return torch.utils.data.TensorDataset(pictures, classes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint")
    parser.add_argument("--restore")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64 if arguments.double else torch.float32)

    strategy = ms.MirroredStrategy()  # was: hvd.init()
    torch.manual_seed(42 + strategy.rank)
    data = digits()
    sampler = mst.Sampler(data, strategy=strategy)  # was: DistributedSampler(data, num_replicas=hvd.size(), ...)
    loader = torch.utils.data.DataLoader(data, batch_size=GLOBAL_BATCH // strategy.size, sampler=sampler)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    mst.broadcast(model, strategy=strategy)  # was: hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    mst.broadcast(optimizer, strategy=strategy)  # was: hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = mst.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy)  # no op=, compression=
    progress = {"step": 0}
    with strategy.scope():
        checkpoint = ms.Checkpoint(model=model, optimizer=optimizer, sampler=sampler, progress=progress)
    if arguments.restore:
        checkpoint.restore(arguments.restore)

    model.train()
    while progress["step"] < arguments.steps:
        for pictures, classes in sampler.over(loader):  # was: for ... in loader, after sampler.set_epoch(epoch)
            optimizer.zero_grad()
            loss = functional.nll_loss(model(pictures.to(torch.get_default_dtype())), classes)
            loss.backward()
            optimizer.step()
            progress["step"] += 1
            if progress["step"] == arguments.steps:
                break

    mean = mst.all_reduce(loss, strategy=strategy)  # was: hvd.allreduce(loss, name="loss")
    if arguments.checkpoint:
        checkpoint.save(arguments.checkpoint)
    if strategy.rank == 0:
        print(f"after {arguments.steps} steps: loss {float(mean):.4f}")


if __name__ == "__main__":
    main()
