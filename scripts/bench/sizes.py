"""All-reduces of several sizes beside MPI_Allreduce of the same ranks, on one node or between several.

For each size rank 0 prints the medians of ours over mpi4py's: wall seconds and CPU seconds with their quartiles, and
wall seconds with `wire="bfloat16"`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpistrategy as ms
from timing import medians, seconds_in_turns

WIRE = ms.CommunicationOptions(wire="bfloat16")


def compare(world: MPI.Intracomm, nbytes: int, rounds: int) -> None:
    """Print the row of a size.  Collective; in a step."""
    context = ms.get_replica_context()
    operand = np.random.default_rng(world.rank).standard_normal(nbytes // 4).astype(np.float32)
    flat = np.empty_like(operand)
    calls: dict[str, Callable[[], object]] = {
        "mpi4py": lambda: world.Allreduce(operand, flat),
        "ours": lambda: context.all_reduce("SUM", operand),
        "bfloat16": lambda: context.all_reduce("SUM", operand, WIRE),
    }
    seconds = seconds_in_turns(calls, rounds, 30 if nbytes < 2**20 else 4, world)
    np.testing.assert_allclose(context.all_reduce("SUM", operand), flat, rtol=1e-3, atol=1e-3)
    low, middle, high = np.quantile(seconds["ours"] / seconds["mpi4py"], (0.25, 0.5, 0.75), axis=0)
    short = np.median(seconds["bfloat16"][:, 0] / seconds["mpi4py"][:, 0])
    if world.rank == 0:
        wall, cpu = f"{middle[0]:.2f} ({low[0]:.2f}-{high[0]:.2f})", f"{middle[1]:.2f} ({low[1]:.2f}-{high[1]:.2f})"
        flat_seconds = medians(seconds)["mpi4py"]
        print(f"{nbytes:>10} {wall:>18} {cpu:>18} {short:>9.2f} {1e6 * flat_seconds:>10.1f} us", flush=True)


def measure(options: argparse.Namespace) -> None:
    """Print the table."""
    world = MPI.COMM_WORLD.Dup()
    with ms.MirroredStrategy() as strategy:
        ranks = strategy.extended.communicator
        if world.rank == 0:
            print(f"{ranks.nodes} nodes, {ranks.size} ranks, {ranks.library}; ours over mpi4py's")
            print(f"{'bytes':>10} {'wall':>18} {'CPU':>18} {'bfloat16':>9} {'mpi4py':>13}")
        for nbytes in options.bytes:
            strategy.run(compare, args=(world, nbytes, options.rounds))
