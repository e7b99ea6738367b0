"""The collectives over threads: N replicas in one process, for unit tests and notebooks.

One thread runs at a time, and threads take turns in rank order at every collective, so every run of a program is the
same.  When no replica can go on (one has left, or two wait in different collectives), all that wait raise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrategy.errors import CollectiveMismatchError
from mpistrategy.mpi.contract.call_sites import site_of
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.tuning.thresholds import RouteName


def _has_ended() -> str:
    return "has come to its end"


class Turns:
    """Lets one of several threads run at a time; finds out when none can.

    Args:
        count: how many threads there are.
    """

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._doing: list[Callable[[], str]] = [str] * count
        self._ready: list[Callable[[], bool]] = [_always] * count
        self._hopeless: set[int] = set()
        self._why = ""

    def wait_for(self, me: int, ready: Callable[[], bool], doing: Callable[[], str]) -> None:
        """Let the others run until `ready()`; raise on all threads that wait if no thread can go on.

        `doing` says where this thread waits, for that error.
        """
        with self._changed:
            self._ready[me], self._doing[me] = ready, doing
            self._pass_on(me)
            self._changed.wait_for(lambda: self._running == me)
            self._ready[me], self._doing[me] = _always, str
            if me in self._hopeless:
                self._hopeless.remove(me)
                raise CollectiveMismatchError(self._why)

    def begin(self, me: int) -> None:
        """Wait for the first turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == me)

    def end(self, me: int) -> None:
        """Take no more turns."""
        with self._changed:
            self._ready[me], self._doing[me] = _never, _has_ended
            self._pass_on(me)

    def _pass_on(self, me: int) -> None:
        count = len(self._ready)
        in_turn = [(me + step) % count for step in range(1, count + 1)]
        if not any(ready() for ready in self._ready) and not self._hopeless:
            self._hopeless = {rank for rank in in_turn if self._doing[rank] is not _has_ended}
            rows = [f"  replica {rank}: {doing()}" for rank, doing in enumerate(self._doing)]
            self._why = "\n".join(["no replica can go on: the calls do not fit together", *rows])
        able = [rank for rank in in_turn if rank in self._hopeless or self._ready[rank]()]
        self._running = able[0] if able else -1
        self._changed.notify_all()


def _always() -> bool:
    return True


def _never() -> bool:
    return False


@dataclass
class Meeting:
    """Where some of the threads gather values: each brings one, for the same purpose, and takes all.

    Attributes:
        turns: who may run.
        members: the threads, in the order of their ranks here.
    """

    turns: Turns
    members: tuple[int, ...]
    _brought: dict[int, tuple[str, Any]] = field(default_factory=dict)
    _round: int = 0
    _taken: list[Any] = field(default_factory=list)

    def allgather(self, rank: int, purpose: str, value: Any) -> list[Any]:
        """Return what all members brought, in rank order; raise on all unless all came for the same `purpose`."""
        mine = self._round
        self._brought[rank] = (purpose, value)
        if len(self._brought) == len(self.members):
            self._taken = [self._brought[other] for other in range(len(self.members))]
            self._brought = {}
            self._round += 1
        try:
            frame = sys._getframe(1)
            self.turns.wait_for(
                self.members[rank], lambda: self._round > mine, lambda: f"waits at {site_of(frame).text}"
            )
        except CollectiveMismatchError:
            self._brought.pop(rank, None)
            raise
        purposes = [theirs for theirs, _ in self._taken]
        if len(set(purposes)) > 1:
            rows = [f"  replica {other}: {theirs}" for other, theirs in enumerate(purposes)]
            raise CollectiveMismatchError("\n".join(["the replicas meet in different collectives", *rows]))
        return [theirs for _, theirs in self._taken]


class Threads(Ranks, ControlChannel):
    """A `mpistrategy.mpi.interface.ranks.Ranks` among threads of this process.

    Args:
        meeting: where the members bring their data.
        rank: this thread's number among the members.
        nodes: the number of the node of each member; None puts all on one.
    """

    is_simulated = True

    def __init__(self, meeting: Meeting, rank: int, nodes: Sequence[int] | None = None) -> None:
        self._meeting = meeting
        self._nodes = list(nodes) if nodes is not None else [0] * len(meeting.members)
        numbers, size = list(dict.fromkeys(self._nodes)), len(self._nodes)
        guard = Guard(self if size > 1 else None, rank, size)
        super().__init__(rank, [numbers.index(node) for node in self._nodes], guard)

    def _gathered(self, purpose: str, value: Any) -> list[Any]:
        return self._meeting.allgather(self.rank, purpose, _copied(value))

    def duplicate(self) -> Threads:
        """Return a communicator of the same ranks whose calls are separate from this one's.  Collective."""
        meeting = self._meeting.allgather(self.rank, "duplicate", Meeting(self._meeting.turns, self._meeting.members))[
            0
        ]
        made = Threads(meeting, self.rank, self._nodes)
        made.devices = self.devices
        return made

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


def _copied(value: Any) -> Any:
    """Return a copy of an array, or of the arrays in a list."""
    if isinstance(value, list):
        return [each.copy() for each in value]
    return value.copy() if isinstance(value, np.ndarray) else value


class _World(threading.local):
    communicator: Threads | None = None


_world = _World()


def world() -> Threads | None:
    """Return the communicator of all replicas that this thread is one of, or None in an ordinary thread."""
    return _world.communicator


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
    everyone = Meeting(turns, tuple(range(count)))
    endings = [Ending() for _ in range(count)]

    def replica(rank: int) -> None:
        _world.communicator = Threads(everyone, rank, nodes)
        turns.begin(rank)
        try:
            endings[rank].result = function()
        except BaseException as error:
            endings[rank].error = error
        finally:
            turns.end(rank)

    threads = [threading.Thread(target=replica, args=(rank,), name=f"replica {rank}") for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return endings
