"""Programs that several tests start: one job of two programs, of which one uses the library."""

from __future__ import annotations

TRAIN = """
import sys
from mpi4py import MPI

world = MPI.COMM_WORLD
part = world.Split(0, world.rank)
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy(communicator=part)
if strategy.rank == 0:
    world.send(20, dest=2)
    given = world.recv(source=2)
else:
    given = None
given = int(strategy.broadcast(given if strategy.rank == 0 else 0))
total = strategy.reduce("SUM", np.full(100_000, given))[0]
if sys.argv[1:] and strategy.rank == 1:
    raise ValueError("a rank of the training")
sys.stdout.write(f"train {strategy.rank} of {strategy.size}: {total}\\n")
"""
SOLVER = """
import sys
from mpi4py import MPI

world = MPI.COMM_WORLD
part = world.Split(1, world.rank)
world.send(2 * world.recv(source=0), dest=0)
if sys.argv[1:]:
    world.recv(source=0)  # which nobody sends
sys.stdout.write(f"solver {part.rank} of {part.size}\\n")
"""
#: What they print on three ranks, of which the last one runs SOLVER.
TOLD = ("solver 0 of 1", "train 0 of 2: 80", "train 1 of 2: 80")
