"""How a case is timed: its variants in turn, round by round, on buffers that are in use.

Before each call every rank rewrites its whole operand, and after it reads its whole result: calls on idle buffers
would favour shared memory.  Neither is timed.  Short calls are timed in batches.  A call's time is that of its slowest
rank.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.cases import Case, Variant
from mpistrategy.cli.ranks import Ranks

_LEAST_ROUNDS, _MOST_ROUNDS = 5, 101
#: Calls from this many seconds on are timed one by one; the seconds of a batch of shorter calls.
ONE_BY_ONE, BATCH_SECONDS = 40e-6, 0.5e-3


def measure(case: Case, ranks: Ranks, seconds: float) -> dict[str, Any]:
    """Check that all variants are right, time them, check again.  Collective.

    Args:
        case: the variants to measure.
        ranks: who measures.
        seconds: how long that may take, about.

    Returns:
        The case as it goes into the JSON report; the same on every rank.
    """
    before = [is_right(variant, ranks) for variant in case.variants]
    times = _time(case, ranks, seconds)
    after = [is_right(variant, ranks) for variant in case.variants]
    rows = []
    for variant, own, *right in zip(case.variants, times, before, after, strict=True):
        bus = case.nbytes * 2 * (1 - 1 / ranks.size) / np.median(own) / 1e9
        rows.append({"name": variant.name, **summary(own, times[0]), "bus_gb_s": round(bus, 4), "right": all(right)})
    case_of = {"suite": case.suite, "case": case.name, "bytes": case.nbytes, "reference": case.variants[0].name}
    return {**case_of, "rounds": times.shape[1], "variants": rows}


def tell(ranks: Ranks, line: str) -> None:
    """Say something about the run that is not one of its figures."""
    if ranks.rank == 0:
        print(line, file=sys.stderr, flush=True)


def is_right(variant: Variant, ranks: Ranks) -> bool:
    """Return whether the sum of known numbers is right on every rank.  Collective."""
    variant.write(ranks.rank + 1)
    ranks.comm.Barrier()
    expected = ranks.size * (ranks.size + 1) // 2
    right = all(bool((leaf == expected).all()) for leaf in variant.leaves(variant.call()))
    return ranks.all_right(right)


def summary(own: Array, reference: Array) -> dict[str, Any]:
    """Return the figures of one variant: the quartiles of its time and of its ratio to the reference.

    Args:
        own: the seconds of its calls, by round.
        reference: the seconds of the reference's calls.
    """
    fastest, first, middle, third = np.quantile(1e6 * own, [0, 0.25, 0.5, 0.75])
    low, high = np.quantile(own / reference, [0.25, 0.75])
    figures = {
        "fastest_us": fastest,
        "quartile_1_us": first,
        "median_us": middle,
        "quartile_3_us": third,
        "ratio": np.median(own) / np.median(reference),
        "ratio_quartile_1": low,
        "ratio_quartile_3": high,
    }
    return {name: round(float(figure), 4) for name, figure in figures.items()}


def _time(case: Case, ranks: Ranks, seconds: float) -> Array:
    """Return the seconds of one call, by variant and round."""
    once = [min(_round(case, variant, ranks, 1, number) for number in range(3)) for variant in case.variants]
    once = ranks.greatest(np.array(once)).tolist()  # the same everywhere: the ranks decide alike
    calls = [1] * len(once)
    if once[0] < ONE_BY_ONE:
        calls = [max(int(BATCH_SECONDS / duration), 1) for duration in once]
    began = time.perf_counter()
    for variant, count in zip(case.variants, calls, strict=True):
        _round(case, variant, ranks, count, 0)
    one_round = ranks.slowest(time.perf_counter() - began)
    rounds = int(min(max(seconds / one_round, _LEAST_ROUNDS), _MOST_ROUNDS))
    order = random.Random(rounds)  # so that no variant always follows the same one
    times = np.zeros((len(calls), rounds))
    for number in range(rounds):
        for index in order.sample(range(len(calls)), len(calls)):
            times[index, number] = _round(case, case.variants[index], ranks, calls[index], number)
    return np.maximum(ranks.greatest(times), 1e-9)


def _round(case: Case, variant: Variant, ranks: Ranks, calls: int, first: int) -> float:
    """Return the seconds of one of so many calls on this rank; operands are `first`, then more.  Collective."""
    if calls > 1:
        variant.call()  # wakes threads that slept while other variants ran
    total = 0.0
    for number in range(calls):
        variant.write(first + number)
        case.finish()
        if number == 0:
            ranks.comm.Barrier()
        start = time.perf_counter()
        result = variant.call()
        case.finish()
        total += time.perf_counter() - start
        for leaf in variant.leaves(result):
            leaf.max()
    return total / calls
