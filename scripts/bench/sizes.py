"""All-reduces of several sizes beside MPI_Allreduce of the same ranks, on one node or between several.

For each size rank 0 prints the medians of ours over mpi4py's: wall seconds with their quartiles, CPU seconds, and wall
seconds with `wire="bfloat16"`.  The last line tells how much of an all-reduce of 16 MiB in four parts hides behind
matrix products that take 1.5 times as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpistrategy as ms
from timing import medians, seconds_in_turns

WIRE = ms.CommunicationOptions(wire="bfloat16")
PARTS, PART_BYTES, COMPUTE = 4, 2**22, 1.5


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


def hidden(world: MPI.Intracomm, rounds: int) -> float:
    """Return the part of an all-reduce in the background that hides behind computation.  Collective; in a step."""
    context = ms.get_replica_context()
    parts = [np.zeros(PART_BYTES // 4, np.float32) for _ in range(PARTS)]
    factor, product = np.full((256, 256), 1 / 256, np.float32), np.empty((256, 256), np.float32)
    calls: dict[str, Callable[[], object]] = {
        "communication": lambda: [context.all_reduce("SUM", part, out=part) for part in parts],
        "product": lambda: np.matmul(factor, factor, out=product),
    }
    alone = medians(seconds_in_turns(calls, 5, 3, world))
    products = max(round(COMPUTE * alone["communication"] / PARTS / alone["product"]), 1)

    def compute() -> None:
        for _ in range(products):
            np.matmul(factor, factor, out=product)

    def behind() -> None:
        handles = []
        for part in parts:  # as a backward pass does: what is ready starts, and the next is computed
            handles.append(context.all_reduce_async("SUM", part, out=part))
            compute()
        for handle in handles:
            handle.wait()

    def compute_all() -> None:
        for _ in parts:
            compute()

    calls |= {"product": compute_all, "both": behind}
    seconds = medians(seconds_in_turns(calls, rounds, 1, world))
    return (seconds["communication"] + seconds["product"] - seconds["both"]) / seconds["communication"]


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
        part = strategy.run(hidden, args=(world, options.rounds))
        if world.rank == 0:
            print(f"all_reduce_async of {PARTS * PART_BYTES} bytes: {100 * part:.0f} % is hidden behind computation")
