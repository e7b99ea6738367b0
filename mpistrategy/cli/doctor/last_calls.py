"""Which rank came last to the last collectives of a job, how often, and how long the first one waited for it.

Every rank notes when it entered its last collectives, for its watchdog.  Of each node only a few numbers a call travel:
when its first and its last rank came, and which one that was.  Nodes have clocks of their own: a difference between
them makes the waits wrong by as much.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpistrategy.cli.doctor.findings import count
from mpistrategy.mpi.watchdog.status_board import RankStatus
from mpistrategy.objects.shown import time_in_words

#: So many calls are compared at most; nobody is called slow from fewer than these.
MOST_CALLS, _FEWEST_CALLS = 64, 5
#: A rank is called slow that came last in so many of the calls, where the first one waited for so much of the time,
#: and usually for so long; shorter waits come and go with the system's own work.
_SLOW_CALLS, _SLOW_TIME, _SLOW_SECONDS = 2 / 3, 0.05, 1e-4
_MOST_ROWS = 8


@dataclass(frozen=True)
class NodeCalls:
    """The last collectives of one strategy on one node.

    Attributes:
        strategy: a number for it, the same on all nodes.
        ranks: how many ranks it has.
        here: how many of them are on this node.
        arrivals: by the number of the collective, for those that all ranks of this node have noted: when the last rank
            came, which one that was, and when the first one came; in seconds of time.time().
    """

    strategy: int
    ranks: int
    here: int
    arrivals: Mapping[int, tuple[float, int, float]]


@dataclass(frozen=True)
class Lateness:
    """Who came last to the last collectives of a strategy.

    Attributes:
        ranks: how many ranks the strategy has.
        missing: how many of them nothing is known of.
        numbers: of the collectives that were compared.
        seconds: from the first of them to the last one.
        waits: for each rank that came last, the most frequent one first: how long the first one waited then.
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
        offset: what turns their times into those of time.time(), in seconds.
    """
    arrivals = {}
    for number in set.intersection(*(set(each.calls) for each in statuses)):
        times = [(each.calls[number] + offset, each.rank) for each in statuses]
        arrivals[number] = (*max(times), min(times)[0])
    return NodeCalls(strategy, ranks, len(statuses), arrivals)


def compare(nodes: Sequence[NodeCalls]) -> list[Lateness]:
    """Return who came last, for each strategy of several ranks; that of the most ranks first."""
    found = []
    for strategy in {each.strategy for each in nodes}:
        parts = [each for each in nodes if each.strategy == strategy]
        numbers = sorted(set.intersection(*(set(each.arrivals) for each in parts)))[-MOST_CALLS:]
        waits: dict[int, list[float]] = {}
        times = []
        for number in numbers:
            last_at, last, _ = max(each.arrivals[number] for each in parts)
            first_at = min(each.arrivals[number][2] for each in parts)
            waits.setdefault(last, []).append(last_at - first_at)
            times += [first_at, last_at]
        ordered = dict(sorted(waits.items(), key=lambda pair: (-len(pair[1]), pair[0])))
        missing = parts[0].ranks - sum(each.here for each in parts)
        found.append(Lateness(parts[0].ranks, missing, numbers, max(times) - min(times) if times else 0.0, ordered))
    return sorted(found, key=lambda each: -each.ranks)


def lines(late: Lateness, hosts: Mapping[int, str]) -> list[str]:
    """Return the report of one strategy.

    Args:
        late: who came last.
        hosts: the node of each rank, where it is known.
    """
    calls, head = len(late.numbers), f"strategy of {count(late.ranks, 'rank')}: "
    if calls < _FEWEST_CALLS:
        return [f"{head}its collectives are too few, or too quick, to compare who came last."]
    head += f"{late.numbers[-1]} collectives so far; who came last in the last {calls}"
    told = [f"{head}, within {time_in_words(late.seconds)}:"]
    for rank, waits in [*late.waits.items()][:_MOST_ROWS]:
        usual, most = time_in_words(statistics.median(waits)), time_in_words(max(waits))
        told.append(
            f"  rank {rank:<4} last in {len(waits)} on {hosts.get(rank) or '?'}; the first waited {usual} for it "
            f"(median), at most {most}; {late.share(rank):.0%} of the time"
        )
    if late.missing:
        told.append(f"  Whom they all wait for cannot be said without the other {count(late.missing, 'rank')}.")
    elif late.slow() is not None:
        told.append(f"  Rank {late.slow()} keeps the others waiting.")
    else:
        told.append("  No rank keeps the others waiting for long.")
    return told
