"""How a case is timed: its variants in turn, round by round, on buffers that are in use.

Before each call every rank rewrites its whole operand and, after it, reads its whole result: calls on idle buffers
flatter whatever shares memory.  Long calls are timed one by one behind a barrier; short ones in batches together with
the rewriting and reading, whose own time is then measured and taken off.  A call's time is that of its slowest rank.
Calls during which a rank had to share its core are left out where enough others remain: they measure the neighbours.
"""

from __future__ import annotations

import gc
import hashlib
import random
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mpistrategy import nest
from mpistrategy.arrays import Array

#: Calls from this many seconds on are timed one by one.
ONE_BY_ONE = 40e-6
#: What a batch of short calls should take, in seconds.
BATCH_SECONDS = 0.5e-3
#: How much longer than asked for a case may take when other programs disturb it.
PATIENCE = 3.0


class Ranks(Protocol):
    """What the timing needs of the ranks; `mpistrategy.bench.raw.RawRanks`."""

    rank: int
    size: int

    def barrier(self) -> None: ...

    def greatest(self, values: Array) -> Array: ...

    def all_equal(self, digest: bytes) -> bool: ...


@dataclass
class Variant:
    """One way to do what a case asks for.

    Attributes:
        name: how tables call it.
        call: does it; returns the result (a nest of arrays or numbers), or None when it is in `results`.
        operands: this rank's arrays that are rewritten before every call.
        results: where `call` writes to; None means the operands themselves.
        check: does it once and says whether the result is right here; None means that it is a sum of the operands.
        load: brings rewritten operands to where the call takes them from, when they are no arrays of its own.
        close: gives back what the variant holds.  Collective.
    """

    name: str
    call: Callable[[], Any]
    operands: Sequence[Array]
    results: Sequence[Array] | None = None
    check: Callable[[], bool] | None = None
    load: Callable[[], object] | None = None
    close: Callable[[], object] | None = None

    def write(self, value: float) -> None:
        """Rewrite every operand."""
        for operand in self.operands:
            operand.fill(value)
        if self.load is not None:
            self.load()

    def read(self, result: Any) -> None:
        """Read every element of the result."""
        if result is None:
            result = self.operands if self.results is None else self.results
        if isinstance(result, (list, tuple)):
            for part in result:
                self.read(part)
        elif isinstance(result, dict):
            for part in result.values():
                self.read(part)
        elif isinstance(result, np.ndarray) and result.ndim > 0:
            if result.size == 1:
                result.item(0)
            else:
                result.max()
        else:
            float(result)


@dataclass
class Case:
    """A question and the ways to answer it; the first variant is the reference of the ratios.

    Attributes:
        suite: the group that it belongs to.
        name: e.g. ``"64 MiB"``.
        nbytes: what each rank contributes.
        variants: at least one.
        within: what is entered while its variants are called.
        batch: how many calls are timed together; None: by their length.
        missing: what could not be measured here, and why.
    """

    suite: str
    name: str
    nbytes: int
    variants: list[Variant]
    within: AbstractContextManager[Any] = field(default_factory=nullcontext)
    batch: int | None = None
    missing: dict[str, str] = field(default_factory=dict)


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
        seconds, disturbed, batch = _time(case.variants, ranks, effort, case.batch)
    finally:
        if gc_was_on:
            gc.enable()
    right = [is_right(variant, ranks) and before for before, variant in zip(right, case.variants, strict=True)]
    enough = [bool((~own).sum() >= effort.least) for own in disturbed]
    kept = [~own if some else np.ones_like(own) for own, some in zip(disturbed, enough, strict=True)]
    return {
        "suite": case.suite,
        "case": case.name,
        "bytes": case.nbytes,
        "reference": case.variants[0].name,
        "rounds": seconds.shape[1],
        "batch": batch,
        "variants": [
            {
                "name": variant.name,
                **summary(seconds[index], seconds[0], kept[index], kept[0]),
                "disturbed": int(disturbed[index].sum()),
                "disturbed_left_out": enough[index],
                "right": right[index],
            }
            for index, variant in enumerate(case.variants)
        ],
        "missing": case.missing,
    }


def summary(own: Array, reference: Array, own_kept: Array, reference_kept: Array) -> dict[str, Any]:
    """Return the figures of one variant: median and quartiles, and those of the ratios to the reference by round.

    Args:
        own: its seconds, by round.
        reference: those of the reference.
        own_kept: which of its rounds count.
        reference_kept: which of the reference's count.
    """
    fastest, first, median, third = np.quantile(1e6 * own[own_kept], [0, 0.25, 0.5, 0.75])
    base = 1e6 * reference[reference_kept]
    both = own_kept & reference_kept
    if not both.any():  # never both in one round
        both = np.ones_like(both)
    ratios = np.quantile(own[both] / reference[both], [0.25, 0.5, 0.75])
    figures = {
        "fastest_us": fastest,
        "quartile_1_us": first,
        "median_us": median,
        "quartile_3_us": third,
        "ratio": median / np.median(base),
        "ratio_quartile_1": ratios[0],
        "ratio_by_round": ratios[1],
        "ratio_quartile_3": ratios[2],
        "ratio_of_fastest": fastest / base.min(),
    }
    return {name: round(float(figure), 4) for name, figure in figures.items()}


def _time(variants: Sequence[Variant], ranks: Ranks, effort: Effort, batch: int | None) -> tuple[Array, Array, int]:
    """Return the seconds of one call, by variant and round; which of them were disturbed; how many calls in a batch."""
    for variant in variants:
        _alone(variant, ranks, 1)  # first touch of buffers, plans that are cached
    once = ranks.greatest(np.array([_probe(variant, ranks) for variant in variants]))
    # From here on the same numbers everywhere: the ranks decide alike.
    if batch is None and once[0, 0] < ONE_BY_ONE:
        batch = max(int(BATCH_SECONDS / float(np.median(once.sum(axis=1)))), 1)
    batch = batch or 1
    one_round = float(once[:, 0].sum() + (2 if batch > 1 else 1) * once[:, 1].sum()) * batch
    wanted = int(min(max(effort.seconds / one_round, effort.least), effort.most))
    order = random.Random(wanted)  # so that nobody always runs behind the same neighbour
    seconds, disturbed = np.zeros((len(variants), 0)), np.zeros((len(variants), 0), bool)
    started = time.perf_counter()
    while True:
        some = np.zeros((2, len(variants), wanted))
        for number in range(wanted):
            for index in order.sample(range(len(variants)), len(variants)):
                variant, switches = variants[index], _switches()
                some[0, index, number] = (
                    _alone(variant, ranks, number) if batch == 1 else _in_batch(variant, ranks, batch, number)
                )
                some[1, index, number] = _switches() > switches
        some = ranks.greatest(some)
        seconds = np.concatenate([seconds, some[0]], axis=1)
        disturbed = np.concatenate([disturbed, some[1] > 0], axis=1)
        elapsed = ranks.greatest(np.array([time.perf_counter() - started]))[0]
        if (~disturbed).sum(axis=1).min() >= min(effort.least, wanted) or elapsed > PATIENCE * effort.seconds:
            return np.maximum(seconds, 1e-9), disturbed, batch


def _switches() -> int:
    """Return how often this process had to give its core away."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _probe(variant: Variant, ranks: Ranks) -> tuple[float, float]:
    """Return the seconds of a call, and those of rewriting and reading."""
    seconds = [_alone(variant, ranks, number) for number in range(3)]
    return min(seconds), max(_touches(variant, variant.call(), 1, 0), 1e-7)


def _alone(variant: Variant, ranks: Ranks, value: float) -> float:
    variant.write(value)
    ranks.barrier()
    start = time.perf_counter()
    result = variant.call()
    end = time.perf_counter()
    variant.read(result)
    return end - start


def _in_batch(variant: Variant, ranks: Ranks, calls: int, first: int) -> float:
    write, call, read = variant.write, variant.call, variant.read
    ranks.barrier()
    start = time.perf_counter()
    for number in range(first, first + calls):
        write(number)
        result = call()
        read(result)
    end = time.perf_counter()
    return (end - start - _touches(variant, result, calls, first)) / calls


def _touches(variant: Variant, result: Any, calls: int, first: int) -> float:
    """Return the seconds of `calls` times rewriting and reading, without the calls between them."""
    write, read = variant.write, variant.read
    start = time.perf_counter()
    for number in range(first, first + calls):
        write(number)
        read(result)
    return time.perf_counter() - start


def is_right(variant: Variant, ranks: Ranks) -> bool:
    """Sum a pattern over the ranks; say whether every rank has the right result, and all the same bits.  Collective."""
    if variant.check is not None:
        return not ranks.greatest(np.array([float(not variant.check())]))[0]
    for index, operand in enumerate(variant.operands):
        operand[...] = _pattern(operand, index, 1, ranks.rank)
    if variant.load is not None:
        variant.load()
    ranks.barrier()
    result = variant.call()
    if result is None:
        result = list(variant.operands if variant.results is None else variant.results)
    leaves = nest.flatten(result)[0]
    if len(leaves) != len(variant.operands):  # a structure of numbers that were loaded from one array
        leaves = [np.array(leaves)]
    total_of_ranks = ranks.size * (ranks.size - 1) // 2
    digest, right = hashlib.sha256(), True
    for index, (leaf, operand) in enumerate(zip(leaves, variant.operands, strict=True)):
        expected = _pattern(operand, index, ranks.size, total_of_ranks)
        right = right and bool((np.reshape(leaf, operand.shape) == expected).all())
        digest.update(np.ascontiguousarray(leaf).data)
    wrong_somewhere = ranks.greatest(np.array([float(not right)]))[0]
    return ranks.all_equal(digest.digest()) and not wrong_somewhere


def _pattern(like: Array, index: int, times: int, plus: int) -> Array:
    """Return small whole numbers, different from place to place and array to array: their sums are exact."""
    return np.resize((np.arange(251) + index % 7) * times + plus, like.shape).astype(like.dtype)
