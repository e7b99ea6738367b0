"""`mpistrategy.cli.bench.cases.network`'s classifier in torch, for the libraries that train torch's networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.peers.installed import TrainingStep


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
