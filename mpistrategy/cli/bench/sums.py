"""The cases: one array of every size, and lists of gradients, summed by mpi4py and by this library; on CPUs or GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.cli.bench.case import Case, Variant
from mpistrategy.cli.bench.raw import RawRanks
from mpistrategy.cli.bench.shapes import LISTS
from mpistrategy.objects.shown import size_in_words
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy

SIZES = tuple(4**power for power in range(1, 15))  # 4 B ... 256 MiB
QUICK_SIZES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
QUICK_LISTS = ("resnet50", "tiny1000")


@dataclass(frozen=True)
class Place:
    """Where operands lie.

    Attributes:
        zeros: makes an array of a shape.
        finish: waits until all work on arrays is done.
    """

    zeros: Callable[..., Any] = np.zeros
    finish: Callable[[], object] = lambda: None


def gpus() -> Place:
    """Return the GPU that this rank drives."""
    cupy = cupy_for("mpistrategy bench --devices gpu")
    return Place(cupy.zeros, cupy.cuda.get_current_stream().synchronize)


def context_of(strategy: Strategy) -> ReplicaContext:
    """Return the replica context of a strategy, to be entered while calls are timed."""
    return ReplicaContext(strategy, strategy.replica_id_in_sync_group)


def one_array(ranks: RawRanks, strategy: Strategy, sizes: Sequence[int], place: Place = Place()) -> Iterator[Case]:
    """Yield a case for every size in bytes: one float32 array, summed; the first variant's operand is that array."""
    for nbytes in sizes:
        mine = place.zeros(max(nbytes // 4, 1), dtype=np.float32)
        yield _case(ranks, strategy, place, "all_reduce", size_in_words(mine.nbytes), mine)


def gradient_lists(ranks: RawRanks, strategy: Strategy, names: Sequence[str], place: Place = Place()) -> Iterator[Case]:
    """Yield the gradients of models in `LISTS`; the first variant's operands are those arrays."""
    for name in names:
        mine = [place.zeros(shape, dtype=np.float32) for shape in LISTS[name]()]
        yield _case(ranks, strategy, place, "lists", name, mine)


def _case(ranks: RawRanks, strategy: Strategy, place: Place, suite: str, name: str, mine: Any) -> Case:
    """Return the sum of an array, or of a list of them, in all ways."""
    ctx = context_of(strategy)
    arrays = mine if isinstance(mine, list) else [mine]
    variants = [
        *(_by_mpi4py(ranks, mine) if place.zeros is np.zeros else [_by_the_host(ranks, arrays)]),
        Variant("mpistrategy", partial(ctx.all_reduce, "SUM", mine), arrays),
        Variant("mpistrategy out=", partial(ctx.all_reduce, "SUM", mine, out=mine), arrays),
    ]
    for title, shared_result in (("mpistrategy arena", False), ("mpistrategy arena, shared result", True)):
        arena = strategy.arena(mine, shared_result=shared_result)
        operands = arena.values if isinstance(arena.values, list) else [arena.values]
        variants.append(Variant(title, partial(ctx.all_reduce, "SUM", arena), operands, close=arena.close))
    return Case(suite, name, sum(array.nbytes for array in arrays), variants, ctx, finish=place.finish)


def _by_mpi4py(ranks: RawRanks, mine: Any) -> list[Variant]:
    """Return what a user of mpi4py calls."""
    if isinstance(mine, list):
        totals = [np.zeros_like(array) for array in mine]
        return [
            Variant("mpi4py loop", partial(ranks.sum_each_into, mine, totals), mine, totals),
            Variant("mpi4py loop in place", partial(ranks.sum_each_in_place, mine), mine),
        ]
    total = np.zeros_like(mine)
    return [
        Variant("mpi4py", partial(ranks.allreduce, mine, total), [mine], [total]),
        Variant("mpi4py in place", partial(ranks.allreduce, ranks.in_place, mine), [mine]),
    ]


def _by_the_host(ranks: RawRanks, mine: Sequence[Any]) -> Variant:
    """Return what a user of mpi4py calls for arrays in GPU memory."""
    hosts: list[Array] = [np.zeros(array.shape, np.float32) for array in mine]

    def call() -> None:
        for array, host in zip(mine, hosts, strict=True):
            array.get(out=host)
            ranks.allreduce(ranks.in_place, host)
            array.set(host)

    return Variant("mpi4py, through the host", call, mine)
