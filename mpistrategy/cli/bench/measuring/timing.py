"""How a case is timed: its variants in turn, round by round, on buffers that are in use.

Before each call every rank rewrites its whole operand, and after it reads its whole result: calls on idle buffers
would favour shared memory.  Long calls are timed one by one behind a barrier; short ones in batches together with
the rewriting and reading, whose own time is then measured and taken off.  A call's time is that of its slowest rank.
Calls during which a rank had to share its core are left out, where enough others remain: other programs disturbed
them.
"""

from __future__ import annotations

import gc
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.cases.case import Case, Ranks, Variant, is_right

#: Calls from this many seconds on are timed one by one.
ONE_BY_ONE = 40e-6
#: What a batch of short calls should take, in seconds.
BATCH_SECONDS = 0.5e-3
#: How much longer than asked for a case may take when other programs disturb it.
PATIENCE = 3.0
#: How long single calls of the first variant are looked at for its least time, and how many at most.
LEAST_SECONDS, MOST_LEAST_CALLS = 0.05, 200


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
        return _measure(case, ranks, effort)


def _measure(case: Case, ranks: Ranks, effort: Effort) -> dict[str, Any]:
    right = [is_right(variant, ranks) for variant in case.variants]
    gc_was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        seconds, disturbed, batches = _time(case.variants, ranks, effort, case.batch)
    finally:
        if gc_was_on:
            gc.enable()
    least = _least(case.variants[0], ranks, float(np.median(seconds[0])))
    right = [is_right(variant, ranks) and before for before, variant in zip(right, case.variants, strict=True)]
    enough = [bool((~own).sum() >= effort.least) for own in disturbed]
    kept = [~own if some else np.ones_like(own) for own, some in zip(disturbed, enough, strict=True)]
    return {
        "suite": case.suite,
        "case": case.name,
        "bytes": case.nbytes,
        "reference": case.variants[0].name,
        "rounds": seconds.shape[1],
        "least_us": round(1e6 * min(least, float(seconds[0].min())), 4),
        "variants": [
            {
                "name": variant.name,
                **summary(seconds[index], seconds[0], kept[index], kept[0], fair=enough[index] == enough[0]),
                "ratio_disturbed": not (enough[index] and enough[0]),
                "batch": batches[index],
                "disturbed": int(disturbed[index].sum()),
                "disturbed_left_out": enough[index],
                "right": right[index],
            }
            for index, variant in enumerate(case.variants)
        ],
        "missing": case.missing,
    }


def summary(
    own: Array, reference: Array, own_kept: Array, reference_kept: Array, *, fair: bool = True
) -> dict[str, Any]:
    """Return the figures of one variant: median and quartiles, and those of the ratios to the reference by round.

    Args:
        own: its seconds, by round.
        reference: those of the reference.
        own_kept: which of its rounds count.
        reference_kept: which of the reference's count.
        fair: whether the two were chosen by the same rule; else ratios are those of all rounds.
    """
    fastest, first, median, third = np.quantile(1e6 * own[own_kept], [0, 0.25, 0.5, 0.75])
    if not fair:
        own_kept = reference_kept = np.ones_like(own_kept)
    base = np.median(reference[reference_kept])
    both = own_kept & reference_kept
    if not both.any():  # never both in one round
        both = np.ones_like(both)
    ratios = np.quantile(own[both] / reference[both], [0.25, 0.5, 0.75])
    figures = {
        "fastest_us": fastest,
        "quartile_1_us": first,
        "median_us": median,
        "quartile_3_us": third,
        "ratio": np.median(own[own_kept]) / base,
        "ratio_quartile_1": ratios[0],
        "ratio_by_round": ratios[1],
        "ratio_quartile_3": ratios[2],
        "ratio_of_fastest": own.min() / reference.min(),
    }
    return {name: round(float(figure), 4) for name, figure in figures.items()}


def _time(
    variants: Sequence[Variant], ranks: Ranks, effort: Effort, batch: int | None
) -> tuple[Array, Array, list[int]]:
    """Return the seconds of one call, by variant and round; which were disturbed; how many calls each batch has."""
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
    seconds, disturbed = np.zeros((len(variants), 0)), np.zeros((len(variants), 0), bool)
    started = time.perf_counter()
    while True:
        some = np.zeros((2, len(variants), wanted))
        for number in range(wanted):
            for index in order.sample(range(len(variants)), len(variants)):
                variant = variants[index]
                with variant.within:
                    switches = _switches()
                    some[0, index, number] = (
                        _in_batch(variant, ranks, batches[index], number) if short else _alone(variant, ranks, number)
                    )
                    some[1, index, number] = _switches() > switches
        some = ranks.greatest(some)
        seconds = np.concatenate([seconds, some[0]], axis=1)
        disturbed = np.concatenate([disturbed, some[1] > 0], axis=1)
        elapsed = ranks.greatest(np.array([time.perf_counter() - started]))[0]
        if (~disturbed).sum(axis=1).min() >= min(effort.least, wanted) or elapsed > PATIENCE * effort.seconds:
            return np.maximum(seconds, 1e-9), disturbed, batches


def _switches() -> int:
    """Return how often this process had to give its core away."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _probe(variant: Variant, ranks: Ranks) -> tuple[float, float]:
    """Return the seconds of a call, and those of rewriting and reading."""
    with variant.within:
        seconds = [_alone(variant, ranks, number) for number in range(3)]
        result = variant.call()
    write, read = variant.writer(), variant.reader(result)
    return min(seconds), max(min(_touches(write, read, result, 1, 0) for _ in range(3)), 1e-7)


def _least(variant: Variant, ranks: Ranks, usual: float) -> float:
    """Return the least seconds of single calls one after the other, which hardly know of other programs.  Collective.

    Args:
        variant: what to call.
        ranks: all of them.
        usual: the seconds of a usual call, the same on all ranks.
    """
    took = np.zeros(int(min(max(LEAST_SECONDS / usual, 3), MOST_LEAST_CALLS)))
    variant.writer()(0)
    with variant.within:
        ranks.barrier()
        for number in range(took.size):
            start = time.perf_counter()
            variant.call()
            took[number] = time.perf_counter() - start
    return float(ranks.greatest(took).min())


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
