"""A fully connected classifier in NumPy, with its gradients written out, for the training steps that are timed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

RATE = 0.01
ROWS = 64


def initial(widths: Sequence[int]) -> list[Array]:
    """Return weights and biases, in turn, the same on every rank."""
    random = np.random.default_rng(0)
    parameters: list[Array] = []
    for width_in, width_out in pairwise(widths):
        weights = random.standard_normal((width_in, width_out), np.float32)
        weights *= np.float32(np.sqrt(2 / width_in))
        parameters += [weights, np.zeros(width_out, np.float32)]
    return parameters


def rows(widths: Sequence[int], rank: int) -> tuple[Array, npt.NDArray[np.int64]]:
    """Return a rank's own rows and their classes."""
    random = np.random.default_rng(1 + rank)
    return random.standard_normal((ROWS, widths[0]), np.float32), random.integers(0, widths[-1], ROWS)


def gradients(
    parameters: Sequence[Array], inputs: Array, classes: npt.NDArray[np.int64], out: Sequence[Array], scale: float
) -> None:
    """Write `scale` times the gradient of the mean cross-entropy into `out`."""
    layers = len(parameters) // 2
    outputs = [inputs]
    for layer in range(layers):
        output = outputs[-1] @ parameters[2 * layer]
        output += parameters[2 * layer + 1]
        if layer < layers - 1:
            np.maximum(output, 0, out=output)
        outputs.append(output)
    delta = outputs.pop()
    delta -= delta.max(axis=1, keepdims=True)
    np.exp(delta, out=delta)
    delta /= delta.sum(axis=1, keepdims=True)
    delta[np.arange(len(classes)), classes] -= 1
    delta *= np.float32(scale / len(classes))
    for layer in reversed(range(layers)):
        np.matmul(outputs[layer].T, delta, out=out[2 * layer])
        np.add.reduce(delta, axis=0, out=out[2 * layer + 1])
        if layer:
            delta = delta @ parameters[2 * layer].T
            delta *= outputs[layer] > 0
