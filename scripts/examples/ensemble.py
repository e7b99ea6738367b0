"""An ensemble of logistic regressions inside an mpi4py code: each group of ranks has a strategy of its own.

    mpiexec -n 3 python scripts/examples/ensemble.py

It is scripts/examples/ensemble_mpi4py.py with a strategy in place of the sums over a group.  An error in one group ends
that group alone (`on_error="raise"`): the other groups' members are still found.
"""

import json
import sys

import numpy as np
from mpi4py import MPI

import mpistrategy as ms

MEMBERS, STEPS, RATE, MOMENTUM = 5, 300, 0.3, 0.9

world = MPI.COMM_WORLD
groups = min(2, world.size)
mine = world.rank % groups
strategy = ms.MirroredStrategy(communicator=world.Split(mine, world.rank), on_error="raise")

random = np.random.default_rng(0)
features = np.hstack([np.ones((3000, 1)), random.normal(size=(3000, 3))])
labels = (random.uniform(size=3000) < 1 / (1 + np.exp(-features @ [0.5, 1.0, -2.0, 0.0]))).astype(float)


def gradient_of(weights, rows):
    """Return the gradient of the summed cross-entropy of some rows."""
    chances = 1 / (1 + np.exp(-features[rows] @ weights))
    return features[rows].T @ (chances - labels[rows])


def fit(member):
    """Return the weights of one member, which sees rows drawn with replacement."""
    drawn = np.random.default_rng(member).integers(len(features), size=len(features))
    own = np.array_split(drawn, strategy.size)[strategy.rank]
    with strategy.scope():
        weights = ms.Variable(np.zeros(4))
        optimizer = ms.optimizers.SGD(RATE, momentum=MOMENTUM)

    def step():
        optimizer.apply_gradients([(gradient_of(weights[...], own) / len(drawn), weights)])

    for _ in range(STEPS):
        strategy.run(step)
    return weights.numpy()


found = np.zeros((MEMBERS, 4))
for member in range(mine, MEMBERS, groups):
    weights = fit(member)
    if strategy.rank == 0:  # one rank of the group brings them
        found[member] = weights
world.Allreduce(MPI.IN_PLACE, found, op=MPI.SUM)
mean, spread = found.mean(axis=0), found.std(axis=0)

if world.rank == 0:
    print(f"{MEMBERS} members on {world.size} ranks in {groups} groups")
    print("weights:", " ".join(f"{one:.3f}+-{off:.3f}" for one, off in zip(mean, spread, strict=True)))
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found.tolist(), file)
