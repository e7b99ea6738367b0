"""Which rank came last to the last collectives of a job, how often, and how long the first rank waited for it.

Every rank notes when it entered its last collectives, for its watchdog.  A node sends only a few numbers a call: when
its first and its last rank came, and the last rank's number.  Nodes have clocks of their own: a difference of the
clocks makes the waits wrong by as much.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpistrategy.cli.doctor.findings import count
from mpistrategy.mpi.watchdog.status_board import RankStatus
from mpistrategy.objects.shown import time_in_words

#: The most calls that are compared, and the fewest from which a rank is called slow.
MOST_CALLS, _FEWEST_CALLS = 64, 5
#: A slow rank came last in this share of the calls, the first rank waited for it during this share of the time, and the
#: median wait has this length.  Shorter waits come from the system's own work.
_SLOW_CALLS, _SLOW_TIME, _SLOW_SECONDS = 2 / 3, 0.05, 1e-4
_MOST_ROWS = 8


@dataclass(frozen=True)
class NodeCalls:
    """The last collectives of one strategy on one node.

    Attributes:
        strategy: its number, the same on all nodes.
        ranks: how many ranks it has.
        here: how many of them are on this node.
        arrivals: of the collectives that all ranks of this node have noted: the number of the collective, when the last
            rank came, the number of this rank, and when the first rank came; in seconds of time.time().
    """

    strategy: int
    ranks: int
    here: int
    arrivals: Sequence[tuple[int, float, int, float]]


@dataclass(frozen=True)
class Lateness:
    """Who came last to the last collectives of a strategy.

    Attributes:
        ranks: how many ranks the strategy has.
        missing: how many ranks nothing is known of.
        numbers: of the collectives that were compared.
        seconds: from the first of these collectives to the last.
        waits: for each rank that came last, the most frequent first: how long the first rank waited, each time.
    """

    ranks: int
    missing: int
    numbers: Sequence[int]
    seconds: float
    waits: Mapping[int, Sequence[float]]

    def share(self, rank: int) -> float:
        """Return for what part of the time a rank was waited for."""
        return sum(self.waits[rank]) / max(self.seconds, 1e-9)

    def slow(self) -> int | None:
        """Return the rank that keeps the others waiting; None where there is none, or some ranks are not known."""
        if self.missing or len(self.numbers) < _FEWEST_CALLS:
            return None
        rank, waits = next(iter(self.waits.items()))
        is_slow = len(waits) >= _SLOW_CALLS * len(self.numbers) and self.share(rank) >= _SLOW_TIME
        return rank if is_slow and statistics.median(waits) >= _SLOW_SECONDS else None


def of_node(statuses: Sequence[RankStatus], strategy: int, ranks: int, offset: float) -> NodeCalls:
    """Return the last collectives of the ranks of one board.

    Args:
        statuses: of the ranks.
        strategy, ranks: the number of their strategy, and how many ranks it has.
        offset: seconds to add to their times, for times of time.time().
    """
    arrivals = []
    for number in set.intersection(*(set(status.calls) for status in statuses)):
        times = [(status.calls[number] + offset, status.rank) for status in statuses]
        arrivals.append((number, *max(times), min(times)[0]))
    return NodeCalls(strategy, ranks, len(statuses), arrivals)


def compare(nodes: Sequence[NodeCalls]) -> list[Lateness]:
    """Return who came last, for each strategy of several ranks; the strategy of the most ranks first."""
    results = []
    for strategy in {node.strategy for node in nodes}:
        parts = [node for node in nodes if node.strategy == strategy]
        by_number = [{number: arrival for number, *arrival in part.arrivals} for part in parts]
        numbers = sorted(set.intersection(*map(set, by_number)))[-MOST_CALLS:]
        waits: dict[int, list[float]] = {}
        times: list[float] = []
        for number in numbers:
            last_at, last, _ = max(arrivals[number] for arrivals in by_number)
            first_at = min(arrivals[number][2] for arrivals in by_number)
            waits.setdefault(int(last), []).append(last_at - first_at)
            times += [first_at, last_at]
        ordered = dict(sorted(waits.items(), key=lambda pair: (-len(pair[1]), pair[0])))
        missing = parts[0].ranks - sum(part.here for part in parts)
        results.append(Lateness(parts[0].ranks, missing, numbers, max(times) - min(times) if times else 0.0, ordered))
    return sorted(results, key=lambda lateness: -lateness.ranks)


def lines(late: Lateness, hosts: Mapping[int, str]) -> list[str]:
    """Return the report of one strategy.

    Args:
        late: who came last.
        hosts: the node of each rank, where it is known.
    """
    calls, head = len(late.numbers), f"strategy of {count(late.ranks, 'rank')}: "
    if calls < _FEWEST_CALLS:
        return [f"{head}its collectives are too few, or too quick, to compare who came last."]
    head += f"{late.numbers[-1]} collectives so far; who came last in the last {calls}, within "
    report = [f"{head}{time_in_words(late.seconds)}:"]
    for rank, waits in [*late.waits.items()][:_MOST_ROWS]:
        usual, most = time_in_words(statistics.median(waits)), time_in_words(max(waits))
        report.append(
            f"  rank {rank:<4} last in {len(waits)} on {hosts.get(rank) or '?'}; the first waited {usual} for it "
            f"(median), at most {most}; {late.share(rank):.0%} of the time"
        )
    if late.missing:
        report.append(f"  Whom they all wait for cannot be said without the other {count(late.missing, 'rank')}.")
    elif late.slow() is not None:
        report.append(f"  Rank {late.slow()} keeps the others waiting.")
    else:
        report.append("  No rank keeps the others waiting for long.")
    return report
