"""`mpistrategy bench --save`: measures the thresholds of `thresholds.Thresholds` for this machine and job.

One threshold after the other: strategies that differ in it alone take turns, and a value other than the default must
be clearly faster.  All ranks come to the same values, since all see the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Case, Ranks, Variant
from mpistrategy.cli.bench.timing import Effort, measure
from mpistrategy.mpi.tuning.files import trying
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Thresholds
from mpistrategy.objects.shown import size_in_words
from mpistrategy.strategy.current import get_replica_context
from mpistrategy.strategy.mirrored import MirroredStrategy
from mpistrategy.strategy.strategy import Strategy

EFFORT = Effort(seconds=0.3, least=7, most=31)
QUICK = Effort(seconds=0.05, least=3, most=9)
#: A value replaces the default only if its time is below this fraction of the default's.
CLEARLY = 0.95
NEVER = 2**40
_KIB, _MIB = 2**10, 2**20

#: What is tried, and on what.
CHUNKS = tuple(size * _KIB for size in (64, 128, 256, 512, 1024))
LARGE = (_MIB, 16 * _MIB)
WINDOW_SIZES = tuple(size * _KIB for size in (4, 16, 64, 256, 1024, 4096))
CELL_SIZES = tuple(size * _KIB for size in (1, 2, 4, 8, 16, 32))
PACK_SIZES = tuple(size * _KIB for size in (1, 4, 16, 64, 256))
LANES_SIZES = tuple(size * _KIB for size in (64, 256, 512, 1024, 4096))
PACKED_ARRAYS = 50


class Search:
    """The thresholds found so far, and how they were found.

    Args:
        ranks: who measures.
        share_memory: whether ranks of a node reduce through shared memory at all.
        nodes: how many nodes there are.
        tell: called with a line about each measurement.
        default: kept where nothing else is clearly faster.
        effort: for each case.
        trials: how often each comparison is made, with new strategies.
    """

    def __init__(
        self,
        ranks: Ranks,
        share_memory: bool,
        nodes: int,
        tell: Callable[[str], None],
        default: Thresholds = DEFAULT,
        effort: Effort = EFFORT,
        trials: int = 3,
    ) -> None:
        self.ranks = ranks
        self.share_memory = share_memory
        self.nodes = nodes
        self.tell = tell
        self.effort = effort
        self.trials = trials
        self.default: Thresholds = default
        self.paths: Thresholds = default
        self.cases: list[dict[str, Any]] = []

    def run(self) -> Thresholds:
        """Measure all thresholds; return them.  Collective."""
        if self.nodes > 1:  # what is for a node alone is not used then
            if self.share_memory:
                self._from_size("lanes_bytes", LANES_SIZES, self.default)
        elif self.share_memory:
            self._best("chunk_bytes", CHUNKS, replace(self.default, cell_bytes=64, window_bytes=64))
            self._from_size("window_bytes", WINDOW_SIZES, replace(self.paths, cell_bytes=64))
            self._up_to_size("cell_bytes", CELL_SIZES, _one)
        self._up_to_size("pack_bytes", PACK_SIZES, _many)
        return self.paths

    def _best(self, name: str, candidates: Sequence[int], base: Thresholds) -> None:
        """Find the value that is fastest over all large sizes."""
        default = getattr(self.default, name)
        ordered = [default, *(value for value in candidates if value != default)]
        tried = {size_in_words(value): _with(base, name, value) for value in ordered}
        logs = self._logs(name, LARGE, tried, _one)
        self._settle(name, dict(zip(ordered, logs.mean(axis=0), strict=True)))

    def _from_size(self, name: str, sizes: Sequence[int], base: Thresholds) -> None:
        """Find the size from which the route of the threshold `name` is faster."""
        logs = self._with_and_without(name, sizes, _with(base, name, NEVER), _with(base, name, 64), _one)
        self._settle(
            name, {start: sum(log for size, log in logs.items() if size >= start) for start in (*sizes, NEVER)}
        )

    def _up_to_size(self, name: str, sizes: Sequence[int], make: _Make) -> None:
        """Find the size up to which the route of the threshold `name` is faster."""
        without, most = _with(self.paths, name, 64), _with(self.paths, name, 2 * sizes[-1])
        logs = self._with_and_without(name, sizes, without, most, make)
        costs = {stop: sum(log for size, log in logs.items() if size <= stop) for stop in (64, *sizes)}
        self._settle(name, costs)

    def _with_and_without(
        self, name: str, sizes: Sequence[int], without: Thresholds, most: Thresholds, make: _Make
    ) -> dict[int, float]:
        logs = self._logs(name, sizes, {"without": without, "with": most}, make)
        return dict(zip(sizes, logs[:, 1].tolist(), strict=True))

    def _settle(self, name: str, costs: dict[int, float]) -> None:
        """Take the value of the least cost (a logarithm of time), if it is clearly less than the default's."""
        default = getattr(self.default, name)
        # A default between two of the sizes that were tried acts as the nearer one does.
        like_default = min(costs, key=lambda value: abs(np.log2(value / default)))
        best = min(costs, key=lambda value: costs[value])
        value = best if costs[best] < costs[like_default] + np.log(CLEARLY) else default
        words = ["never" if size == NEVER else size_in_words(size) for size in (value, default)]
        self.tell(f"{name}: {words[0]} (default {words[1]})")
        self.paths = _with(self.paths, name, value)

    def _logs(self, name: str, sizes: Sequence[int], tried: dict[str, Thresholds], make: _Make) -> Array:
        """Return the logarithms of the ratios to the first, by size and what is tried.

        They are medians of several trials with new strategies: speed also depends on where their memory lies.
        """
        logs = np.zeros((self.trials, len(sizes), len(tried)))
        for trial in range(self.trials):
            order = [(number + trial) % len(tried) for number in range(len(tried))]
            labels, paths = [list(tried)[n] for n in order], [list(tried.values())[n] for n in order]
            with _strategies(paths) as strategies:
                for row, size in enumerate(sizes):
                    case = self._case(name, size, labels, strategies, make)
                    medians = np.array([variant["median_us"] for variant in case["variants"]])[np.argsort(order)]
                    logs[trial, row] = np.log(medians / medians[0])
        return np.asarray(np.median(logs, axis=0))

    def _case(
        self,
        name: str,
        size: int,
        labels: Sequence[str],
        strategies: Sequence[Strategy],
        make: _Make,
    ) -> dict[str, Any]:
        operands = make(size)
        variants = [
            Variant(label, _sum(strategy, operands), operands)
            for label, strategy in zip(labels, strategies, strict=True)
        ]
        case = measure(Case(name, size_in_words(size), size, variants), self.ranks, self.effort)
        self.cases.append(case)
        return case


def _with(paths: Thresholds, name: str, value: int) -> Thresholds:
    changes: dict[str, Any] = {name: value}
    return replace(paths, **changes)


_Make = Callable[[int], list[Array]]


def _one(nbytes: int) -> list[Array]:
    return [np.zeros(nbytes // 4, np.float32)]


def _many(nbytes: int) -> list[Array]:
    return [np.zeros(nbytes // 4 - 1, np.float32) for _ in range(PACKED_ARRAYS)]


def _sum(strategy: Strategy, operands: Sequence[Any]) -> Callable[[], Any]:
    value = operands[0] if len(operands) == 1 else operands

    def step() -> Any:
        context = get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", value)

    return lambda: strategy.run(step)


@contextmanager
def _strategies(tried: Sequence[Thresholds]) -> Iterator[list[Strategy]]:
    """Make a strategy for each set of thresholds.  Collective."""
    with ExitStack() as stack:
        made: list[Strategy] = []
        for paths in tried:
            with trying(paths):
                made.append(stack.enter_context(closing(MirroredStrategy())))
        yield made
