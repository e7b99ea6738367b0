"""Heat conduction in a square plate, split by rows over the ranks: an MPI program that uses the library for sums only.

    mpiexec -n 4 python scripts/examples/heat_equation.py

The halo exchange is plain mpi4py on COMM_WORLD. The strategy works on a duplicate of it, so that the two never meet.
Succeeds if the temperatures agree with the exact solution.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpistrategy as ms


def main() -> None:
    """Let a plate of temperature sin(pi x) sin(pi y) cool down, its edges kept at 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=64, help="cells along an edge; default: %(default)s")
    parser.add_argument("--time", type=float, default=0.05, help="when to stop; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    options = parser.parse_args()

    world = MPI.COMM_WORLD
    if world.size >= options.cells:
        parser.error(f"{world.size} ranks are too many for {options.cells} cells: each needs a row")
    up = world.rank - 1 if world.rank > 0 else MPI.PROC_NULL
    down = world.rank + 1 if world.rank + 1 < world.size else MPI.PROC_NULL
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        temperature = ms.metrics.Mean("temperature")

    # This rank's rows of the inner points 1 ... cells - 1, and one row of a neighbour's (or the edge's) on each side.
    first, last = (1 + (options.cells - 1) * part // world.size for part in (world.rank, world.rank + 1))
    x = np.arange(first - 1, last + 1)[:, np.newaxis] / options.cells
    y = np.arange(options.cells + 1) / options.cells
    start = np.sin(np.pi * x) * np.sin(np.pi * y)
    plate = start * ((x > 0) & (x < 1) & (y > 0) & (y < 1))

    ratio = 0.2  # time step over cell size squared: stable below 0.25
    steps = round(options.time * options.cells**2 / ratio)
    for _ in range(steps):
        world.Sendrecv(plate[1], up, 0, plate[-1], down, 0)
        world.Sendrecv(plate[-2], down, 1, plate[0], up, 1)
        inner = plate[1:-1, 1:-1]
        inner += ratio * (plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:] - 4 * inner)

    exact = start * np.exp(-2 * np.pi**2 * steps * ratio / options.cells**2)
    mine, right = plate[1:-1, 1:-1], exact[1:-1, 1:-1]
    with ms.ReplicaContext(strategy, world.rank) as replica:  # as inside `strategy.run`, without a step function
        temperature.update_state(mine)
        sums = replica.all_reduce(
            "SUM", {"energy": np.sum(mine**2), "exact": np.sum(right**2), "error": np.sum((mine - right) ** 2)}
        )
    mean = temperature.result()  # of all points, however many rows each rank has
    error = float(np.sqrt(sums["error"] / sums["exact"]))
    if world.rank == 0:
        print(f"{options.cells} x {options.cells} cells on {world.size} rank{'s' * (world.size > 1)}, {steps} steps")
        print(f"mean temperature {mean:.12f}, energy {sums['energy'] / options.cells**2:.12f}")
        print(f"relative error against the exact solution {error:.2e} (allowed: {1e-3:.0e})", flush=True)
        if options.json:
            report = {"mean": mean, "energy": float(sums["energy"]), "error": error}
            options.json.write_text(json.dumps(report), encoding="utf-8")
    strategy.close()
    sys.exit(0 if error < 1e-3 else 1)


if __name__ == "__main__":
    main()
