"""`mpistrategy bench --save`: measures the thresholds of `thresholds.Thresholds` for this machine and job.

One threshold after the other: strategies that differ in it alone take turns, and a value other than the default must
be clearly faster.  All ranks come to the same values, since all see the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.cases import Case, Variant
from mpistrategy.cli.bench.timing import measure, tell
from mpistrategy.mpi.tuning.thresholds import Thresholds, trying
from mpistrategy.objects.shown import size_in_words
from mpistrategy.strategy.current import get_replica_context
from mpistrategy.strategy.mirrored import MirroredStrategy
from mpistrategy.strategy.strategy import Strategy

if TYPE_CHECKING:
    from mpistrategy.cli.bench.raw import RawRanks

#: A value replaces the default only if its time is below this fraction of the default's.
CLEARLY = 0.95
NEVER = 2**40
_KIB = 2**10

#: For each threshold the values that are tried, and the sizes in bytes on which.
_SIZES = {
    "chunk_bytes": tuple(size * _KIB for size in (64, 128, 256, 512, 1024)),
    "window_bytes": tuple(size * _KIB for size in (4, 16, 64, 256, 1024, 4096)),
    "cell_bytes": tuple(size * _KIB for size in (1, 2, 4, 8, 16, 32)),
    "pack_bytes": tuple(size * _KIB for size in (1, 4, 16, 64, 256)),
    "lanes_bytes": tuple(size * _KIB for size in (64, 256, 512, 1024, 4096)),
}
_LARGE = (2**20, 2**24)
_PACKED_ARRAYS = 50


class Search:
    """The thresholds found so far, and how they were found.

    Args:
        ranks: who measures.
        default: kept where nothing else is clearly faster.
        quick: whether to measure each comparison once and for a moment.
    """

    def __init__(self, ranks: RawRanks, default: Thresholds, quick: bool) -> None:
        self._ranks = ranks
        self._seconds, self._trials = (0.05, 1) if quick else (0.3, 3)
        self.found: Thresholds = default
        self.cases: list[dict[str, Any]] = []

    def run(self) -> Thresholds:
        """Measure all thresholds; return them.  Collective."""
        if self._ranks.ranks_on_node > 1 and self._ranks.nodes > 1:  # what is for a node alone is not used then
            self._settle("lanes_bytes", (64, *_SIZES["lanes_bytes"], NEVER))
        elif self._ranks.ranks_on_node > 1:
            self._settle("chunk_bytes", _SIZES["chunk_bytes"], _LARGE, cell_bytes=64, window_bytes=64)
            self._settle("window_bytes", (64, *_SIZES["window_bytes"], NEVER), cell_bytes=64)
            self._settle("cell_bytes", (64, *_SIZES["cell_bytes"]))
        self._settle("pack_bytes", (64, *_SIZES["pack_bytes"]), arrays=_PACKED_ARRAYS)
        return self.found

    def _settle(
        self, name: str, values: Sequence[int], sizes: Sequence[int] = (), arrays: int = 1, **others: int
    ) -> None:
        """Take the value that is fastest over all sizes, if it is clearly faster than the present one.

        Args:
            name: of the threshold.
            values: what is tried besides the present one.
            sizes: of each array; those of the threshold where none are given.
            arrays: how many of them.
            others: further thresholds, as long as this one is tried.
        """
        present: int = asdict(self.found)[name]
        tried = list(dict.fromkeys((present, *values)))
        trials = [self._logs(name, tried, sizes or _SIZES[name], arrays, others) for _ in range(self._trials)]
        costs = dict(zip(tried, np.median(trials, axis=0).tolist(), strict=True))
        best = min(costs, key=lambda value: costs[value])
        value = best if costs[best] < costs[present] + np.log(CLEARLY) else present
        words = ["never" if size == NEVER else size_in_words(size) for size in (value, present)]
        tell(self._ranks, f"{name}: {words[0]} (default {words[1]})")
        self.found = _with(self.found, {name: value})

    def _logs(
        self, name: str, tried: Sequence[int], sizes: Sequence[int], arrays: int, others: Mapping[str, int]
    ) -> Array:
        """Return the mean over the sizes of the logarithm of the time, for each value; by strategies made anew."""
        with ExitStack() as stack:
            strategies = []
            for value in tried:
                with trying(_with(self.found, {**others, name: value})):
                    strategies.append(stack.enter_context(closing(MirroredStrategy())))
            logs = []
            for size in sizes:
                # One element less of several, which are packed below the threshold.
                operands = [np.zeros(size // 4 - (arrays > 1), np.float32) for _ in range(arrays)]
                variants = [
                    Variant(size_in_words(value), _sum(strategy, operands), operands)
                    for value, strategy in zip(tried, strategies, strict=True)
                ]
                self.cases.append(measure(Case(name, size_in_words(size), size, variants), self._ranks, self._seconds))
                logs.append(np.log([row["median_us"] for row in self.cases[-1]["variants"]]))
        return np.asarray(np.mean(logs, axis=0))


def _with(thresholds: Thresholds, changes: Mapping[str, Any]) -> Thresholds:
    return replace(thresholds, **changes)


def _sum(strategy: Strategy, operands: Sequence[Array]) -> Callable[[], Any]:
    value = operands[0] if len(operands) == 1 else operands

    def step() -> Any:
        context = get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", value)

    return lambda: strategy.run(step)
