"""`mpistrategy bench --save` on several nodes: measures the rates that the formulas of `mpi.tuning.costs` need.

A copy and an addition are measured on one rank of each node while the others sleep, and on all at once; messages
between counterparts (the ranks with the same number on their nodes) on all ranks at once, from each node to the next.
Then MPI's Allreduce and the pairwise exchange are timed by size, and compared with what the formulas say.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.cases.case import Case, Variant
from mpistrategy.cli.bench.forecast.tables import RATES, rate_in_words
from mpistrategy.cli.bench.measuring.raw import RawRanks
from mpistrategy.cli.bench.measuring.timing import Effort, measure
from mpistrategy.mpi.multi_node.two_level import allreduce_across
from mpistrategy.mpi.tuning import costs
from mpistrategy.mpi.tuning.thresholds import CostName, Rates, Thresholds
from mpistrategy.objects.shown import size_in_words

_KIB, _MIB = 2**10, 2**20
SIZES = (8, 4 * _KIB, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB)
PAIRWISE_SIZES = SIZES[2:]
LARGE, MANY, TRIALS = 8 * _MIB, 100, 11
#: For each size. Networks vary: even a quick run needs some rounds.
EFFORT = Effort(seconds=1.5, least=15, most=51)
QUICK = Effort(seconds=0.5, least=9, most=31)
#: How often a rank that has nothing to do looks whether the others are done.
_REST_SECONDS = 1e-3
#: Linux numbers no more.
_MOST_CORES = 8192


class NodeRates:
    """Measures the rates of the job's nodes.  Collective.

    Args:
        ranks: all ranks of the job.
        communicator: a strategy's, of the same ranks.
        tell: called with a line about each measurement.
        effort: for each size.
    """

    def __init__(self, ranks: RawRanks, communicator: Any, tell: Callable[[str], None], effort: Effort) -> None:
        self._ranks, self._tell, self._effort = ranks, tell, effort
        self._communicator = communicator
        self.cases: list[dict[str, Any]] = []
        self._kept: dict[int, tuple[Array, Array]] = {}
        node_of = communicator.node_of
        own_node = [rank for rank, node in enumerate(node_of) if node == node_of[ranks.rank]]
        on_node = Counter(node_of).values()
        #: Of the smallest node: what the formulas are asked for.
        self.lanes: int = min(on_node)
        self.nodes: int = len(on_node)
        self._most = max(on_node)
        self._local_rank = own_node.index(ranks.rank)
        self._has_lane = self._local_rank < self.lanes
        # Ranks without a counterpart on every node have a communicator of themselves, and take part in nothing.
        lane = self._local_rank if self._has_lane else self.lanes + ranks.rank
        self._counterparts = ranks.comm.Split(lane, ranks.rank)
        self._node = ranks.comm.Split(node_of[ranks.rank], ranks.rank)

    def close(self) -> None:
        """Free the communicators.  Collective."""
        self._counterparts.Free()
        self._node.Free()

    def measured(self, thresholds: Thresholds) -> Rates:
        """Return the rates of `thresholds` with those measured that matter between nodes.  Collective."""
        latency = self._seconds(lambda: self._shift(8, MANY)) / MANY
        nbytes = LARGE // self.lanes
        on_link = max(self._seconds(lambda: self._shift(nbytes)) - latency, latency)
        source, target = np.ones(LARGE // 8), np.zeros(LARGE // 8)
        works: list[Callable[[], object]] = [
            lambda: np.copyto(target, source),
            lambda: np.add(target, source, out=target),
        ]
        copy, add = (self._seconds(work, alone=True) for work in works)
        together = max(self._seconds(work) for work in works)
        waits = self._seconds(lambda: [self._communicator.node_barrier() for _ in range(2 * MANY)]) / MANY
        rates = replace(
            thresholds.rates,
            latency_seconds=latency,
            link_bytes_per_second=self.lanes * nbytes / on_link,
            copy_bytes_per_second=LARGE / copy,
            add_bytes_per_second=LARGE / add,
            memory_bytes_per_second=self._most * LARGE / together,
            cores=float(self._cores()),
            python_message_seconds=self._seconds(self._many_messages) / MANY,
            lanes_seconds=waits,
            measured_over_estimated=(),
        )
        for name, what in RATES.items():
            self._tell(f"{what}: {rate_in_words(rates, name)}")
        return replace(rates, measured_over_estimated=self._corrections(replace(thresholds, rates=rates)))

    def _corrections(self, thresholds: Thresholds) -> tuple[tuple[CostName, int, float], ...]:
        found: list[tuple[CostName, int, float]] = []
        for nbytes in SIZES:
            variants, counted = self._variants(nbytes)
            case = measure(Case("rates", size_in_words(nbytes), nbytes, variants), self._ranks, self._effort)
            self.cases.append(case)
            for (name, size), row in zip(counted, case["variants"], strict=True):
                ratio = row["median_us"] / 1e6 / ESTIMATES[name](self.nodes, self.lanes, size, thresholds)
                found.append((name, size, float(f"{ratio:.3g}")))
                self._tell(f"{name}, {size_in_words(size)}: {row['median_us']:.4g} us, {ratio:.2f} times the estimate")
        return tuple(found)

    def _variants(self, nbytes: int) -> tuple[list[Variant], list[tuple[CostName, int]]]:
        """Return what is timed with so many bytes, and the name and bytes of each for the formulas."""
        mine = np.zeros(nbytes // 4, np.float32)
        total = np.zeros_like(mine)
        part, part_total = (array[: max(1, mine.size // self.lanes)] for array in (mine, total))
        between, check = partial(self._between, part, part_total), partial(self._is_right, part, part_total)
        variants = [
            Variant("flat", partial(self._ranks.allreduce, mine, total), [mine], [total]),
            Variant("counterparts", between, [part], [part_total], check=check),
        ]
        counted: list[tuple[CostName, int]] = [("flat", nbytes), ("counterparts", part.nbytes)]
        if nbytes in PAIRWISE_SIZES:
            variants.append(
                Variant("pairwise", partial(allreduce_across, self._communicator, mine, way="across"), [mine])
            )
            counted.append(("pairwise", nbytes))
        return variants, counted

    def _between(self, part: Array, total: Array) -> None:
        if self._has_lane:
            self._counterparts.Allreduce(part, total)

    def _is_right(self, part: Array, total: Array) -> bool:
        part[...] = 1
        self._between(part, total)
        return not self._has_lane or bool((total == self.nodes).all())

    def _shift(self, nbytes: int, times: int = 1) -> None:
        """Send so many bytes to the next node, and receive as many from the one before."""
        if self._has_lane:
            after, before = self._neighbours()
            sent, received = self._buffers(nbytes)
            for _ in range(times):
                self._counterparts.Sendrecv(sent, after, 0, received, before, 0)

    def _many_messages(self) -> None:
        if self._has_lane:
            after, before = self._neighbours()
            sent, received = self._buffers(64)
            requests = []
            for _ in range(MANY):
                requests.append(self._counterparts.Irecv(received, before, 1))
                requests.append(self._counterparts.Isend(sent, after, 1))
            for request in requests:
                request.Wait()

    def _neighbours(self) -> tuple[int, int]:
        rank, size = self._counterparts.rank, self._counterparts.size
        return (rank + 1) % size, (rank - 1) % size

    def _buffers(self, nbytes: int) -> tuple[Array, Array]:
        if nbytes not in self._kept:
            self._kept[nbytes] = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        return self._kept[nbytes]

    def _seconds(self, work: Callable[[], object], alone: bool = False) -> float:
        """Return the median time of the slowest rank; `alone`: of the first rank of each node, while others sleep."""
        works = not alone or self._local_rank == 0
        times = np.zeros(TRIALS + 1)
        for trial in range(TRIALS + 1):
            self._ranks.barrier()
            start = time.perf_counter()
            if works:
                work()
                times[trial] = time.perf_counter() - start
            if alone:
                done = self._node.Ibarrier()
                while not done.Test():
                    time.sleep(_REST_SECONDS)
        return float(np.median(self._ranks.greatest(times)[1:]))

    def _cores(self) -> int:
        """Return how many cores the ranks of a node may run on together; of the node with the fewest."""
        usable = np.zeros(_MOST_CORES, np.int32)
        usable[list(os.sched_getaffinity(0))] = 1
        self._node.Allreduce(self._ranks.in_place, usable)
        return int(-self._ranks.greatest(np.array([-float((usable > 0).sum())]))[0])


ESTIMATES: dict[CostName, Callable[[int, int, int, Thresholds], float]] = {
    "flat": costs.flat_seconds,
    "pairwise": costs.pairwise_seconds,
    "counterparts": costs.counterparts_seconds,
}
