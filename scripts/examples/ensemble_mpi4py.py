"""An ensemble of logistic regressions in mpi4py alone: what scripts/examples/ensemble.py was made of.

    mpiexec -n 3 python scripts/examples/ensemble_mpi4py.py

The ranks form two groups.  A group fits some of the members, each with its rows spread over the group's ranks; in the
end all ranks know the mean and the spread of the members.
"""

import json
import sys

import numpy as np
from mpi4py import MPI

MEMBERS, STEPS, RATE, MOMENTUM = 5, 300, 0.3, 0.9

world = MPI.COMM_WORLD
groups = min(2, world.size)
mine = world.rank % groups
group = world.Split(mine, world.rank)

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
    own = np.array_split(drawn, group.size)[group.rank]
    weights, velocity = np.zeros(4), np.zeros(4)
    total = np.empty(4)
    for _ in range(STEPS):
        gradient = gradient_of(weights, own) / len(drawn)
        group.Allreduce(gradient, total, op=MPI.SUM)
        velocity = MOMENTUM * velocity + total
        weights = weights - RATE * velocity
    return weights


found = np.zeros((MEMBERS, 4))
for member in range(mine, MEMBERS, groups):
    weights = fit(member)
    if group.rank == 0:  # one rank of the group brings them
        found[member] = weights
world.Allreduce(MPI.IN_PLACE, found, op=MPI.SUM)
mean, spread = found.mean(axis=0), found.std(axis=0)

if world.rank == 0:
    print(f"{MEMBERS} members on {world.size} ranks in {groups} groups")
    print("weights:", " ".join(f"{one:.3f}+-{off:.3f}" for one, off in zip(mean, spread, strict=True)))
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found.tolist(), file)
