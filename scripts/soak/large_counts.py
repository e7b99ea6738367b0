"""Messages of more than 2^31 elements, for real.

The library cuts its messages into pieces of at most 2^30 elements, since not every MPI counts further than 2^31 - 1.
The tests set that limit low; this program crosses it.  What does not fit the free memory is skipped, and said to be.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import mpistrategy as ms

WIDTH = 2**16 + 1  # no power of two, so that a piece in the wrong place shows
GIB = 2**30
#: About how many bytes a rank needs for each element.
BYTES = {"broadcast": 1.5, "gather": 2.5, "MpiAllReduce": 3, "ReductionToOneDevice": 3, "HierarchicalCopyAllReduce": 3}

Array = npt.NDArray[np.int8]


def pattern(rank: int) -> Array:
    """Return a row whose sums over a few ranks stay within int8."""
    return ((np.arange(WIDTH) * 7 + 3 * rank) % 41).astype(np.int8)


def check(array: Array, row: Array, name: str) -> None:
    """Compare every row, a thousand at a time."""
    for start in range(0, len(array), 1000):
        block = array[start : start + 1000]
        if not np.array_equal(block, np.broadcast_to(row, block.shape)):
            raise AssertionError(f"{name}: wrong numbers in rows {start} to {start + len(block)} of {len(array)}")


def exchange(name: str, strategy: ms.Strategy, rows: int) -> None:
    """Send, join or sum so many rows of each rank, and check the result."""
    size = strategy.size
    rows_of_rank = np.broadcast_to(pattern(strategy.rank), (rows, WIDTH))  # in the memory of one row
    if name == "broadcast":
        check(strategy.extended.broadcast_to(rows_of_rank, "CPU:0").numpy(), pattern(0), name)
    elif name == "gather":  # parts of different lengths, which together have more than all rows
        lengths = [-(-rows // size) + rank for rank in range(size)]
        parts = np.split(strategy.gather(rows_of_rank[: lengths[strategy.rank]], 0), np.cumsum(lengths)[:-1])
        for rank, part in enumerate(parts):
            check(part, pattern(rank), f"gather, the part of rank {rank}")
    else:
        total = sum((pattern(rank) for rank in range(size)), np.zeros(WIDTH, np.int8))
        with strategy.scope():
            result = getattr(ms, name)().reduce("SUM", rows_of_rank, [f"task:{rank}" for rank in range(size)])
        check(result.numpy(), total, name)


def soak(options: argparse.Namespace) -> bool:
    """Run what fits; what is wrong raises."""
    strategy = ms.MirroredStrategy()
    rows = -(-options.count // WIDTH)
    for name in options.only or BYTES:
        nbytes = strategy.size * rows * WIDTH * BYTES[name]
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable"))
        if -strategy.reduce("MAX", -free) < nbytes:  # all ranks must come to the same decision
            print(f"{name}: skipped, needs {nbytes / GIB:.0f} GiB of {free / GIB:.0f} that are free", flush=True)
            continue
        began = time.perf_counter()
        exchange(name, strategy, rows)
        strategy.barrier("checked")
        if strategy.rank == 0:
            seconds = time.perf_counter() - began
            print(f"{name}: {rows * WIDTH:,} elements on {strategy.size} ranks are right after {seconds:.1f} s")
    return False
