"""torch's ImageNet example for DDP with mpistrategy, with accumulation, a schedule and clipping.

The lines that differ are marked.  The data are made here, so that nothing is downloaded; the network is a small one.
Start it with: mpiexec -n 2 python scripts/examples/torch_imagenet.py --steps 100
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import mpistrategy as ms  # was: import torch.distributed as dist
import mpistrategy.torch as mst


def network() -> Any:
    def block(before: int, after: int) -> list[Any]:
        return [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]

    return nn.Sequential(*block(3, 8), *block(8, 16), *block(16, 16), nn.Flatten(), nn.Linear(64, 20))


def pictures(rows: int = 960) -> Any:
    generator = torch.Generator().manual_seed(3)
    classes = torch.randint(0, 20, (rows,), generator=generator)
    means = torch.randn(20, 3, 16, 16, generator=generator)
    noise = torch.randn(rows, 3, 16, 16, generator=generator)
    return torch.utils.data.TensorDataset(means[classes] * 0.5 + noise, classes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint")
    parser.add_argument("--restore")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64 if arguments.double else torch.float32)

    strategy = ms.MirroredStrategy()  # was: dist.init_process_group(...), and torchrun's variables
    torch.manual_seed(strategy.rank)
    data = pictures()
    batch = arguments.global_batch // strategy.size // arguments.accumulate
    sampler = mst.Sampler(data, strategy=strategy)  # was: DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=batch, sampler=sampler)

    model = mst.broadcast(network(), strategy=strategy)  # was: DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-4)
    optimizer = mst.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy)  # new
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=1000)
    progress = {"step": 0, "batch": 0}
    with strategy.scope():  # was: torch.save of state_dicts on rank 0, and torch.load
        checkpoint = ms.Checkpoint(
            model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, progress=progress
        )
    if arguments.restore:
        checkpoint.restore(arguments.restore)

    while progress["step"] < arguments.steps:
        for images, classes in sampler.over(loader):  # was: for ... in loader, after sampler.set_epoch(epoch)
            progress["batch"] += 1
            outputs = model(images.to(torch.get_default_dtype()))  # was: in model.no_sync(), but for the last batch
            loss = nn.functional.cross_entropy(outputs, classes) / arguments.accumulate
            loss.backward()
            if progress["batch"] % arguments.accumulate:
                continue
            optimizer.synchronize()  # new: the gradients are those of all ranks now
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress["step"] += 1
            if progress["step"] == arguments.steps:
                break

    if arguments.checkpoint:
        checkpoint.save(arguments.checkpoint)
    mean = mst.all_reduce(loss * arguments.accumulate, strategy=strategy)  # was: dist.all_reduce, and a division
    if strategy.rank == 0:
        print(f"after {arguments.steps} steps: loss {float(mean):.4f}")


if __name__ == "__main__":
    main()
