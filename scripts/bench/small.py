"""The cases of calls that are made for the sake of a few numbers: one float, and a dictionary of ten."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from mpistrategy.cli.bench.case import Case, Variant
from mpistrategy.cli.bench.raw import RawRanks
from mpistrategy.cli.bench.sums import context_of
from mpistrategy.strategy.strategy import Strategy


def small_values(ranks: RawRanks, strategy: Strategy) -> Iterator[Case]:
    """Yield the cases."""
    ctx = context_of(strategy)
    one, ten = np.zeros(1, np.float64), np.zeros(10, np.float64)
    total, totals = np.zeros_like(one), np.zeros_like(ten)
    losses: dict[str, float] = {f"loss_{index}": 0.0 for index in range(ten.size)}
    variants = [
        Variant("mpi4py", partial(ranks.allreduce, one, total), [one], [total]),
        Variant("mpistrategy", lambda: ctx.all_reduce("SUM", one.item()), [one]),
    ]
    yield Case("small", "one float", one.nbytes, variants, ctx)
    variants = [
        Variant("mpi4py, 10 elements", partial(ranks.allreduce, ten, totals), [ten], [totals]),
        Variant(
            "mpistrategy",
            lambda: ctx.all_reduce("SUM", losses),
            [ten],
            load=lambda: losses.update(zip(losses, ten.tolist(), strict=True)),
        ),
    ]
    yield Case("small", "dict of 10 floats", ten.nbytes, variants, ctx)
