"""`mpistrategy bench --devices gpu`: collectives of arrays in GPU memory.

Bandwidths are those of NVIDIA's nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), with S the bytes
of the array on each rank, for an all-gather those of the result, t the time of a call and n the number of GPUs:

    algorithm bandwidth = S / t
    bus bandwidth = algorithm bandwidth * 2 (n - 1) / n    all-reduce
                    algorithm bandwidth * (n - 1) / n      all-gather
                    algorithm bandwidth                    broadcast

As there, calls are put on the stream one after the other, and the time is that until all are done, by their number.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.cli.bench.report import time_in_words
from mpistrategy.cli.bench.shapes import LISTS
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.objects.shown import size_in_words
from mpistrategy.objects.text import decoded
from mpistrategy.strategy.current import get_replica_context

if TYPE_CHECKING:
    from mpistrategy.cli.bench.raw import RawRanks
    from mpistrategy.strategy.strategy import Strategy

SIZES = tuple(4**power for power in range(6, 15))  # 4 KiB ... 256 MiB
QUICK_SIZES = (4 * 2**10, 2**20, 64 * 2**20)
_ROUNDS, _LEAST, _MOST = 3, 3, 100
_WARM_UP = 3
_SECONDS, _QUICK_SECONDS = 1.0, 0.2
#: Bytes on the bus for each byte of S, given the number of GPUs.
_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


@dataclass(frozen=True)
class Work:
    """Something to time; in a step of the strategy.

    Attributes:
        kind: of `_BUS`.
        name: for the table.
        nbytes: S.
        call: does it once.
        is_right: does it once and says whether the result is right here; None: it is not looked at.
    """

    kind: str
    name: str
    nbytes: int
    call: Callable[[], Any]
    is_right: Callable[[], bool] | None = None


def measure(strategy: Strategy, ranks: RawRanks, options: Any) -> dict[str, Any]:
    """Measure on all ranks; return the figures, the same on every rank.  Rank 0 prints each row.  Collective.

    Args:
        strategy: each rank drives a GPU, or shares one.
        ranks: the same ranks, outside the library.
        options: those of the command line.
    """
    cupy = cupy_for("mpistrategy bench --devices gpu")
    seconds = options.seconds or (_QUICK_SECONDS if options.quick else _SECONDS)
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    lists = options.lists or (["resnet50"] if options.quick else list(LISTS))
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    paths = device_paths(strategy.extended.communicator)
    about = {
        "device": decoded(properties["name"]),
        "gpus": ranks.size,
        "cupy": cupy.__version__,
        "paths": {word: f"{path.name}: {paths.reasons.get(word, '')}" for word, path in paths.known.items()},
    }
    count = 4 * len(sizes) + 2 * len(lists)
    if ranks.rank == 0:
        print("\n".join(head(about)), flush=True)
        print(f"{count} rows, each measured for about {seconds:g} s", file=sys.stderr, flush=True)
    found: list[dict[str, Any]] = []

    def all_of_them() -> None:
        for works in (*(_collectives(cupy, ranks, nbytes) for nbytes in sizes), _lists(cupy, lists)):
            for work in works:
                found.append(_measured(cupy, ranks, work, seconds))
                if ranks.rank == 0:
                    print(row_in_words(found[-1]), flush=True)

    strategy.run(all_of_them)
    return {**about, "rows": found}


def _collectives(cupy: Any, ranks: RawRanks, nbytes: int) -> Iterator[Work]:
    ctx, count = get_replica_context(), ranks.size
    mine = cupy.empty(max(1, nbytes // 4), "float32")
    block = mine[: max(1, mine.size // count)]

    def broadcast() -> Any:
        return ctx.merge_call(lambda strategy: strategy.broadcast(mine))

    def is_summed(out: DeviceArray | None) -> bool:
        mine[...] = ranks.rank + 1
        return bool((ctx.all_reduce("SUM", mine, out=out) == count * (count + 1) // 2).all())

    def is_gathered() -> bool:
        block[...] = ranks.rank
        found = ctx.all_gather(block, 0).reshape(count, -1)
        return bool((found == cupy.arange(count)[:, None]).all())

    def is_sent() -> bool:
        mine[...] = ranks.rank + 1
        return bool((broadcast() == 1).all())

    for name, out in (("all_reduce", None), ("all_reduce in place", mine)):
        call, is_right = partial(ctx.all_reduce, "SUM", mine, out=out), partial(is_summed, out)
        yield Work("all_reduce", name, mine.nbytes, call, is_right)
    yield Work("all_gather", "all_gather", block.nbytes * count, partial(ctx.all_gather, block, 0), is_gathered)
    yield Work("broadcast", "broadcast", mine.nbytes, broadcast, is_sent)


def _lists(cupy: Any, names: Sequence[str]) -> Iterator[Work]:
    ctx = get_replica_context()
    for name in names:
        gradients = [cupy.zeros(shape, "float32") for shape in LISTS[name]()]
        nbytes = sum(array.nbytes for array in gradients)
        what = f"{name}, {len(gradients)} arrays"
        yield Work("all_reduce", what, nbytes, partial(ctx.all_reduce, "SUM", gradients))
        arena = ctx.merge_call(lambda strategy, like=gradients: strategy.arena(like))
        yield Work("all_reduce", f"{what} in an arena", nbytes, partial(ctx.all_reduce, "SUM", arena))
        ctx.merge_call(lambda strategy, arena=arena: arena.close())


def _measured(cupy: Any, ranks: RawRanks, work: Work, seconds: float) -> dict[str, Any]:
    """Return the figures of some work; the slowest rank counts."""
    right = work.is_right is None or work.is_right()
    wrong = bool(ranks.greatest(np.array([float(not right)]))[0])
    for _ in range(_WARM_UP):
        work.call()
    once = _timed(cupy, ranks, work.call, 1)[0]
    calls = int(min(_MOST, max(_LEAST, seconds / _ROUNDS / max(once, 1e-7))))
    rounds = [_timed(cupy, ranks, work.call, calls) for _ in range(_ROUNDS)]
    time_of_call, host = (median(each) for each in zip(*rounds, strict=True))
    speed = work.nbytes / time_of_call / 1e9
    return {
        "name": work.name,
        "bytes": work.nbytes,
        "us": round(1e6 * time_of_call, 2),
        "host_us": round(1e6 * host, 2),
        "calls": calls,
        "algbw_gb_s": round(speed, 3),
        "busbw_gb_s": round(speed * _BUS[work.kind](ranks.size), 3),
        "right": not wrong,
    }


def _timed(cupy: Any, ranks: RawRanks, call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Return the seconds of a call, and those of them until it has returned; of the slowest rank."""
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    ranks.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    returned = time.perf_counter()
    stream.synchronize()
    done = time.perf_counter()
    slowest = ranks.greatest(np.array([done - start, returned - start]))
    return float(slowest[0]) / calls, float(slowest[1]) / calls


def head(about: dict[str, Any]) -> list[str]:
    """Return the beginning of the table."""
    return [
        "",
        f"{about['gpus']} ranks, a GPU each unless they share one; {about['device']}, CuPy {about['cupy']}. "
        + " ".join(f"Path: {path}." for path in about["paths"].values()),
        "",
        "Algorithm bandwidth is bytes / time, bus bandwidth that times 2 (n - 1) / n for an all-reduce and (n - 1) / n "
        "for an all-gather of n ranks, as in nccl-tests. Host: until a call returns.",
        "",
        "| call | bytes | time | algorithm bandwidth | bus bandwidth | host |",
        "|---|---|---|---|---|---|",
    ]


def row_in_words(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    speeds = [f"{row[key]:.3g} GB/s" for key in ("algbw_gb_s", "busbw_gb_s")]
    wrong = "" if row["right"] else " **WRONG RESULT**"
    times = [time_in_words(row[key]) for key in ("us", "host_us")]
    cells = (row["name"], size_in_words(row["bytes"]), times[0], *speeds, times[1] + wrong)
    return f"| {' | '.join(cells)} |"
