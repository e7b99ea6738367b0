"""The ranks of one communicator, as the watchdog sees them, and what their watchdogs tell each other.

Ranks of one node read each other's statuses in shared memory.  What a rank says to all nodes (that it is busy, that it
takes no more calls, that a collective is late) is a name in the run directory.  The first rank of each node looks there
for its node: in a thread of its own, since a file system may hang.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Sequence

from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.contract.failures import PATIENCE_SECONDS, Failure
from mpistrategy.mpi.contract.flight_recorder import CurrentCall, in_words
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog.local_process import inside_of
from mpistrategy.mpi.watchdog.roll_call import statuses_in
from mpistrategy.mpi.watchdog.run_directory import (
    BUSY,
    ERROR,
    FILE_SECONDS,
    LEFT,
    MOST_BYTES,
    ROLL_CALL,
    RunDirectory,
    begin,
    in_time,
    within,
)
from mpistrategy.mpi.watchdog.status_board import ALARMED, RankStatus, StatusBoard

#: A rank may wait so many times the limit for its own GPU: its peers wait for it, unless all GPUs have stopped.
_OWN_GPU = 2
#: How long a rank may take to leave a wait by itself, after `PATIENCE_SECONDS`; it cannot leave a call of MPI.
_LEAVING_SECONDS = 1.5
_LONGEST_SECONDS_BETWEEN_LOOKS = 2.5
#: For how long another node may not know that this one is busy for longer than it said.
_LONGEST_UNTOLD_SECONDS = 60.0
#: How long a late rank waits until its node has looked.
_LONGEST_LOOK_SECONDS = 4.0


class Group:
    """The ranks of one communicator.

    Args:
        guard: of this rank.
        board: the statuses of the ranks of this node.
        node: the number of this node.
        nodes: how many there are.
        directory: for the other nodes, and for reports.
        identity: a number that only this communicator has, the same on all its ranks; 0 where there is none.

    Attributes:
        ranks: the numbers in the job of all ranks, in the order of the communicator.
        others: what other nodes have said of their ranks after an alarm.
        told: the error of a late collective, where errors are contained and there was one.
        has_ended: whether nothing is written any more.
    """

    def __init__(
        self,
        guard: Guard,
        board: StatusBoard,
        node: int,
        nodes: int,
        directory: RunDirectory,
        identity: int = 0,
    ) -> None:
        self.identity = identity
        guard.record.show_in(*board.entries)
        self.guard = guard
        self.board = board
        self.ranks: Sequence[int] = ()
        self.node = node
        self.nodes = nodes
        self.directory = directory
        self.others: list[RankStatus] = []
        self.told: MpiStrategyError | None = None
        self.has_ended = False
        self._next_look = 0.0
        self._looking: threading.Thread | None = None
        self._is_alarmed = False
        #: The file that says until when this node is busy, and until when the other nodes need no (further) word.
        self._busy, self._told_until = "", time.monotonic()
        #: Until when another node was known to be busy.
        self._busy_elsewhere = 0.0
        self._told_left = False
        self._read: set[str] = set()
        #: The call in which this rank is late, and since when.
        self._late_in: CurrentCall | None = None
        self._late_since = 0.0
        #: Since when a rank is known to take no more calls.
        self._left_since = math.inf

    @property
    def limit(self) -> float:
        """How long the present collective may take, in seconds."""
        current, flight = self.guard.current, self.guard.gpu_progress
        if current is not None and current.timeout is not None:
            return float(current.timeout)
        if current is None and flight is not None:
            return float(flight.limit(self.guard.timeout))
        return self.guard.timeout

    # ------------------------------------------------------------------------------------------- is a collective late?

    def is_late(self, now: float, not_before: float) -> bool:
        """Return whether this rank or its GPU has waited longer than the limit (for its own GPU, far longer)."""
        flight = self.guard.gpu_progress
        if flight is not None and flight.waited(now, not_before) > flight.limit(self.guard.timeout):
            return True
        if now - max(self.guard.own_gpu_since, not_before) > _OWN_GPU * self.limit:
            return True
        return self.host_waited(now, not_before) > self.limit

    def waited(self, now: float, not_before: float) -> float:
        """Return how long this rank has waited in a collective, counted from `not_before` on; 0 in none."""
        flight = self.guard.gpu_progress
        on_gpu = 0.0 if flight is None else flight.waited(now, not_before)
        return max(on_gpu, self.host_waited(now, not_before))

    def host_waited(self, now: float, not_before: float = -math.inf) -> float:
        """Do `waited` for this rank without its GPU."""
        entry = inside_of(self.guard)
        if entry is None or self.guard.since == math.inf:
            return 0.0
        return max(0.0, now - max(float(entry.entered), self.guard.since, not_before))

    def is_excused(self, now: float, limit: float) -> bool:
        """Return whether some rank said that it would be busy, and that time and the limit are not over.

        What other nodes say counts as it is after this rank or its GPU has become late: it waits until its node has
        looked.
        """
        flight = self.guard.gpu_progress
        here = inside_of(self.guard) or (None if flight is None else flight.entry)
        if here is not self._late_in:
            self._late_in, self._late_since, self._next_look = here, now, now
        if max(self.board.most("expected"), self.board.most("elsewhere")) + limit > now:
            return True
        waits = self.board.most("looked") < self._late_since and now < self._late_since + _LONGEST_LOOK_SECONDS
        return waits and self.nodes > 1

    def last_calls(self) -> dict[int, str]:
        """Return where the ranks of this node are, for those that cannot say it; {} while this rank is in no call."""
        here = inside_of(self.guard)
        if here is None:
            return {}
        words, told = self._words(), {}
        for status, calls in zip(self.board.read(), self.board.calls(), strict=True):
            if not status.process:
                continue  # its rank has not introduced itself
            last = max(calls.entered, default=0)
            before = f"its last was {words.get(last, f'#{last}')}" if last else "it has made no collective yet"
            told[status.rank] = f"; it has come to #{last}" if last >= here.number else f"; {before}"
        return told

    def _words(self) -> dict[int, str]:
        """Return the last collectives in words, by their numbers; other ranks have made the same."""
        return {entry.number: in_words(entry) for entry in list(self.guard.record.entries)}

    # ------------------------------------------------------------------------------------------- ranks that have failed

    def tell_of_end(self) -> None:
        """Tell all nodes, once, that this rank takes no more calls, where it has not told the other ranks itself."""
        broken = self.guard.broken
        if broken is not None and self.guard.is_untold and not self._told_left:
            self._told_left = True
            text = json.dumps([broken.error, broken.rank, broken.where])
            within(FILE_SECONDS, lambda: LEFT in self.directory.names() or self.directory.write(LEFT, text))
            self.board.put("left", True)

    def seconds_in_vain(self, now: float) -> float:
        """Return since how many seconds this rank should have left a call, as some rank takes no more calls; 0 or less.

        A rank that finds that out where it waits does so by itself.
        """
        failures, patience = self.guard.failures, PATIENCE_SECONDS
        if failures is None:
            has_left = bool(self.board.most("left"))
        else:
            has_left, patience = failures.left_by() is not None, patience + _LEAVING_SECONDS
        self._left_since = min(self._left_since, now) if has_left else math.inf
        return min(now - self._left_since, self.host_waited(now)) - patience

    def failure(self) -> Failure:
        """Return which rank takes no more calls, and why."""
        failures = self.guard.failures
        if failures is not None and (left := failures.left_by()) is not None:
            return failures.failure_of(left)
        with contextlib.suppress(ValueError, TypeError):
            return Failure(*json.loads(in_time(lambda: self.directory.read(LEFT), "")))
        return Failure("another rank takes no more calls")

    # ------------------------------------------------------------------------------------------- the other nodes

    def look_at_nodes(self, now: float) -> None:
        """As the first rank of a node, when it is time: hear what other nodes say, and tell them what this one does."""
        hangs = self._looking is not None and self._looking.is_alive()
        if self.nodes == 1 or self.board.local_rank or hangs or self.has_ended:
            return
        if now >= self._next_look or self._must_tell(now):
            self._next_look = now + min(self.limit / 10, _LONGEST_SECONDS_BETWEEN_LOOKS)
            self._looking = begin(lambda: self.hear_and_tell(now))

    def hear_and_tell(self, now: float) -> None:
        """Do `look_at_nodes` at once."""
        names = self.directory.names()
        self._is_alarmed |= ROLL_CALL in names
        if LEFT in names:
            self.board.put("left", True)
        busy = filter(None, map(BUSY.fullmatch, names))
        until = max((int(name[2]) for name in busy if int(name[1]) != self.node), default=0)
        # One that says so no more was busy until now.
        self._busy_elsewhere = now + until - time.time() if until else min(self._busy_elsewhere, now)
        self.board.put("elsewhere", self._busy_elsewhere)
        self.board.put("looked", now)
        self._tell_busy(now)

    @property
    def _untold_seconds(self) -> float:
        return min(self.guard.timeout / 10, _LONGEST_UNTOLD_SECONDS)

    def _must_tell(self, now: float) -> bool:
        """Return whether this node is going to be busy and the others do not know, or for far longer than they know."""
        expected = self.board.most("expected")
        return (not self._busy and expected > now) or expected > self._told_until + self._untold_seconds

    def _tell_busy(self, now: float) -> None:
        """Write until when this node is busy, if the others must know; remove what is over."""
        if self.has_ended:
            return
        old, expected = self._busy, self.board.most("expected")
        if self._must_tell(now):
            self._busy = f"busy-{self.node}-{math.ceil(time.time() + expected - now)}"
            self._told_until = expected
            self.directory.write(self._busy, "")
        elif expected < now - self._untold_seconds:
            self._busy, self._told_until = "", now
        if old not in ("", self._busy):
            self.directory.remove(old)

    def end(self) -> None:
        """Remove what this rank has written for the time being."""
        if self._looking is not None:
            self._looking.join(FILE_SECONDS)
        names = [name for name, is_mine in ((self._busy, self._busy), (LEFT, self._told_left)) if is_mine]
        if names:
            within(FILE_SECONDS, lambda: self.directory.remove(*names))

    def is_alarmed(self) -> bool:
        """Return whether this rank knows of a rank that has found a collective late."""
        return self._is_alarmed or self.board.most("state") >= ALARMED

    def alarm(self) -> None:
        """Tell the other nodes that a collective is late.  The first one that does so calls the roll."""
        if self.nodes == 1 or in_time(lambda: self.directory.claim(ROLL_CALL), otherwise=True):
            self.board.put("caller", True)

    def records(self) -> dict[int, list[str]]:
        """Return the lines of the records of this node's ranks, which fit into one file together.

        Of a rank that has written none there are its last collectives, in the words of this rank.
        """
        longest = MOST_BYTES // 2 // self.board.count  # as JSON, text takes more
        told = {rank: text.splitlines() for rank, text in self.board.records(longest).items()}
        now, words = time.monotonic(), self._words()
        for status, calls in zip(self.board.read(), self.board.calls(), strict=True):
            if status.process and status.rank not in told:
                lines = [f"{at - now:12.6f} s  {words.get(each, f'#{each}')}" for each, at in calls.entered.items()]
                told[status.rank] = ["when it entered its last collectives, as the other ranks call them:", *lines]
        return told

    def hear_others(self) -> bool:
        """Read what other nodes have written since the alarm; return whether all ranks are known."""
        for name in {*filter(ERROR.fullmatch, self.directory.names())} - self._read:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                told = json.loads(self.directory.read(name))
                self.others += statuses_in(told["ranks"])
                self._read.add(name)
        return self.board.count + len(self.others) >= len(self.ranks)

    def is_published(self) -> bool:
        """Return whether another node has written the roll call."""
        return bool(self.directory.read(ROLL_CALL))
