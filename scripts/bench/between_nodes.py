"""Times all-reduces between nodes beside a flat MPI_Allreduce of the same ranks, and how much of one is hidden.

    MPIR_CVAR_NUM_CLIQUES=8 scripts/mpirun -n 16 scripts/bench between_nodes [BYTES...]     MPICH pretends 8 nodes
    mpiexec -f hosts.txt -n 8 .venv/bin/python scripts/bench between_nodes [BYTES...]       real or virtual nodes

All take turns.  For each size rank 0 prints the medians of ours over flat: CPU seconds (the mean of the ranks) and wall
seconds with their quartiles, of float32 and of `wire="bfloat16"`.  The last line tells how much of an all-reduce of
16 MiB in four parts hides behind matrix products that take 1.5 times as long.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrategy as ms
from turns import times_in_turns

SIZES = (8, 4096, 65536, 2**18, 2**20, 2**22, 2**24)
#: How many calls are timed together: of arrays below 1 MiB, and of others.
CALLS, LARGE_CALLS = 30, 4
FORMAT = "{:>10} {:>8} {:>8}-{:<8} {:>8} {:>8}-{:<8} {:>9} {:>10}"
WIRE = ms.CommunicationOptions(wire="bfloat16")
OVERLAP_BYTES, PARTS, COMPUTE = 2**24, 4, 1.5


def measured(world: MPI.Intracomm, call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return the CPU and the wall seconds of a call on this rank."""
    world.Barrier()
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    return (time.process_time() - cpu) / calls, (time.perf_counter() - began) / calls


def compare(world: MPI.Intracomm, nbytes: int, pairs: int) -> None:
    """Print the row of a size.  Collective; in a step."""
    context = ms.get_replica_context()
    mine = np.random.default_rng(world.rank).standard_normal(nbytes // 4).astype(np.float32)
    flat = np.empty_like(mine)
    calls = CALLS if nbytes < 2**20 else LARGE_CALLS
    ways: list[Callable[[], Any]] = [
        lambda: world.Allreduce(mine, flat),
        lambda: context.all_reduce("SUM", mine),
        lambda: context.all_reduce("SUM", mine, WIRE),
    ]
    ways[0]()
    np.testing.assert_allclose(ways[1](), flat, rtol=1e-3, atol=1e-3)
    times = np.array([[measured(world, call, calls) for call in ways] for _ in range(pairs + 2)])[2:]
    world.Allreduce(MPI.IN_PLACE, times)
    (low, middle, high), (low_wall, wall, high_wall) = np.quantile(
        times[:, 1] / times[:, 0], (0.25, 0.5, 0.75), axis=0
    ).T
    if world.rank == 0:
        short = np.median(times[:, 2, 1] / times[:, 0, 1])
        seconds = np.median(times[:, 0, 1]) / world.size
        figures = [f"{each:.2f}" for each in (middle, low, high, wall, low_wall, high_wall, short)]
        print(FORMAT.format(nbytes, *figures, f"{seconds * 1e6:.0f} us"), flush=True)


def products(seconds: float) -> Callable[[], None]:
    """Return a function that multiplies matrices for about so long."""
    factor, product = np.full((256, 256), 1 / 256, np.float32), np.empty((256, 256), np.float32)
    began = time.perf_counter()
    for _ in range(20):
        np.matmul(factor, factor, out=product)
    count = max(round(20 * seconds / (time.perf_counter() - began)), 1)

    def compute() -> None:
        for _ in range(count):
            np.matmul(factor, factor, out=product)

    return compute


def hidden(world: MPI.Intracomm, rounds: int) -> float:
    """Return the part of an all-reduce in the background that hides behind computation.  Collective; in a step."""
    context = ms.get_replica_context()
    parts = [np.zeros(OVERLAP_BYTES // PARTS // 4, np.float32) for _ in range(PARTS)]

    def communicate() -> None:
        for part in parts:
            context.all_reduce("SUM", part, out=part)

    alone = median(times_in_turns({"": communicate}, 5, world=world)[""])
    compute = products(COMPUTE * alone / PARTS)

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

    calls = {"communication": communicate, "computation": compute_all, "both": behind}
    times = {name: median(each) for name, each in times_in_turns(calls, rounds, world=world).items()}
    return (times["communication"] + times["computation"] - times["both"]) / times["communication"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bytes", nargs="*", type=int, default=SIZES)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    world = MPI.COMM_WORLD.Dup()
    strategy = ms.MirroredStrategy()
    ranks = strategy.extended.communicator
    if world.rank == 0:
        print(f"{ranks.nodes} nodes, {ranks.size} ranks, {ranks.library}; ours over flat")
        print(FORMAT.format("bytes", "CPU", "", "", "wall", "", "", "bfloat16", "flat"))
    for nbytes in options.bytes:
        strategy.run(compare, args=(world, nbytes, options.pairs))
    part = strategy.run(hidden, args=(world, options.pairs))
    if world.rank == 0:
        print(f"all_reduce_async of {OVERLAP_BYTES} bytes: {100 * part:.0f} % is hidden behind computation")
    strategy.close()


if __name__ == "__main__":
    main()
