"""Messages of more than 2^31 elements, for real.

    mpiexec -n 2 python scripts/soak large_counts [--elements N] [broadcast|gather|wire|reduce|one|hierarchical ...]

The library cuts its messages into pieces of at most 2^30 elements, since not every MPI counts further than 2^31 - 1.
The tests set that limit low; this program crosses it, with 2^31 + 16 elements unless told otherwise. `one` is
ReductionToOneDevice; without a name everything runs. What does not fit the free memory is skipped, and said to be.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import mpistrategy as ms

WIDTH = 2**16 + 1  # no power of two, so that a piece in the wrong place shows
GIB = 2**30

Array = npt.NDArray[np.int8]
Test = Callable[[ms.Strategy, int, int, int], None]


def pattern(rank: int) -> Array:
    """Return a row whose sums over a few ranks stay within int8."""
    return ((np.arange(WIDTH) * 7 + 3 * rank) % 41).astype(np.int8)


def repeated(row: Array, rows: int) -> Array:
    """Return a large array in the memory of one row."""
    return np.broadcast_to(row, (rows, WIDTH))


def check(found: Array, row: Array, what: str) -> None:
    """Compare every row, a thousand at a time."""
    for start in range(0, len(found), 1000):
        block = found[start : start + 1000]
        if not np.array_equal(block, np.broadcast_to(row, block.shape)):
            raise AssertionError(f"{what}: wrong numbers in rows {start} to {start + len(block)} of {len(found)}")


def broadcast(strategy: ms.Strategy, rank: int, size: int, rows: int) -> None:
    """Send all rows from rank 0."""
    found = strategy.extended.broadcast_to(repeated(pattern(rank), rows), "CPU:0")
    check(found.numpy(), pattern(0), "broadcast_to")


def gather(strategy: ms.Strategy, rank: int, size: int, rows: int) -> None:
    """Join parts of different lengths, which together have more than all rows."""
    lengths = [-(-rows // size) + of_rank for of_rank in range(size)]
    found = strategy.gather(repeated(pattern(rank), lengths[rank]), 0)
    assert len(found) == sum(lengths)
    for of_rank, part in enumerate(np.split(found, np.cumsum(lengths)[:-1])):
        check(part, pattern(of_rank), f"gather, the part of rank {of_rank}")


def reduce_with(ops: ms.CrossDeviceOps) -> Test:
    """Return a test that sums all rows with `ops`."""

    def reduce(strategy: ms.Strategy, rank: int, size: int, rows: int) -> None:
        with strategy.scope():
            found = ops.reduce("SUM", repeated(pattern(rank), rows), [f"task:{r}" for r in range(size)])
        right = np.zeros(WIDTH, np.int8)
        for of_rank in range(size):
            right += pattern(of_rank)
        check(found.numpy(), right, type(ops).__name__)

    return reduce


def wire(strategy: ms.Strategy, rank: int, size: int, rows: int) -> None:
    """Sum all rows in place in their own dtype, as the transport under every algorithm does."""
    buffer = repeated(pattern(rank), rows).copy()
    strategy.extended.communicator.allreduce(buffer)
    right = np.zeros(WIDTH, np.int8)
    for of_rank in range(size):
        right += pattern(of_rank)
    check(buffer, right, "the transport's allreduce")


# What it does, and about how many bytes a rank needs for each element.
WHAT: dict[str, tuple[Test, float]] = {
    "broadcast": (broadcast, 1.5),
    "gather": (gather, 2.5),
    "wire": (wire, 3),
    "reduce": (reduce_with(ms.MpiAllReduce()), 3),
    "one": (reduce_with(ms.ReductionToOneDevice()), 3),
    "hierarchical": (reduce_with(ms.HierarchicalCopyAllReduce()), 3),
}


def free_memory() -> int:
    """Return the bytes that this machine has to give."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def main() -> int:
    """Run what fits; return 1 when nothing did."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=2**31 + 16)
    parser.add_argument("what", nargs="*", choices=[[], *WHAT], metavar="what")
    arguments = parser.parse_args()
    rows = -(-arguments.elements // WIDTH)
    elements = rows * WIDTH
    strategy = ms.MirroredStrategy()
    size, rank = strategy.num_replicas_in_sync, strategy.extended.communicator.rank
    done = 0
    for name in arguments.what or WHAT:
        test, bytes_for_each = WHAT[name]
        needed = size * elements * bytes_for_each
        # All ranks must come to the same decision.
        there = float(strategy.extended.broadcast_to(np.float64(free_memory()), "CPU:0"))
        if there < needed:
            if rank == 0:
                print(f"{name}: skipped, needs {needed / GIB:.0f} GiB and {there / GIB:.0f} are free", flush=True)
            continue
        started = time.perf_counter()
        test(strategy, rank, size, rows)
        strategy.extended.barrier()
        done += 1
        if rank == 0:
            seconds = time.perf_counter() - started
            print(f"{name}: {elements:,} elements on {size} ranks are right after {seconds:.1f} s", flush=True)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
