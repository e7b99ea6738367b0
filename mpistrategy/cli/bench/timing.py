"""How a case is timed: its variants in turn, round by round, on buffers that are in use.

Before each call every rank rewrites its whole operand, and after it reads its whole result: calls on idle buffers
would favour shared memory.  Neither is timed.  Short calls are timed in batches.  A call's time is that of its slowest
rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Case, Ranks, Variant, is_right

#: For each case, about.
QUICK_SECONDS, FULL_SECONDS = 1.0, 8.0
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 101
#: Calls from this many seconds on are timed one by one; what a batch of shorter ones should take.
ONE_BY_ONE, BATCH_SECONDS = 40e-6, 0.5e-3


def measure(case: Case, ranks: Ranks, seconds: float) -> dict[str, Any]:
    """Check that all variants are right, time them, check again.  Collective.

    Args:
        case: what is measured.
        ranks: who measures.
        seconds: how long that may take, about.

    Returns:
        The case as it goes into the JSON report; the same on every rank.
    """
    with case.within:
        before = [is_right(variant, ranks) for variant in case.variants]
        times = _time(case, ranks, seconds)
        right = [is_right(variant, ranks) and was for variant, was in zip(case.variants, before, strict=True)]
    rows = []
    for row, variant in enumerate(case.variants):
        rows.append({"name": variant.name, **summary(times[row], times[0]), "right": right[row]})
        rows[-1]["bus_gb_s"] = round(case.nbytes * 2 * (1 - 1 / ranks.size) / np.median(times[row]) / 1e9, 4)
    return {
        "suite": case.suite,
        "case": case.name,
        "bytes": case.nbytes,
        "reference": case.variants[0].name,
        "rounds": times.shape[1],
        "variants": rows,
    }


def summary(own: Array, reference: Array) -> dict[str, Any]:
    """Return the figures of one variant: the quartiles of its time and of its ratio to the reference.

    Args:
        own: the seconds of its calls, by round.
        reference: those of the reference's.
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
    once = [min(_round(variant, ranks, 1, 0, case.finish) for _ in range(3)) for variant in case.variants]
    once = ranks.greatest(np.array(once)).tolist()  # the same everywhere: the ranks decide alike
    is_short = case.batch is None and once[0] < ONE_BY_ONE
    calls = [max(int(BATCH_SECONDS / each), 1) if is_short else case.batch or 1 for each in once]
    began = time.perf_counter()
    for variant, count in zip(case.variants, calls, strict=True):
        _round(variant, ranks, count, 0, case.finish)
    one_round = float(ranks.greatest(np.array([time.perf_counter() - began]))[0])
    rounds = int(min(max(seconds / one_round, _LEAST_ROUNDS), _MOST_ROUNDS))
    order, times = random.Random(rounds), np.zeros((len(calls), rounds))  # so that no variant always follows the same
    for number in range(rounds):
        for index in order.sample(range(len(calls)), len(calls)):
            times[index, number] = _round(case.variants[index], ranks, calls[index], number, case.finish)
    return np.maximum(ranks.greatest(times), 1e-9)


def _round(variant: Variant, ranks: Ranks, calls: int, first: int, finish: Callable[[], object]) -> float:
    """Return the seconds of one of so many calls on this rank; operands are `first`, then more.  Collective."""
    total = 0.0
    with variant.within:
        if calls > 1:
            variant.call()  # wakes threads that slept while other variants ran
        for number in range(calls):
            variant.write(first + number)
            finish()
            if number == 0:
                ranks.barrier()
            start = time.perf_counter()
            result = variant.call()
            finish()
            total += time.perf_counter() - start
            variant.read(result)
    return total / calls
