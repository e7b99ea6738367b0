"""Messages of more than 2^31 elements, for real.

The library cuts its messages into pieces of at most 2^30 elements, since not every MPI counts further than 2^31 - 1.
The tests set that limit low; this program crosses it.  A rank needs up to 3 bytes for each element.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import numpy.typing as npt

import mpistrategy as ms

WIDTH = 2**16 + 1  # no power of two, so that a piece in the wrong place shows
NAMES = ("broadcast", "gather", "MpiAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce")

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
    """Run everything; what is wrong raises."""
    strategy = ms.MirroredStrategy()
    rows = -(-options.count // WIDTH)
    for name in options.only or NAMES:
        began = time.perf_counter()
        exchange(name, strategy, rows)
        strategy.barrier("checked")
        if strategy.rank == 0:
            seconds = time.perf_counter() - began
            print(f"{name}: {rows * WIDTH:,} elements on {strategy.size} ranks are right after {seconds:.1f} s")
    return False
