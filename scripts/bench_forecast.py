"""The forecast of an all-reduce beside its measured time, on ranks of several nodes; started by scripts/bench_forecast.

Each route is measured, whether it would be chosen or not.

The rates are those of MPISTRATEGY_PATHS, which may have been measured on another number of nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy.cli.bench.forecast.tables import call_seconds
from mpistrategy.cli.bench.forecast.units import Shape
from mpistrategy.mpi.multi_node.two_level import allreduce_across
from mpistrategy.mpi.tuning import costs
from mpistrategy.mpi.tuning.files import load, trying
from mpistrategy.objects.shown import size_in_words

#: Between the sizes that `mpistrategy bench --save` measures, and two of them.
SIZES = (16 * 2**10, 128 * 2**10, 512 * 2**10, 2**20, 2 * 2**20, 4 * 2**20, 8 * 2**20, 12 * 2**20)
ROUNDS = 15


def main() -> int:
    """Measure and compare on all ranks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=SIZES, metavar="BYTES")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="RATIO")
    options = parser.parse_args()
    thresholds = load(Path(os.environ["MPISTRATEGY_PATHS"]))
    with trying(replace(thresholds, across_bytes=64)):  # everything by the pairwise exchange
        strategy = ms.MirroredStrategy()
    world, node_of = MPI.COMM_WORLD.Dup(), strategy.extended.communicator.node_of
    shape = Shape(max(node_of) + 1, min(Counter(node_of).values()))
    worst = 1.0
    for nbytes in options.sizes:
        mine = np.ones(nbytes // 4, np.float32)
        total = np.empty_like(mine)
        calls: dict[str, Callable[[], object]] = {
            "flat": lambda mine=mine, total=total: world.Allreduce(mine, total),
            "pairwise": lambda mine=mine: strategy.run(_sum, args=(mine,)),
        }
        if shape.ranks_per_node > 1:
            calls["lanes"] = lambda mine=mine, total=total: _by_lanes(strategy, mine, total)
        forecasts = {
            "flat": costs.flat_seconds(shape.nodes, shape.ranks_per_node, nbytes, thresholds),
            "pairwise": call_seconds("pairwise", shape, nbytes, thresholds),
            "lanes": call_seconds("lanes", shape, nbytes, thresholds),
        }
        times = np.array([[_seconds(call, world) for call in calls.values()] for _ in range(ROUNDS + 1)])[1:]
        world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        for name, measured in zip(calls, np.median(times, axis=0), strict=True):
            ratio = forecasts[name] / measured
            worst = max(worst, ratio, 1 / ratio)
            if world.rank == 0:
                print(
                    f"{shape.nodes}x{shape.ranks_per_node} {size_in_words(nbytes):>8} {name:8} measured "
                    f"{1e3 * measured:9.3f} ms, forecast {1e3 * forecasts[name]:9.3f} ms: {ratio:.2f}",
                    flush=True,
                )
    if world.rank == 0:
        print(f"the worst forecast is a factor of {worst:.2f} from the median of {ROUNDS}")
    strategy.close()
    return int(worst > options.within)


def _sum(mine: np.ndarray) -> object:
    context = ms.get_replica_context()
    assert context is not None
    return context.all_reduce("SUM", mine)


def _by_lanes(strategy: ms.Strategy, mine: np.ndarray, total: np.ndarray) -> None:
    strategy.barrier()  # the check of the call
    allreduce_across(strategy.extended.communicator, total, source=mine, way="lanes")


def _seconds(call: Callable[[], object], world: MPI.Intracomm) -> float:
    world.Barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
