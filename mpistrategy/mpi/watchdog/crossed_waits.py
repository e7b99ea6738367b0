"""Finds ranks of a node that wait for each other in different strategies: none of them would ever go on.

Every rank's status says in which strategy it waits.  Where this rank waits for a peer in one strategy, and that peer
for this rank in another, the two ranks make their calls in different orders.  The comparison of calls within a strategy
cannot see it.

A rank with several threads may wait in several strategies at a time, in any order; its waits are not judged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence

from mpistrategy.errors import CollectiveMismatchError
from mpistrategy.mpi.watchdog.group import Group
from mpistrategy.mpi.watchdog.status_board import RankStatus, call_in

#: How long both must have waited, in seconds: two looks of the watchdog, and a peer that leaves a call.
_LEAST_SECONDS = 1.5
_OUR_THREADS = "mpistrategy"
#: Statuses that are older than this, in seconds, say nothing about what a rank does now.
OLDEST_SECONDS = 2.5


def only_wait(groups: Sequence[Group], now: float) -> Group | None:
    """Return where this process waits for others, if its program has no thread that could do anything else."""
    waiting = (each for each in groups if each.identity and not each.guard.is_in_background)
    mine = next((each for each in waiting if each.host_waited(now) > _LEAST_SECONDS), None)
    if mine is None:
        return None
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(_OUR_THREADS)}
    return mine if len(sys._current_frames().keys() - ours) == 1 else None


def find(groups: Sequence[Group], rank: int, now: float) -> tuple[Group, CollectiveMismatchError] | None:
    """Return where this rank waits for a peer that waits for it elsewhere, and what to raise there; None if nowhere.

    Args:
        groups: the groups that this process watches.
        rank: its number in the job.
        now: time.monotonic().
    """
    mine = only_wait(groups, now)
    if mine is None:
        return None
    known = {each.identity: each for each in groups}
    for peer in _statuses(groups):
        if peer.rank == rank or peer.rank not in mine.ranks or not peer.strategy or peer.strategy == mine.identity:
            continue
        waits = peer.waited > _LEAST_SECONDS and now - peer.beat < OLDEST_SECONDS
        there = known.get(peer.strategy)
        for_me = peer.has_all_ranks if there is None else not there.was_met_by(rank, peer.rank)
        if waits and for_me and not mine.was_met_by(peer.rank, rank):
            return mine, _error(groups, mine, peer)
    return None


def _statuses(groups: Sequence[Group]) -> Iterator[RankStatus]:
    for group in groups:
        yield from group.board.read()


def _error(groups: Sequence[Group], mine: Group, peer: RankStatus) -> CollectiveMismatchError:
    told = {status.rank: status.text for status in _statuses(groups) if status.rank in mine.ranks and status.process}
    told[peer.rank] = peer.text
    lines = [
        "ranks wait for each other in different strategies, or in the making of one",
        *(f"  rank {rank}: {told[rank]}" for rank in sorted(told)),
        "Nothing was sent. Make every rank make and use its strategies in the same order.",
    ]
    error = CollectiveMismatchError("\n".join(lines))
    error.calls = {rank: call_in(told[rank]) for rank in sorted(told)}
    error.differ = ("strategy",)
    return error
