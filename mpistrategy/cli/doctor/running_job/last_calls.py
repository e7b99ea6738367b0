"""Which rank came last to the last collectives of a job, how often, and how long the others waited for it.

Every rank notes when it entered its last collectives, for its watchdog.  Of each node only a few numbers a call travel:
when its first and its last rank came, and which one that was.

Nodes have clocks of their own.  No rank can enter a call before all ranks have entered the one before, so the notes
themselves bound how far two clocks are apart; a difference that is not possible is corrected.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpistrategy.cli.doctor.checks.finding import count
from mpistrategy.mpi.watchdog.status_board import RankStatus

#: So many calls are compared at most.
MOST_CALLS = 64
#: A rank is called slow that came last in so many of the calls, where the others waited for
#: so much of the time, and usually for so long; shorter waits come and go with the system's own work.
_SLOW_CALLS, _SLOW_TIME, _SLOW_SECONDS = 2 / 3, 0.05, 1e-4
#: Nobody is called slow from fewer calls.
_FEWEST_CALLS = 5
_MOST_ROWS = 8


class Arrival(NamedTuple):
    """How the ranks of a node came to one collective; times are nanoseconds of time.time().

    Attributes:
        last: the rank that came last.
        last_at: when it came.
        first_at: when the first one came.
        summed: the times of all, as they are before `last_at`, added up.
    """

    last: int
    last_at: int
    first_at: int
    summed: int


@dataclass(frozen=True)
class NodeCalls:
    """The last collectives of one strategy on one node.

    Attributes:
        strategy: a number for it, the same on all nodes.
        ranks: how many ranks it has.
        here: how many of them are on this node.
        newest: the number of the last collective that some rank has entered.
        arrivals: for those that all ranks of this node have noted, by their numbers.
    """

    strategy: int
    ranks: int
    here: int
    newest: int
    arrivals: Mapping[int, Arrival] = field(default_factory=dict)

    @classmethod
    def read(cls, told: Any) -> NodeCalls:
        """Return what JSON has made of one; ValueError, TypeError or KeyError for anything else."""
        return cls(**{**told, "arrivals": {int(number): Arrival(*each) for number, each in told["arrivals"].items()}})


@dataclass(frozen=True)
class Lateness:
    """Who came last to the last collectives of a strategy.

    Attributes:
        ranks: how many ranks the strategy has.
        missing: how many of them nothing is known of.
        calls: how many collectives were compared; 0 where the ranks have none in common.
        newest: the number of the last one that some rank has entered.
        seconds: from the first of those compared to the last one.
        waits: for each rank that came last: how long the others waited then, on average; in seconds, oldest first.
    """

    ranks: int
    missing: int = 0
    calls: int = 0
    newest: int = 0
    seconds: float = 0.0
    waits: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def by_times(self) -> list[int]:
        """Return the ranks that came last, the most frequent one first."""
        return sorted(self.waits, key=lambda rank: (-len(self.waits[rank]), rank))

    def share(self, rank: int) -> float:
        """Return for what part of the time the others waited for a rank, on average."""
        return sum(self.waits[rank]) / self.seconds if self.seconds > 0 else 0.0

    def slow(self) -> int | None:
        """Return the rank that keeps the others waiting; None where there is none, or some ranks are not known."""
        first = next(iter(self.by_times()), None)
        if first is None or self.missing > 0 or self.calls < _FEWEST_CALLS:
            return None
        waits = self.waits[first]
        is_slow = len(waits) >= _SLOW_CALLS * self.calls and self.share(first) >= _SLOW_TIME
        return first if is_slow and statistics.median(waits) >= _SLOW_SECONDS else None


def of_node(statuses: Sequence[RankStatus], strategy: int, ranks: int, offset: float) -> list[NodeCalls]:
    """Return the last collectives of the ranks of one board; none where they have noted nothing.

    Args:
        statuses: of the ranks.
        strategy, ranks: the number of their strategy, and how many ranks it has.
        offset: what turns their times into those of time.time(), in seconds.
    """
    if not all(each.calls for each in statuses):
        return []
    arrivals = {}
    for number in sorted(set.intersection(*(set(each.calls) for each in statuses))):
        times = [(round((each.calls[number] + offset) * 1e9), each.rank) for each in statuses]
        last_at, last = max(times)
        arrivals[number] = Arrival(last, last_at, min(times)[0], sum(last_at - at for at, _ in times))
    return [NodeCalls(strategy, ranks, len(statuses), max(max(each.calls) for each in statuses), arrivals)]


def compare(nodes: Sequence[NodeCalls]) -> list[Lateness]:
    """Return who came last, for each strategy of several ranks; that of the most ranks first."""
    strategies = {each.strategy for each in nodes}
    found = [_of_strategy([each for each in nodes if each.strategy == strategy]) for strategy in strategies]
    return sorted(found, key=lambda each: (-each.ranks, -each.newest))


def _of_strategy(nodes: list[NodeCalls]) -> Lateness:
    ranks, here, newest = nodes[0].ranks, sum(each.here for each in nodes), max(each.newest for each in nodes)
    common = sorted(set.intersection(*(set(each.arrivals) for each in nodes)))[-MOST_CALLS:]
    if here < 2 or not common:
        return Lateness(ranks, ranks - here, 0, newest)
    offsets = [offset_of(nodes[0], each) for each in nodes]
    waits: dict[int, list[float]] = {}
    ends = []
    for number in common:
        parts = [(each.arrivals[number], each.here, offset) for each, offset in zip(nodes, offsets, strict=True)]
        last_at, last = max((part.last_at + offset, part.last) for part, _, offset in parts)
        summed = sum(part.summed + size * (last_at - part.last_at - offset) for part, size, offset in parts)
        waits.setdefault(last, []).append(summed / (here - 1) / 1e9)
        ends.append(last_at)
    # From the first call to the last one: the wait for the first was before that.
    first = min(each.arrivals[common[0]].first_at + offset for each, offset in zip(nodes, offsets, strict=True))
    return Lateness(ranks, ranks - here, len(common), newest, (ends[-1] - first) / 1e9, waits)


def offset_of(one: NodeCalls, other: NodeCalls) -> int:
    """Return what must be added to the times of `other` so that the notes of both nodes are possible together.

    A rank enters a call only after all ranks of both nodes have entered the one before.
    """
    here, there = one.arrivals, other.arrivals
    pairs = [number for number in here if number in there and number + 1 in here and number + 1 in there]
    least = max((here[number].last_at - there[number + 1].first_at for number in pairs), default=0)
    most = min((here[number + 1].first_at - there[number].last_at for number in pairs), default=0)
    return sorted((least, 0, most))[1] if least <= most else 0


def lines(late: Lateness, hosts: Mapping[int, str]) -> list[str]:
    """Return the report of one strategy.

    Args:
        late: who came last.
        hosts: the node of each rank, where it is known.
    """
    head = f"strategy of {count(late.ranks, 'rank')}: {count(late.newest, 'collective')} so far; "
    if late.calls < _FEWEST_CALLS:
        return [f"{head}too few, or too quick, to compare who came last."]
    told = [f"{head}who came last in the last {late.calls}, within {_time(late.seconds)}:"]
    for rank in late.by_times()[:_MOST_ROWS]:
        waits, host = late.waits[rank], f" on {hosts[rank]}" if hosts.get(rank) else ""
        told.append(
            f"  rank {rank:<4} last in {len(waits)}{host}; the others waited {_time(statistics.median(waits))} for it "
            f"(median), at most {_time(max(waits))}; {late.share(rank):.0%} of the time"
        )
    if late.missing > 0:
        told.append(f"  Whom they all wait for cannot be said without the other {count(late.missing, 'rank')}.")
    elif late.slow() is not None:
        told.append(f"  Rank {late.slow()} keeps the others waiting.")
    else:
        told.append("  No rank keeps the others waiting for long.")
    return told


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
