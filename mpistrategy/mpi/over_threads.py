"""The collectives over threads: N replicas in one process, for unit tests and notebooks.

One thread runs at a time, and threads take turns in rank order at every collective, so every run of a program is the
same.  When no replica can go on (one has left, or two wait in different collectives), all that wait raise.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrategy.errors import CollectiveMismatchError
from mpistrategy.mpi.contract.call_sites import site_of
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.tuning.thresholds import RouteName

_ENDED = "has come to its end"


class Turns:
    """Lets one of several threads run at a time; finds out when none can.

    Args:
        count: how many threads there are.
    """

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._doing = [""] * count
        self._ready: list[Callable[[], bool]] = [lambda: True] * count
        self._hopeless: set[int] = set()
        self._why = ""

    def wait_for(self, me: int, ready: Callable[[], bool], doing: str) -> None:
        """Let the others run until `ready()`; raise on all threads that wait if no thread can go on.

        `doing` says where this thread waits, for that error.
        """
        self.pass_on(me, ready, doing)
        self.begin(me)
        if me in self._hopeless:
            self._hopeless.remove(me)
            raise CollectiveMismatchError(self._why)

    def begin(self, me: int) -> None:
        """Wait for the turn of this thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == me)

    def pass_on(self, me: int, ready: Callable[[], bool] = lambda: False, doing: str = _ENDED) -> None:
        """Let another thread run: the next one that is ready.  By default this one takes no more turns."""
        with self._changed:
            self._ready[me], self._doing[me] = ready, doing
            count = len(self._ready)
            in_turn = [(me + step) % count for step in range(1, count + 1)]
            able = [rank for rank in in_turn if rank in self._hopeless or self._ready[rank]()]
            if not able:
                able = [rank for rank in in_turn if self._doing[rank] != _ENDED]
                self._hopeless = set(able)
                rows = [f"  replica {rank}: {doing}" for rank, doing in enumerate(self._doing)]
                self._why = "\n".join(["no replica can go on: the calls do not fit together", *rows])
            self._running = able[0] if able else -1
            self._changed.notify_all()


@dataclass
class Meeting:
    """Gathers values of the threads: each thread brings a value, for the same purpose, and takes all values.

    Attributes:
        turns: who may run.
        size: how many threads there are.
    """

    turns: Turns
    size: int
    #: The values of the next round; threads of the last round hold its dict.
    _values: dict[int, tuple[str, Any]] = field(default_factory=dict)

    def allgather(self, rank: int, purpose: str, value: Any) -> list[Any]:
        """Return the values of all, in rank order; raise on all unless all came for the same `purpose`."""
        round_values = self._values
        round_values[rank] = (purpose, value)
        if len(round_values) == self.size:
            self._values = {}
        try:
            where = site_of(sys._getframe(1)).text
            self.turns.wait_for(rank, lambda: len(round_values) == self.size, f"waits at {where}")
        except CollectiveMismatchError:
            round_values.pop(rank, None)
            raise
        purposes, values = zip(*(round_values[peer] for peer in range(self.size)), strict=True)
        if len(set(purposes)) > 1:
            rows = [f"  replica {rank_of_row}: {peer_purpose}" for rank_of_row, peer_purpose in enumerate(purposes)]
            raise CollectiveMismatchError("\n".join(["the replicas meet in different collectives", *rows]))
        return list(values)


class Threads(Ranks, ControlChannel):
    """A `mpistrategy.mpi.interface.ranks.Ranks` among threads of this process.

    Args:
        meeting: where the threads bring their data.
        rank: this thread's number.
        node_of: the number of the node of each thread, from 0 on.
    """

    is_simulated = True

    def __init__(self, meeting: Meeting, rank: int, node_of: Sequence[int]) -> None:
        self._meeting = meeting
        super().__init__(rank, node_of, Guard(self if meeting.size > 1 else None, rank, meeting.size))

    def _gathered(self, purpose: str, value: Any) -> list[Any]:
        return self._meeting.allgather(self.rank, purpose, copy.deepcopy(value))

    def duplicate(self) -> Threads:
        """Return a communicator of the same ranks whose calls are separate from this one's.  Collective."""
        meeting = Meeting(self._meeting.turns, self.size)
        threads = Threads(self._meeting.allgather(self.rank, "duplicate", meeting)[0], self.rank, self.node_of)
        threads.devices = self.devices
        return threads

    def route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return "threads", whatever the size."""
        return "threads"

    def allgather_text(self, text: str, look: Callable[[], object] | None = None) -> list[str]:
        """Return every rank's text, in rank order; `Turns` ends the wait for a thread that has ended."""
        return list(self._meeting.allgather(self.rank, "allgather_text", text))

    def all_equal(self, digest: int, look: Callable[[], object] | None = None) -> bool:
        """Wait for every rank's digest; return whether all are equal; `Turns` ends the wait for a thread that ended."""
        return len(set(self._meeting.allgather(self.rank, "compare calls", digest))) == 1

    def start(self, digest: int) -> None:
        """Do nothing: `Turns` notes that a thread has ended."""

    def finished(self) -> bool | None:
        """Return True: a thread may end at any time."""
        return True


#: The communicator of the thread of a replica.
_world: ContextVar[Threads | None] = ContextVar("_world", default=None)


def world() -> Threads | None:
    """Return the communicator of all replicas that this thread is one of, or None in an ordinary thread."""
    return _world.get()


@dataclass
class Ending:
    """How the program of one rank ended: with a result, or with an exception."""

    result: Any = None
    error: BaseException | None = None


def run_threads(function: Callable[[], Any], count: int, nodes: Sequence[int] | None = None) -> list[Ending]:
    """Call `function` on `count` simulated ranks; return their endings in rank order.

    Args:
        function: the program, without arguments.
        count: the number of ranks.
        nodes: the node of each rank; None puts all on one.

    Returns:
        For each rank how its program ended: with a `result`, or with an `error`.
    """
    turns = Turns(count)
    meeting, numbers = Meeting(turns, count), list(dict.fromkeys(nodes or [0]))
    node_of = [numbers.index(node) for node in nodes or [0] * count]

    def replica(rank: int) -> Ending:
        _world.set(Threads(meeting, rank, node_of))
        turns.begin(rank)
        try:
            return Ending(function())
        except BaseException as error:
            return Ending(error=error)
        finally:
            turns.pass_on(rank)

    pool = ThreadPoolExecutor(count, "replica")
    endings = pool.map(replica, range(count))
    pool.shutdown(wait=False)  # Ctrl-C need not wait for the replicas
    return list(endings)
