"""The ranks of one communicator, as the watchdog sees them, and what their watchdogs tell each other.

A rank works, waits in a collective or waits for its own GPU.  It may have announced until when it is busy.  Ranks of
one node read each other's statuses in shared memory.  What is said to all nodes (that a node is busy, that a rank takes
no more calls, that a collective is late) is a name in the run directory.  The first rank of each node looks there, and
all ranks where errors are contained; a rank that is late looks once more.
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
#: After how long a wait for a rank that takes no more calls ends with the job, where a rank stays in it.
_ENDS_SECONDS = 5.0


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
        board.introduce(identity, len(ranks), guard.record)
        self.guard = guard
        self.board = board
        self.ranks = ranks
        self.directory = directory
        self.node = node
        self.nodes = nodes
        self.due: MpiStrategyError | None = None
        self._due_since = 0.0
        self._next_look = 0.0
        self._hears_alarm = self._hears_failure = False
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
        """Return whether this rank knows of a rank that has found a collective late, or of a failure on its own GPU."""
        flight = self.guard.gpu_progress
        return self._hears_alarm or any(self.board.all("state")) or (flight is not None and bool(flight.failure))

    def is_excused(self, now: float, limit: float) -> bool:
        """Return whether some rank has announced work, and neither its time nor the limit after it is over."""
        here = max(self.board.all("expected"))
        if self.nodes > 1 and max(here, self._remote_end) + limit <= now:
            self._remote_end = now + self.directory.busy_until() - time.time()
        return max(here, self._remote_end) + limit > now

    # ------------------------------------------------------------------------------------------- no result will come

    def end_waits(self, error: MpiStrategyError, now: float) -> None:
        """Let `error` be due to this rank wherever it waits from now on."""
        self.due, self._due_since = error, now

    def waits_in_vain(self, now: float) -> bool:
        """Return whether this rank stays in a wait although no result will come: it can leave no wait in MPI itself."""
        if self.due is None and (failure := self._failure()) is not None:
            self.end_waits(failure.as_error(), now)
        return self.due is not None and min(now - self._due_since, self.host_waited(now)) > _ENDS_SECONDS

    def _failure(self) -> Failure | None:
        """Return why some rank takes no more calls; where another node must hear it, tell it or let this rank raise."""
        guard = self.guard
        if guard.failures is not None:
            return guard.failures.first()
        if guard.broken is not None and guard.is_untold:
            self.directory.show(LEFT, json.dumps(astuple(guard.broken)))
        if guard.broken is None and self._hears_failure:
            with suppress(ValueError, TypeError):
                failure = Failure(*json.loads(self.directory.read(LEFT)))
                guard.stop_waiting(failure.as_error())
                return failure
        return guard.broken

    # ------------------------------------------------------------------------------------------- the other nodes

    def look_at_nodes(self, now: float) -> None:
        """As the first rank of a node, when it is time: look what other nodes say, and say if this node is busy.

        In a save a rank says again and again that it is busy until now: other nodes hear of it from time to time.
        """
        is_first = self.board.local_rank == 0 or self.guard.contains_errors
        if self.nodes == 1 or not is_first or now < self._next_look or self.due is not None:
            return
        self._next_look = now + min(self.guard.timeout / 10, _LOOK_SECONDS)
        names = self.directory.names()
        self._hears_alarm, self._hears_failure = self._hears_alarm or ROLL_CALL in names, LEFT in names
        expected, step = max(self.board.all("expected")), min(self.guard.timeout / 10, _UNTOLD_SECONDS)
        if expected > self._announced_end + step:
            self._announced_end = expected
            self.directory.show(f"busy-{self.node}-{math.ceil(time.time() + expected - now)}")
        elif expected < now - 2 * step:  # the next save may be short
            self._announced_end = now
            self.directory.show("")
