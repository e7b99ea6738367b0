"""`mpistrategy bench --save`: measures the thresholds of `thresholds.Thresholds` for this machine and job.

One threshold after the other: strategies that differ only in this threshold take turns.  A value replaces the default
only if it is clearly faster.  All ranks come to the same values, since they see the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.cases import Case, Variant
from mpistrategy.cli.bench.timing import measure, tell
from mpistrategy.cli.ranks import Ranks
from mpistrategy.mpi.tuning.thresholds import Thresholds, default_for, trying
from mpistrategy.objects.shown import size_in_words
from mpistrategy.strategy.mirrored import MirroredStrategy

#: A value replaces the default only if its time is below this fraction of the default's.
CLEARLY = 0.95
NEVER = 2**40

#: For each threshold the values that are tried, which are also the sizes on which; powers of two.
_SIZES: dict[str, list[int]] = {
    "chunk_bytes": [2**n for n in range(16, 21)],
    "window_bytes": [2**n for n in range(12, 23, 2)],
    "cell_bytes": [2**n for n in (11, 13, 15, 16, 17, 18)],
    "pack_bytes": [2**n for n in range(10, 19, 2)],
    "lanes_bytes": [2**n for n in (16, 18, 19, 20, 22)],
}
_LARGE = (2**20, 2**24)
_PACKED_ARRAYS = 50


class Search:
    """The thresholds measured so far, and their cases.

    Args:
        ranks: who measures.
        about: the result of `command.environment`.  The library's defaults stay where no other value is clearly faster.
        quick: whether to measure each comparison once and for a moment.
    """

    def __init__(self, ranks: Ranks, about: Mapping[str, Any], quick: bool) -> None:
        self._ranks, self._about = ranks, about
        self._seconds, self._trials = (0.05, 1) if quick else (0.3, 3)
        self.thresholds: Thresholds = default_for(about["mpi"])
        self.cases: list[dict[str, Any]] = []

    def run(self) -> Thresholds:
        """Measure all thresholds; return them.  Collective."""
        if self._about["ranks_on_node"] > 1 < self._about["nodes"]:  # thresholds for one node alone are not used then
            self._settle("lanes_bytes", (64, *_SIZES["lanes_bytes"], NEVER))
        elif self._about["ranks_on_node"] > 1:
            self._settle("chunk_bytes", _SIZES["chunk_bytes"], _LARGE, cell_bytes=64, window_bytes=64)
            self._settle("window_bytes", (64, *_SIZES["window_bytes"], NEVER), cell_bytes=64)
            self._settle("cell_bytes", (64, *_SIZES["cell_bytes"]))
        self._settle("pack_bytes", (64, *_SIZES["pack_bytes"]), arrays=_PACKED_ARRAYS)
        return self.thresholds

    def _settle(
        self, name: str, values: Sequence[int], sizes: Sequence[int] = (), arrays: int = 1, **settings: Any
    ) -> None:
        """Take the value that is fastest over all sizes, if it is clearly faster than the present value.

        Args:
            name: of the threshold.
            values: the values to try besides the present value.
            sizes: of each array; empty for the sizes of the threshold.
            arrays: how many arrays.
            settings: values of further thresholds during the measurement.
        """
        present: int = asdict(self.thresholds)[name]
        candidates = list(dict.fromkeys((present, *values)))
        trials = [self._logs(name, candidates, sizes or _SIZES[name], arrays, settings) for _ in range(self._trials)]
        costs = dict(zip(candidates, np.median(trials, axis=0).tolist(), strict=True))
        best = min(costs, key=lambda value: costs[value])
        value: Any = best if costs[best] < costs[present] + np.log(CLEARLY) else present
        words = ["never" if size == NEVER else size_in_words(size) for size in (value, present)]
        tell(self._ranks, f"{name}: {words[0]} (default {words[1]})")
        self.thresholds = replace(self.thresholds, **{name: value})

    def _logs(
        self, name: str, candidates: Sequence[int], sizes: Sequence[int], arrays: int, settings: Mapping[str, Any]
    ) -> Array:
        """Return the mean over the sizes of the logarithm of the time, for each value; by new strategies."""
        with ExitStack() as stack:
            strategies = []
            for value in candidates:
                with trying(replace(self.thresholds, **{**settings, name: value})):
                    strategies.append(stack.enter_context(closing(MirroredStrategy())))
            logs = []
            for size in sizes:
                # One element less where there are several arrays, which are packed below the threshold.
                operands = [np.zeros(size // 4 - (arrays > 1), np.float32) for _ in range(arrays)]
                summed = operands if arrays > 1 else operands[0]
                variants = [
                    Variant(size_in_words(value), partial(strategy.reduce, "SUM", summed), operands)
                    for value, strategy in zip(candidates, strategies, strict=True)
                ]
                self.cases.append(measure(Case(name, size_in_words(size), size, variants), self._ranks, self._seconds))
                logs.append(np.log([row["median_us"] for row in self.cases[-1]["variants"]]))
        return np.asarray(np.mean(logs, axis=0))
