"""Times a training step of 25 million parameters: without communication, with mpi4py, and with mpistrategy.

    scripts/mpirun -n 2 scripts/bench training_steps [--widths 64 128 10] [--rounds N]

A classifier in NumPy, 64 rows a rank, float32, stochastic gradient descent.  The variants take turns.  Each must end
with the parameters that one process computes for the rows of all ranks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

import mpistrategy as ms
from network import RATE, Array, gradients, initial, rows
from turns import times_in_turns

WORLD = MPI.COMM_WORLD
ALONE = "no communication"
#: Sums are taken in another order.
TOLERANCE = 1e-3


def descend(parameters: Sequence[Array], totals: Sequence[Array]) -> None:
    """Make the step of gradient descent."""
    for parameter, total in zip(parameters, totals, strict=True):
        total *= np.float32(RATE)
        parameter -= total


def expected(widths: Sequence[int], steps: int) -> list[Array]:
    """Return the parameters after some steps, computed here for all ranks."""
    parameters = initial(widths)
    totals, mine = ([np.zeros_like(array) for array in parameters] for _ in range(2))
    for _ in range(steps):
        for total in totals:
            total[...] = 0
        for rank in range(WORLD.size):
            gradients(parameters, *rows(widths, rank), mine, 1 / WORLD.size)
            for total, array in zip(totals, mine, strict=True):
                total += array
        descend(parameters, totals)
    return parameters


def by_hand(
    widths: Sequence[int], mine: Sequence[Array], exchange: Callable[[], object]
) -> tuple[list[Array], Callable[[], None]]:
    """Return parameters, and a step that `exchange` lets sum `mine` over the ranks in place."""
    parameters, own = initial(widths), rows(widths, WORLD.rank)

    def step() -> None:
        gradients(parameters, *own, mine, 1 / WORLD.size)
        exchange()
        descend(parameters, mine)

    return parameters, step


def by_optimizer(
    widths: Sequence[int], strategy: ms.Strategy, *, in_arena: bool
) -> tuple[list[Array], Callable[[], None]]:
    """Return parameters, and a step by the library's optimizer, with the gradients in an arena or in arrays."""
    own = rows(widths, WORLD.rank)
    with strategy.scope():
        variables = [ms.Variable(value) for value in initial(widths)]
        optimizer = ms.optimizers.SGD(RATE)
        optimizer.build(variables)
    parameters = [np.asarray(variable) for variable in variables]  # views
    mine = optimizer.gradient_arena(variables).values if in_arena else [np.zeros_like(array) for array in parameters]

    def step() -> None:
        gradients(parameters, *own, mine, 1 / WORLD.size)
        optimizer.apply_gradients(zip(mine, variables, strict=True))

    return parameters, lambda: strategy.run(step)


def main() -> None:
    """Print a line a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=(1024, 4096, 4096, 1000), help="of the layers")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    widths, rounds = options.widths, options.rounds
    strategy = ms.MirroredStrategy()
    mine = [np.zeros_like(array) for array in initial(widths)]
    arena = strategy.arena(mine)

    def in_place() -> None:
        for array in mine:
            WORLD.Allreduce(MPI.IN_PLACE, array)

    def in_arena() -> None:
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", arena))

    variants = {
        ALONE: by_hand(widths, mine, lambda: None),
        "mpi4py in place": by_hand(widths, mine, in_place),
        "mpistrategy arena": by_hand(widths, arena.values, in_arena),
        "mpistrategy SGD": by_optimizer(widths, strategy, in_arena=False),
        "mpistrategy SGD, gradients in an arena": by_optimizer(widths, strategy, in_arena=True),
    }
    times = times_in_turns({name: step for name, (_, step) in variants.items()}, rounds)
    right = expected(widths, rounds + 2)
    alone = statistics.median(times[ALONE])
    for name, (parameters, _) in variants.items():
        if name != ALONE:
            for found, wanted in zip(parameters, right, strict=True):
                np.testing.assert_allclose(found, wanted, TOLERANCE, TOLERANCE)
        if WORLD.rank == 0:
            middle = statistics.median(times[name])
            print(f"{name:40} {1e3 * middle:9.2f} ms, {middle / alone:.3f} of {ALONE}", flush=True)
    arena.close()
    strategy.close()


if __name__ == "__main__":
    main()
