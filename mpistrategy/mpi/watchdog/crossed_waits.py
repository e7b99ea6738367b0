"""Finds ranks of a node that wait for each other in different strategies: none of them would ever go on.

Every rank's line says in which strategy it waits.  Where this rank waits for a peer in one strategy, and that peer for
this rank in another, the calls are in another order on the two ranks.  The comparison within a strategy cannot see it.

A rank with several threads may wait in several strategies at a time, in any order.  Nothing is said of its waits.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence

from mpistrategy.errors import CollectiveMismatchError
from mpistrategy.mpi.watchdog.group import Watched
from mpistrategy.mpi.watchdog.status_board import Line

#: How long both must have waited, in seconds: two looks of the watchdog, and a peer's way out of a call.
_LEAST_SECONDS = 1.5
_OUR_THREADS = "mpistrategy"
#: Lines that are older than this say nothing about what a rank does now.
_OLDEST_SECONDS = 2.5


def only_wait(everything: Sequence[Watched], now: float) -> Watched | None:
    """Return where this process waits for others, if its program has no thread that could do anything else."""
    waiting = (each for each in everything if each.identity and not each.guard.is_in_background)
    mine = next((each for each in waiting if each.host_waited(now) > _LEAST_SECONDS), None)
    if mine is None:
        return None
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(_OUR_THREADS)}
    return mine if len(sys._current_frames().keys() - ours) == 1 else None


def find(everything: Sequence[Watched], rank: int, now: float) -> tuple[Watched, CollectiveMismatchError] | None:
    """Return where this rank waits for a peer that waits for it elsewhere, and what to raise there; None if nowhere.

    Args:
        everything: what this process watches.
        rank: its number in the job.
        now: time.monotonic().
    """
    mine = only_wait(everything, now)
    if mine is None:
        return None
    known = {each.identity: each for each in everything}
    for peer in _lines(everything):
        if peer.rank == rank or peer.rank not in mine.ranks or not peer.strategy or peer.strategy == mine.identity:
            continue
        waits = peer.waited > _LEAST_SECONDS and now - peer.beat < _OLDEST_SECONDS
        there = known.get(peer.strategy)
        for_me = peer.is_leaf if there is None else not there.was_met_by(rank, peer.rank)
        if waits and for_me and not mine.was_met_by(peer.rank, rank):
            return mine, CollectiveMismatchError(_in_words(everything, mine, peer))
    return None


def _lines(everything: Sequence[Watched]) -> Iterator[Line]:
    for watched in everything:
        yield from watched.lines.read()


def _in_words(everything: Sequence[Watched], mine: Watched, peer: Line) -> str:
    told = {line.rank: line.text for line in _lines(everything) if line.rank in mine.ranks and line.process}
    told[peer.rank] = peer.text
    rows = [f"  rank {rank}: {told[rank]}" for rank in sorted(told)]
    return "\n".join(
        [
            "ranks wait for each other in different strategies, or in the making of one",
            *rows,
            "Nothing was sent. Make every rank make and use its strategies in the same order.",
        ]
    )
