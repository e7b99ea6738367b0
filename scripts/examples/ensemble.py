"""An ensemble of logistic regressions inside an mpi4py code: each group of ranks has a strategy of its own.

    mpiexec -n 3 python scripts/examples/ensemble.py [report.json [rank that fails]]

A group fits some of the members, each with its rows spread over the group's ranks; in the end all ranks know the mean
and the spread of the members.  An error in one group ends that group alone (`on_error="raise"`): its ranks catch it,
all ranks meet, and those that are left fit its members.
"""

import json
import sys

import numpy as np
from mpi4py import MPI

import mpistrategy as ms

MEMBERS, STEPS, RATE, MOMENTUM = 5, 300, 0.3, 0.9
FAILS = int(sys.argv[2]) if len(sys.argv) > 2 else None

world = MPI.COMM_WORLD
random = np.random.default_rng(0)
features = np.hstack([np.ones((3000, 1)), random.normal(size=(3000, 3))])
labels = (random.uniform(size=3000) < 1 / (1 + np.exp(-features @ [0.5, 1.0, -2.0, 0.0]))).astype(float)


def gradient_of(weights, rows):
    """Return the gradient of the summed cross-entropy of some rows."""
    if world.rank == FAILS:
        raise FloatingPointError("no gradient")
    chances = 1 / (1 + np.exp(-features[rows] @ weights))
    return features[rows].T @ (chances - labels[rows])


def fit(strategy, member):
    """Return the weights of one member, which sees rows drawn with replacement."""
    drawn = np.random.default_rng(member).integers(len(features), size=len(features))
    own = np.array_split(drawn, strategy.size)[strategy.rank]
    weights = ms.Variable(np.zeros(4))
    optimizer = ms.optimizers.SGD(RATE, momentum=MOMENTUM)

    def step():
        optimizer.apply_gradients([(gradient_of(weights[...], own) / len(drawn), weights)])

    for _ in range(STEPS):
        strategy.run(step)
    return weights.numpy()


ranks, found, todo = world, np.zeros((MEMBERS, 4)), list(range(MEMBERS))
while todo and ranks != MPI.COMM_NULL:
    groups = min(2, ranks.size)
    mine = ranks.rank % groups
    fitted, has_failed = np.zeros((MEMBERS, 4)), False
    try:
        with ms.MirroredStrategy(communicator=ranks.Split(mine, ranks.rank), on_error="raise") as strategy:
            for member in todo[mine::groups]:
                weights = fit(strategy, member)
                if strategy.rank == 0:  # one rank of the group brings them
                    fitted[member] = weights
    except (FloatingPointError, ms.errors.RemoteError) as error:
        print(f"rank {world.rank} leaves: {type(error).__name__}: {error}", flush=True)
        has_failed = True
    # All ranks meet here, those of a group that has failed as well; the communicator that goes on is without them.
    ranks = ranks.Split(MPI.UNDEFINED if has_failed else 0, ranks.rank)
    if ranks != MPI.COMM_NULL:
        with ms.MirroredStrategy(communicator=ranks) as everybody:
            found += everybody.reduce("SUM", fitted)
        todo = [member for member in todo if not found[member].any()]

if ranks != MPI.COMM_NULL and ranks.rank == 0:
    print(f"{MEMBERS} members on {world.size} ranks in {min(2, world.size)} groups")
    print("weights:", " ".join(f"{one:.3f}+-{off:.3f}" for one, off in zip(found.mean(0), found.std(0), strict=True)))
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found.tolist(), file)
