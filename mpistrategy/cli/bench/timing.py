"""How a case is timed: its variants in turn, round by round, on buffers that are in use.

Before each call every rank rewrites its whole operand, and after it reads its whole result: calls on idle buffers
would favour shared memory.  Long calls are timed one by one behind a barrier; short ones in batches together with
the rewriting and reading, whose own time is then measured and taken off.  A call's time is that of its slowest rank.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Case, Ranks, Variant, is_right

#: Calls from this many seconds on are timed one by one.
ONE_BY_ONE = 40e-6
#: What a batch of short calls should take, in seconds.
BATCH_SECONDS = 0.5e-3


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: for each case, about.
        least: rounds, at least.
        most: rounds, at most.
    """

    seconds: float
    least: int
    most: int


QUICK = Effort(seconds=1.0, least=5, most=15)
FULL = Effort(seconds=8.0, least=11, most=101)


def measure(case: Case, ranks: Ranks, effort: Effort) -> dict[str, Any]:
    """Check that all variants are right and equal on all ranks, time them, check again.  Collective.

    Returns:
        The case as it goes into the JSON report; the same on every rank.
    """
    with case.within:
        before = [is_right(variant, ranks) for variant in case.variants]
        gc_was_on = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            seconds = _time(case.variants, ranks, effort, case.batch)
        finally:
            if gc_was_on:
                gc.enable()
        right = [is_right(variant, ranks) and was for was, variant in zip(before, case.variants, strict=True)]
    rows = [
        {
            "name": variant.name,
            **summary(seconds[row], seconds[0]),
            "right": right[row],
        }
        for row, variant in enumerate(case.variants)
    ]
    return {
        "suite": case.suite,
        "case": case.name,
        "bytes": case.nbytes,
        "reference": case.variants[0].name,
        "rounds": seconds.shape[1],
        "variants": rows,
    }


def summary(own: Array, reference: Array) -> dict[str, float]:
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


def _time(variants: Sequence[Variant], ranks: Ranks, effort: Effort, batch: int | None) -> Array:
    """Return the seconds of one call, by variant and round."""
    for variant in variants:
        with variant.within:
            _alone(variant, ranks, 1)  # first touch of buffers, plans that are cached
    once = ranks.greatest(np.array([_probe(variant, ranks) for variant in variants]))
    # From here on the same numbers everywhere: the ranks decide alike.
    batches = [batch or 1] * len(variants)
    if batch is None and once[0, 0] < ONE_BY_ONE:
        batches = [max(int(BATCH_SECONDS / seconds), 1) for seconds in once.sum(axis=1)]
    short = max(batches) > 1
    one_round = float(((once[:, 0] + (1 + short) * once[:, 1]) * batches).sum())
    wanted = int(min(max(effort.seconds / one_round, effort.least), effort.most))
    order = random.Random(wanted)  # so that no variant always follows the same one
    seconds = np.zeros((len(variants), wanted))
    for number in range(wanted):
        for index in order.sample(range(len(variants)), len(variants)):
            variant = variants[index]
            with variant.within:
                one = _in_batch(variant, ranks, batches[index], number) if short else _alone(variant, ranks, number)
                seconds[index, number] = one
    return np.maximum(ranks.greatest(seconds), 1e-9)


def _probe(variant: Variant, ranks: Ranks) -> tuple[float, float]:
    """Return the seconds of a call, and those of rewriting and reading."""
    with variant.within:
        seconds = [_alone(variant, ranks, number) for number in range(3)]
        result = variant.call()
    write, read = variant.writer(), variant.reader(result)
    return min(seconds), max(min(_touches(write, read, result, 1, 0) for _ in range(3)), 1e-7)


def _alone(variant: Variant, ranks: Ranks, value: float) -> float:
    variant.writer()(value)
    ranks.barrier()
    start = time.perf_counter()
    result = variant.call()
    end = time.perf_counter()
    variant.reader(result)(result)
    return end - start


def _in_batch(variant: Variant, ranks: Ranks, calls: int, first: int) -> float:
    call = variant.call
    result = call()  # also wakes threads that slept while other variants ran
    write, read = variant.writer(), variant.reader(result)
    ranks.barrier()
    start = time.perf_counter()
    for number in range(first, first + calls):
        write(number)
        result = call()
        read(result)
    end = time.perf_counter()
    return (end - start - _touches(write, read, result, calls, first)) / calls


def _touches(
    write: Callable[[float], object], read: Callable[[Any], object], result: Any, calls: int, first: int
) -> float:
    """Return the seconds of `calls` times rewriting and reading, without the calls between them."""
    start = time.perf_counter()
    for number in range(first, first + calls):
        write(number)
        read(result)
    return time.perf_counter() - start
