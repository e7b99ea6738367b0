"""Heat conduction in a square plate, split by rows over the ranks: an MPI program that uses the library for sums only.

    mpiexec -n 4 python scripts/examples/heat_equation.py [CELLS]

The halo exchange is plain mpi4py on COMM_WORLD. The strategy works on a duplicate of it, so that the two never meet.
Succeeds if the temperatures agree with the exact solution.
"""

import sys

import numpy as np
from mpi4py import MPI

import mpistrategy as ms

CELLS = int(sys.argv[1]) if len(sys.argv) > 1 else 64  # along an edge
END, RATIO = 0.05, 0.2  # time step over cell size squared: stable below 0.25

world = MPI.COMM_WORLD
up = world.rank - 1 if world.rank > 0 else MPI.PROC_NULL
down = world.rank + 1 if world.rank + 1 < world.size else MPI.PROC_NULL
strategy = ms.MirroredStrategy()
with strategy.scope():
    temperature = ms.metrics.Mean("temperature")

# A plate of temperature sin(pi x) sin(pi y) cools down; its edges are kept at 0. This rank has some rows of the inner
# points 1 ... CELLS - 1, and one row of a neighbour's (or the edge's) on each side.
first, last = (1 + (CELLS - 1) * part // world.size for part in (world.rank, world.rank + 1))
x = np.arange(first - 1, last + 1)[:, np.newaxis] / CELLS
y = np.arange(CELLS + 1) / CELLS
start = np.sin(np.pi * x) * np.sin(np.pi * y)
plate = start * ((x > 0) & (x < 1) & (y > 0) & (y < 1))

steps = round(END * CELLS**2 / RATIO)
for _ in range(steps):
    world.Sendrecv(plate[1], up, 0, plate[-1], down, 0)
    world.Sendrecv(plate[-2], down, 1, plate[0], up, 1)
    inner = plate[1:-1, 1:-1]
    inner += RATIO * (plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:] - 4 * inner)

exact = start * np.exp(-2 * np.pi**2 * steps * RATIO / CELLS**2)
mine, right = plate[1:-1, 1:-1], exact[1:-1, 1:-1]
with ms.ReplicaContext(strategy, world.rank) as replica:  # as inside `strategy.run`, without a step function
    temperature.update_state(mine)
    sums = replica.all_reduce("SUM", {"exact": np.sum(right**2), "error": np.sum((mine - right) ** 2)})
mean = temperature.result()  # of all points, however many rows each rank has
error = float(np.sqrt(sums["error"] / sums["exact"]))
if world.rank == 0:
    print(f"{CELLS} x {CELLS} cells on {world.size} ranks, {steps} steps")
    print(f"mean temperature {mean:.12f}")
    print(f"relative error against the exact solution {error:.2e} (allowed: 1e-03)", flush=True)
strategy.close()
sys.exit(0 if error < 1e-3 else 1)
