"""The cases of several nodes: one large array, and communication behind computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Case, Variant
from mpistrategy.cli.bench.raw import RawRanks
from mpistrategy.cli.bench.sums import context_of
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import CommunicationOptions
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy

SIZES = (64 * 2**10, 2**20, 16 * 2**20)
BUCKETS = 4
#: How long the computation is compared with the communication.
COMPUTE = 1.5
WIRE = CommunicationOptions(wire="bfloat16")
COMPUTATION, COMMUNICATION = "computation alone", "communication alone"
AFTER, BEHIND = "one after the other", "all_reduce_async"


def between_nodes(ranks: RawRanks, strategy: Strategy) -> Iterator[Case]:
    """Yield the cases."""
    ctx = context_of(strategy)
    for nbytes in SIZES:
        mine = np.zeros(nbytes // 4, np.float32)
        total = np.zeros_like(mine)
        variants = [
            Variant("mpi4py", partial(ranks.allreduce, mine, total), [mine], [total]),
            Variant("mpi4py in place", partial(ranks.allreduce, ranks.in_place, mine), [mine]),
            Variant("mpistrategy", partial(ctx.all_reduce, "SUM", mine), [mine]),
            Variant("mpistrategy out=", partial(ctx.all_reduce, "SUM", mine, out=mine), [mine]),
            Variant(
                "mpistrategy out=, bfloat16 wire",
                partial(ctx.all_reduce, "SUM", mine, WIRE, out=mine),
                [mine],
                check=_rounded(ranks, ctx, mine),
            ),
        ]
        yield Case("nodes", size_in_words(nbytes), nbytes, variants, ctx)
    yield _overlap(ranks, ctx, SIZES[-1])


def on_the_line(nbytes: int, nodes: int, gbit: float) -> float:
    """Return the microseconds that a link of `gbit` Gbit/s is busy with an all-reduce, in each direction."""
    return 8e-3 * nbytes * 2 * (nodes - 1) / nodes / gbit


def hidden(case: dict[str, Any]) -> float:
    """Return the share of the communication that is hidden behind computation, from 0 to 1."""
    median = {row["name"]: row["median_us"] for row in case["variants"]}
    return float(round(1 - (median[BEHIND] - median[COMPUTATION]) / median[COMMUNICATION], 4))


def _overlap(ranks: RawRanks, ctx: ReplicaContext, nbytes: int) -> Case:
    """Return a step of several buckets, each computed before it travels."""
    buckets = [np.zeros(nbytes // 4 // BUCKETS, np.float32) for _ in range(BUCKETS)]

    def communicate() -> None:
        for bucket in buckets:
            ctx.all_reduce("SUM", bucket, out=bucket)

    with ctx:
        communicate()
        started = time.perf_counter()
        communicate()
        seconds = float(ranks.greatest(np.array([time.perf_counter() - started]))[0])
    compute = _computation(COMPUTE * seconds / BUCKETS)

    def after() -> None:
        for _ in buckets:
            compute()
        communicate()

    def behind() -> None:
        handles = []
        for bucket in buckets:  # as a backward pass does: what is ready starts, and the next is computed
            handles.append(ctx.all_reduce_async("SUM", bucket, out=bucket))
            compute()
        for handle in handles:
            handle.wait()

    variants = [
        Variant(COMPUTATION, lambda: [compute() for _ in buckets] and None, [], check=lambda: True),
        Variant(COMMUNICATION, communicate, buckets),
        Variant(AFTER, after, buckets),
        Variant(BEHIND, behind, buckets),
    ]
    return Case("nodes", f"overlap, {size_in_words(nbytes)}", nbytes, variants, ctx)


def _computation(seconds: float) -> Callable[[], None]:
    """Return matrix products that take about so long here."""
    factor = np.full((256, 256), 1 / 256, np.float32)
    product = np.empty_like(factor)
    np.matmul(factor, factor, out=product)
    started = time.perf_counter()
    for _ in range(20):
        np.matmul(factor, factor, out=product)
    products = max(round(20 * seconds / (time.perf_counter() - started)), 1)

    def compute() -> None:
        for _ in range(products):
            np.matmul(factor, factor, out=product)

    return compute


def _rounded(ranks: RawRanks, ctx: ReplicaContext, mine: Array) -> Callable[[], bool]:
    """Return a check within bfloat16's rounding error: at most 2^-8 of each node's contribution."""

    def check() -> bool:
        pattern = np.resize(np.arange(251, dtype=np.float32), mine.shape)
        mine[...] = pattern + ranks.rank
        size = ranks.size
        ctx.all_reduce("SUM", mine, WIRE, out=mine)
        return np.allclose(mine, size * pattern + size * (size - 1) / 2, rtol=2.0**-7)

    return check
