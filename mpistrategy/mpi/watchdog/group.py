"""The ranks of one communicator, as the watchdog sees them, and what their watchdogs tell each other.

A rank works, or waits in a collective since some time, or waits for its own GPU; it may be busy until some time, as it
said, and it may have left: it takes no more calls.  Ranks of one node read each other's statuses in shared memory.
What a rank says to all nodes (that it is busy, that it has left, that a collective is late) is a name in the run
directory.  The first rank of each node looks there for its node: in a thread of its own, since a file system may hang.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.contract.failures import PATIENCE_SECONDS, Failure
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog.local_process import inside_of
from mpistrategy.mpi.watchdog.run_directory import BUSY, FILE_SECONDS, LEFT, ROLL_CALL, RunDirectory, begin, in_time
from mpistrategy.mpi.watchdog.status_board import StatusBoard

#: A rank may wait so many times the limit for its own GPU: its peers wait for it, unless all GPUs have stopped.
_OWN_GPU = 2
#: How long a rank may take to leave a wait by itself, after `PATIENCE_SECONDS`; it cannot leave a call of MPI.
_LEAVING_SECONDS = 1.5
#: How often a node looks into the run directory, at least.
_LOOK_SECONDS = 2.5
#: For how long another node may not know that this one is busy, or no longer.
_UNTOLD_SECONDS = 60.0


class Group:
    """The ranks of one communicator.

    Args:
        guard: of this rank.
        board: the statuses of the ranks of this node.
        ranks: the numbers in the job of all ranks, in the order of the communicator.
        node: the number of this node.
        nodes: how many there are.
        directory: for the other nodes, and for reports.
        identity: a number that only this communicator has, the same on all its ranks; 0 where there is none.

    Attributes:
        told: the error of a late collective, where errors are contained and there was one.
    """

    def __init__(
        self,
        guard: Guard,
        board: StatusBoard,
        ranks: Sequence[int],
        node: int,
        nodes: int,
        directory: RunDirectory,
        identity: int = 0,
    ) -> None:
        guard.record.show_in(*board.entries)
        board.introduce(identity, len(ranks))
        self.guard = guard
        self.board = board
        self.ranks = ranks
        self.directory = directory
        self.node = node
        self.nodes = nodes
        self.told: MpiStrategyError | None = None
        self._next_look = 0.0
        self._looking: threading.Thread | None = None
        #: The file that says until when this node is busy, and until when the other nodes need no (further) word.
        self._busy, self._told_until = "", time.monotonic()
        #: Until when another node was known to be busy.
        self._elsewhere = 0.0
        self._told_left = self._hears_alarm = False
        #: Since when a rank is known to take no more calls.
        self._left_since = math.inf
        #: Which one, and why; read when it is known, since the file goes with that rank.
        self._failure: Failure | None = None

    # ------------------------------------------------------------------------------------------- is a collective late?

    def waits(self, now: float, not_before: float) -> list[tuple[float, float]]:
        """Return how long this rank and its GPU have waited in a collective, from `not_before` on; and their limits."""
        current, flight, usual = self.guard.current, self.guard.gpu_progress, self.guard.timeout
        limit = usual if current is None or current.timeout is None else current.timeout
        on_gpu = [] if flight is None else [(flight.waited(now, not_before), flight.limit(usual))]
        return [(self.host_waited(now, not_before), limit), *on_gpu]

    def host_waited(self, now: float, not_before: float = -math.inf) -> float:
        """Return how long this rank itself has waited in a collective, from `not_before` on; 0 in none."""
        entry = inside_of(self.guard)
        return 0.0 if entry is None else max(0.0, now - max(entry.entered, self.guard.since, not_before))

    def limit_passed(self, now: float, not_before: float) -> float:
        """Return the least limit that is over, for this rank's own GPU a longer one; infinity where none is."""
        waits = self.waits(now, not_before)
        own_gpu = now - max(self.guard.own_gpu_since, not_before), _OWN_GPU * waits[0][1]
        return min((limit for waited, limit in (*waits, own_gpu) if waited > limit), default=math.inf)

    def is_alarmed(self) -> bool:
        """Return whether this rank knows of a rank that has found a collective late."""
        return self._hears_alarm or any(self.board.all("state"))

    def is_excused(self, now: float, limit: float) -> bool:
        """Return whether some rank said that it would be busy, and that time and the limit are not over.

        Another node may have said so just now: before it raises the alarm, a late rank looks once more.
        """
        busy = max(self.board.all("expected") + self.board.all("elsewhere"))
        if self.nodes > 1 and busy + limit <= now:
            busy = in_time(lambda: self._busy_elsewhere(self.directory.names(), now), 0.0)
        return busy + limit > now

    # ------------------------------------------------------------------------------------------- ranks that have left

    def tell_of_end(self) -> None:
        """Tell all nodes, once, that this rank takes no more calls, where it has not told the other ranks itself."""
        broken = self.guard.broken
        if broken is not None and self.guard.is_untold and not self._told_left:
            self._told_left = True
            text = json.dumps([broken.error, broken.rank, broken.where])
            in_time(lambda: LEFT in self.directory.names() or self.directory.write(LEFT, text), False)
            self.board.put("left", True)

    def seconds_in_vain(self, now: float) -> float:
        """Return since how many seconds this rank should have left a call, as some rank takes no more calls; 0 or less.

        A rank that finds that out where it waits does so by itself.
        """
        failures = self.guard.failures
        has_left = max(self.board.all("left")) if failures is None else failures.left_by() is not None
        # A rank that comes late to a call whose roll was called finds the digests of the ranks that have left it.
        has_left = has_left or self.told is not None
        self._left_since = min(self._left_since, now) if has_left else math.inf
        if has_left and self._failure is None:
            self._failure = self._which_has_left()
        patience = PATIENCE_SECONDS + (0.0 if failures is None else _LEAVING_SECONDS)
        return min(now - self._left_since, self.host_waited(now)) - patience

    def failure(self) -> Failure:
        """Return which rank takes no more calls, and why."""
        return self._failure or self._which_has_left()

    def _which_has_left(self) -> Failure:
        failures = self.guard.failures
        if failures is not None and (left := failures.left_by()) is not None:
            return failures.failure_of(left)
        with suppress(ValueError, TypeError):
            return Failure(*json.loads(in_time(lambda: self.directory.read(LEFT), "")))
        return Failure("another rank takes no more calls")

    # ------------------------------------------------------------------------------------------- the other nodes

    def look_at_nodes(self, now: float) -> None:
        """As the first rank of a node, when it is time: hear what other nodes say, and tell them what this one does."""
        hangs = self._looking is not None and self._looking.is_alive()
        is_due = now >= self._next_look or (not self._busy and max(self.board.all("expected")) > now)
        if self.nodes > 1 and not self.board.local_rank and is_due and not hangs:
            self._next_look = now + min(self.guard.timeout / 10, _LOOK_SECONDS)
            self._looking = begin(lambda: self.hear_and_tell(now))

    def hear_and_tell(self, now: float) -> None:
        """Do `look_at_nodes` at once."""
        names = self.directory.names()
        self._hears_alarm |= ROLL_CALL in names
        if LEFT in names:
            self.board.put("left", True)
        # One that says so no more was busy until now.
        self._elsewhere = self._busy_elsewhere(names, now) or min(self._elsewhere, now)
        self.board.put("elsewhere", self._elsewhere)
        told, self._busy = self._busy, self._busy_name(now)
        if self._busy and self._busy != told:
            self.directory.write(self._busy, "")
        if told and self._busy != told:
            self.directory.remove(told)

    def _busy_name(self, now: float) -> str:
        """Return the name that tells the other nodes until when this one is busy; "" if they need not know.

        In a save a rank is busy until now, again and again: that is told from time to time.
        """
        expected, step = max(self.board.all("expected")), min(self.guard.timeout / 4, _UNTOLD_SECONDS)
        if expected < now - step:
            self._told_until = now
            return ""
        if expected > self._told_until + step or (expected > now and not self._busy):
            self._told_until = expected
            return f"busy-{self.node}-{math.ceil(time.time() + expected - now)}"
        return self._busy

    def _busy_elsewhere(self, names: Sequence[str], now: float) -> float:
        """Return until when another node is busy, as it says; 0 where none is."""
        found = [match for match in map(BUSY.fullmatch, names) if match is not None and int(match[1]) != self.node]
        return max((now + int(match[2]) - time.time() for match in found), default=0.0)

    def end(self) -> None:
        """Remove what this rank has written for the time being."""
        if self._looking is not None and self._looking.is_alive():
            self._looking.join(FILE_SECONDS)
        if self.directory.is_used:
            names = [self._busy] * bool(self._busy) + [LEFT] * self._told_left
            in_time(lambda: self.directory.leave(*names), None)
