"""The ranks of one communicator, as the watchdog sees them, and what their watchdogs tell each other.

A rank works, waits in a collective or waits for its own GPU.  It may have announced until when it is busy.  It may have
left: it takes no more calls.  Ranks of one node read each other's statuses in shared memory.
What a rank says to all nodes (that it is busy, that it has left, that a collective is late) is a name in the run
directory.  The first rank of each node looks there for its node; a rank that is late looks once more.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple

from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.contract.failures import Failure
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog.local_process import inside_of
from mpistrategy.mpi.watchdog.run_directory import LEFT, ROLL_CALL, RunDirectory
from mpistrategy.mpi.watchdog.status_board import StatusBoard

#: A rank may wait so many times the limit for its own GPU: its peers wait for it, unless all GPUs have stopped.
_OWN_GPU = 2
#: How often a node looks into the run directory, at least.
_LOOK_SECONDS = 2.5
#: For how long another node may not know that this node is busy.
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
        identity: a number that only this communicator has, the same on all its ranks; 0 without one.

    Attributes:
        due: the error that ends each wait of this rank from now on; None while all ranks take calls.
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
        self.due: MpiStrategyError | None = None
        self._due_since = 0.0
        self._next_look = 0.0
        self._hears_alarm = self._tells = False
        #: Until when this node is busy as the other nodes know; until when another node is, as this one knows.
        self._announced_end, self._remote_end = time.monotonic(), 0.0

    # ------------------------------------------------------------------------------------------- is a collective late?

    def wait(self, now: float, not_before: float) -> tuple[float, float]:
        """Return how long this rank, or its GPU, has waited in a collective from `not_before` on, and the limit."""
        current, flight, usual = self.guard.current, self.guard.gpu_progress, self.guard.timeout
        limit = usual if current is None or current.timeout is None else current.timeout
        waits = [(self.host_waited(now, not_before), limit)]
        if flight is not None:
            waits.append(flight.wait(now, not_before, usual))
        return max(waits, key=lambda wait: wait[0] / wait[1])

    def host_waited(self, now: float, not_before: float = -math.inf) -> float:
        """Return how long this rank itself has waited in a collective, from `not_before` on; 0 in none."""
        entry = inside_of(self.guard)
        return 0.0 if entry is None else max(0.0, now - max(entry.entered, self.guard.since, not_before))

    def limit_passed(self, now: float, not_before: float) -> float:
        """Return the limit that is over, a longer limit for this rank's own GPU; infinity where no limit is over."""
        waited, limit = self.wait(now, not_before)
        own_gpu = now - max(self.guard.own_gpu_since, not_before)
        return limit if waited > limit or own_gpu > _OWN_GPU * limit else math.inf

    def is_alarmed(self) -> bool:
        """Return whether this rank knows of a rank that has found a collective late."""
        return self._hears_alarm or any(self.board.all("state"))

    def is_excused(self, now: float, limit: float) -> bool:
        """Return whether some rank has announced work, and neither its time nor the limit after it is over."""
        here = max(self.board.all("expected"))
        if self.nodes > 1 and max(here, self._remote_end) + limit <= now:
            self._remote_end = now + self.directory.busy_until(self.node) - time.time()
        return max(here, self._remote_end) + limit > now

    # ------------------------------------------------------------------------------------------- ranks that have left

    def look_for_failures(self, now: float) -> None:
        """Find out whether some rank takes no more calls; tell other nodes that this rank does, unless they know."""
        broken = self.guard.broken
        if broken is not None and self.guard.is_untold and not self._tells:
            self._tells = True
            self.directory.write_passing(LEFT, json.dumps(astuple(broken)))
            self.board.put("left", True)
        if self.due is None and (failure := self._failure()) is not None:
            self.end_waits(failure.as_error(), now)

    def _failure(self) -> Failure | None:
        failures = self.guard.failures
        if failures is not None:
            rank = failures.left_by()
            return None if rank is None else failures.failure_of(rank)
        if not any(self.board.all("left")):
            return None
        with suppress(ValueError, TypeError):
            return Failure(*json.loads(self.directory.read(LEFT)))
        return Failure("another rank takes no more calls")

    def end_waits(self, error: MpiStrategyError, now: float) -> None:
        """Let `error` be due to this rank wherever it waits from now on."""
        self.due, self._due_since = error, now

    def seconds_in_vain(self, now: float) -> float:
        """Return how long this rank has waited although an error is due to it."""
        return 0.0 if self.due is None else min(now - self._due_since, self.host_waited(now))

    # ------------------------------------------------------------------------------------------- the other nodes

    def look_at_nodes(self, now: float) -> None:
        """As the first rank of a node, when it is time: read other nodes' messages, and write if this node is busy.

        In a save a rank says again and again that it is busy until now: other nodes hear of it from time to time.
        """
        expected, step = max(self.board.all("expected")), min(self.guard.timeout / 4, _UNTOLD_SECONDS)
        is_news = expected > max(now, self._announced_end)
        if self.nodes == 1 or self.board.local_rank or (now < self._next_look and not is_news):
            return
        self._next_look = now + min(self.guard.timeout / 10, _LOOK_SECONDS)
        names = self.directory.names()
        self._hears_alarm |= ROLL_CALL in names
        if LEFT in names:
            self.board.put("left", True)
        if is_news or expected > self._announced_end + step:
            self._announced_end = expected
            self.directory.say_busy(self.node, time.time() + expected - now)
        elif expected < now - 2 * step:
            self._announced_end = now  # the next save may be short
