"""Steps of SGD and Adam on 25 million parameters and on ten small ones, beside mpi4py's sums and NumPy's update.

The gradients are given, in arrays or in an arena.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpistrategy as ms
from timing import medians, seconds_in_turns

RATE = np.float32(0.01)
Shapes = list[tuple[int, ...]]
MODELS: dict[str, Shapes] = {
    "25 M": [(1024, 4096), (4096, 4096), (4096, 1000), (9192,)],
    "ten small": [(8, 3)] * 10,
}


def by_optimizer(strategy: ms.Strategy, make: type, shapes: Shapes, arena: bool) -> Callable[[], None]:
    """Return a step of an optimizer of ours."""
    with strategy.scope():
        variables = [ms.Variable(np.zeros(shape, np.float32)) for shape in shapes]
        optimizer = make(RATE)
        optimizer.build(variables)
    gradients = optimizer.gradient_arena(variables).values if arena else [np.ones(s, np.float32) for s in shapes]
    return lambda: strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))


def by_mpi4py(shapes: Shapes) -> Callable[[], None]:
    """Return a step of gradient descent as one writes it without this library."""
    parameters = [np.zeros(shape, np.float32) for shape in shapes]
    gradients = [np.zeros(shape, np.float32) for shape in shapes]

    def step() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradient)
            gradient *= RATE
            parameter -= gradient

    return step


def measure(options: argparse.Namespace) -> None:
    """Print a line a variant."""
    with ms.MirroredStrategy() as strategy:
        for name, shapes in MODELS.items():
            steps = {"mpi4py and NumPy, SGD": by_mpi4py(shapes)}
            for make in (ms.optimizers.SGD, ms.optimizers.Adam):
                steps[make.__name__] = by_optimizer(strategy, make, shapes, arena=False)
                steps[f"{make.__name__}, arena"] = by_optimizer(strategy, make, shapes, arena=True)
            seconds = medians(seconds_in_turns(steps, options.rounds, 1 if name == "25 M" else 100))
            if strategy.rank == 0:
                for step, median in seconds.items():
                    print(f"{name:10} {step:24} {1e6 * median:12.1f} us a step", flush=True)
