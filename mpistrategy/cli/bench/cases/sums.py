"""The cases: one array of every size, small values, and lists of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.cases.case import Case, Variant
from mpistrategy.cli.bench.cases.shapes import LISTS, NETWORKS, elements
from mpistrategy.cli.bench.measuring.raw import PIECE, RawRanks
from mpistrategy.cli.bench.peers import Peer
from mpistrategy.objects.shown import size_in_words
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy

SIZES = tuple(4**power for power in range(1, 15))  # 4 B ... 256 MiB
QUICK_SIZES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
QUICK_LISTS = ("resnet50", "tiny1000")


@dataclass
class Bench:
    """What the cases are made with.

    Attributes:
        ranks: the reference's ranks.
        strategy: the library's.
        nodes: how many nodes the ranks are on.
        context: its replica context, entered while calls are timed.
        peers: other libraries that run here.
        missing: those that do not, and why.
        sizes: of one array, in bytes; multiples of 4.
        lists: names of `mpistrategy.cli.bench.cases.shapes.LISTS`.
        networks: names of its `NETWORKS`.
    """

    ranks: RawRanks
    strategy: Strategy
    nodes: int
    context: ReplicaContext
    peers: Sequence[Peer] = ()
    missing: dict[str, str] = field(default_factory=dict)
    sizes: Sequence[int] = SIZES
    lists: Sequence[str] = tuple(LISTS)
    networks: Sequence[str] = tuple(NETWORKS)


def one_array(bench: Bench) -> Iterator[Case]:
    """Yield a case for every size: one float32 array, summed."""
    ranks, ctx = bench.ranks, bench.context
    for nbytes in bench.sizes:
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
            *_in_arenas(bench, mine),
            *(variant for peer in bench.peers for variant in peer.one_array(mine)),
        ]
        yield Case("all_reduce", size_in_words(mine.nbytes), mine.nbytes, variants, ctx, missing=bench.missing)


def small_values(bench: Bench) -> Iterator[Case]:
    """Yield one float, and a dictionary of ten: the calls that are made for the sake of a few numbers."""
    ranks, ctx = bench.ranks, bench.context
    one, ten = np.zeros(1, np.float64), np.zeros(10, np.float64)
    total = np.zeros_like(one)
    totals = np.zeros_like(ten)
    losses: dict[str, float] = {f"loss_{index}": 0.0 for index in range(ten.size)}
    yield Case(
        "small",
        "one float",
        one.nbytes,
        [
            Variant("mpi4py", partial(ranks.allreduce, one, total), [one], [total]),
            Variant("mpistrategy", lambda: ctx.all_reduce("SUM", one.item()), [one]),
        ],
        ctx,
    )
    yield Case(
        "small",
        "dict of 10 floats",
        ten.nbytes,
        [
            Variant("mpi4py, 10 elements", partial(ranks.allreduce, ten, totals), [ten], [totals]),
            Variant(
                "mpistrategy",
                lambda: ctx.all_reduce("SUM", losses),
                [ten],
                load=lambda: losses.update(zip(losses, ten.tolist(), strict=True)),
            ),
        ],
        ctx,
    )


def gradient_lists(bench: Bench) -> Iterator[Case]:
    """Yield the gradients of real models, and a thousand tiny arrays, as lists."""
    ranks, ctx = bench.ranks, bench.context
    for name in bench.lists:
        shapes = LISTS[name]()
        mine = [np.zeros(shape, np.float32) for shape in shapes]
        totals = [np.zeros_like(array) for array in mine]

        variants = [
            Variant("mpi4py loop", partial(ranks.sum_each_into, mine, totals), mine, totals),
            Variant("mpi4py loop in place", partial(ranks.sum_each_in_place, mine), mine),
            Variant("mpistrategy", partial(ctx.all_reduce, "SUM", mine), mine),
            Variant("mpistrategy out=", partial(ctx.all_reduce, "SUM", mine, out=mine), mine),
            *_in_arenas(bench, mine),
            *(variant for peer in bench.peers for variant in peer.gradients(mine)),
        ]
        yield Case("lists", name, 4 * elements(shapes), variants, ctx, missing=bench.missing)


def _in_arenas(bench: Bench, like: Array | list[Array]) -> Iterator[Variant]:
    """Yield the variants whose operands live in an arena from the start."""
    for name, shared_result in (("mpistrategy arena", False), ("mpistrategy arena, shared result", True)):
        arena = bench.strategy.arena(like, shared_result=shared_result)
        operands = arena.values if isinstance(arena.values, list) else [arena.values]
        yield Variant(name, partial(bench.context.all_reduce, "SUM", arena), operands, close=arena.close)
