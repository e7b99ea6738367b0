"""A multi-layer perceptron in JAX with optax: compiled gradients, their mean over the ranks, a compiled update.

Start it with: mpiexec -n 2 python scripts/examples/jax_mlp.py --steps 100
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpistrategy as ms
import mpistrategy.jax as msj

GLOBAL_BATCH = 24


def first_parameters(seed: int) -> Any:
    sizes = [16, 32, 32, 4]
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (before, after)) / before**0.5, "b": jnp.zeros(after)}
        for key, before, after in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def loss_of(parameters: Any, x: Any, y: Any) -> Any:
    for layer in parameters[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    scores = x @ parameters[-1]["w"] + parameters[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint")
    parser.add_argument("--restore")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", arguments.double)

    strategy = ms.MirroredStrategy()
    random = np.random.default_rng(1)
    y = random.integers(0, 4, 960)
    x = random.normal(size=(960, 16)) + random.normal(size=(4, 16))[y]
    data = ms.Dataset.from_arrays((x, y), GLOBAL_BATCH, shuffle_seed=2, epochs=None)
    batches = iter(strategy.experimental_distribute_dataset(data))

    parameters = msj.broadcast(first_parameters(strategy.rank), strategy=strategy)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = optimizer.init(parameters)
    with strategy.scope():
        checkpoint = ms.Checkpoint(parameters=parameters, state=state, batches=batches, step=0)
    if arguments.restore:
        checkpoint.restore(arguments.restore)
    objects = checkpoint.objects

    gradients_of = jax.jit(jax.value_and_grad(loss_of))

    @jax.jit
    def updated(parameters: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    while objects["step"] < arguments.steps:
        rows, classes = next(batches)
        loss, gradients = gradients_of(objects["parameters"], rows, classes)
        gradients = msj.average_gradients(gradients, strategy=strategy)  # between the compiled functions
        objects["parameters"], objects["state"] = updated(objects["parameters"], objects["state"], gradients)
        objects["step"] += 1

    if arguments.checkpoint:
        checkpoint.save(arguments.checkpoint)
    mean = msj.all_reduce(loss, strategy=strategy)
    if strategy.rank == 0:
        print(f"after {arguments.steps} steps: loss {float(mean):.4f}")


if __name__ == "__main__":
    main()
