"""The cases: one array of every size, and lists of gradients, summed by mpi4py and by this library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Case, Variant
from mpistrategy.cli.bench.raw import PIECE, RawRanks
from mpistrategy.cli.bench.shapes import LISTS, elements
from mpistrategy.objects.shown import size_in_words
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy

SIZES = tuple(4**power for power in range(1, 15))  # 4 B ... 256 MiB
QUICK_SIZES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
QUICK_LISTS = ("resnet50", "tiny1000")


def context_of(strategy: Strategy) -> ReplicaContext:
    """Return the replica context of a strategy, to be entered while calls are timed."""
    return ReplicaContext(strategy, strategy.replica_id_in_sync_group)


def one_array(ranks: RawRanks, strategy: Strategy, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case for every size in bytes: one float32 array, summed; the first variant's operand is that array."""
    ctx = context_of(strategy)
    for nbytes in sizes:
        mine = np.zeros(max(nbytes // 4, 1), np.float32)
        total = np.zeros_like(mine)
        variants = [
            Variant("mpi4py", partial(ranks.allreduce, mine, total), [mine], [total]),
            Variant("mpi4py in place", partial(ranks.allreduce, ranks.in_place, mine), [mine]),
        ]
        if nbytes > PIECE:
            variants.append(Variant("mpi4py in place, 1 MiB pieces", partial(ranks.sum_in_pieces, mine), [mine]))
        variants += [
            Variant("mpistrategy", partial(ctx.all_reduce, "SUM", mine), [mine]),
            Variant("mpistrategy out=", partial(ctx.all_reduce, "SUM", mine, out=mine), [mine]),
            *_in_arenas(strategy, ctx, mine),
        ]
        yield Case("all_reduce", size_in_words(mine.nbytes), mine.nbytes, variants, ctx)


def gradient_lists(ranks: RawRanks, strategy: Strategy, names: Sequence[str]) -> Iterator[Case]:
    """Yield the gradients of models in `LISTS`; the first variant's operands are those arrays."""
    ctx = context_of(strategy)
    for name in names:
        shapes = LISTS[name]()
        mine = [np.zeros(shape, np.float32) for shape in shapes]
        totals = [np.zeros_like(array) for array in mine]
        variants = [
            Variant("mpi4py loop", partial(ranks.sum_each_into, mine, totals), mine, totals),
            Variant("mpi4py loop in place", partial(ranks.sum_each_in_place, mine), mine),
            Variant("mpistrategy", partial(ctx.all_reduce, "SUM", mine), mine),
            Variant("mpistrategy out=", partial(ctx.all_reduce, "SUM", mine, out=mine), mine),
            *_in_arenas(strategy, ctx, mine),
        ]
        yield Case("lists", name, 4 * elements(shapes), variants, ctx)


def _in_arenas(strategy: Strategy, ctx: ReplicaContext, like: Array | list[Array]) -> Iterator[Variant]:
    """Yield the variants whose operands live in an arena from the start."""
    for name, shared_result in (("mpistrategy arena", False), ("mpistrategy arena, shared result", True)):
        arena = strategy.arena(like, shared_result=shared_result)
        operands = arena.values if isinstance(arena.values, list) else [arena.values]
        yield Variant(name, partial(ctx.all_reduce, "SUM", arena), operands, close=arena.close)
