"""The collectives over threads: N replicas in one process, for unit tests and notebooks.

One thread runs at a time, and threads take turns in rank order at every collective, so every run of a program is the
same.  When no replica can go on (one has left, or two wait in different collectives), all that wait raise.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from mpistrategy.arrays.devices import Device
from mpistrategy.errors import CollectiveMismatchError
from mpistrategy.mpi.contract.call_sites import site_of
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.ranks import Ranks

_ENDED = "has come to its end"


class Turns:
    """Lets one of several threads run at a time, and gathers their values; finds out when none can go on.

    Args:
        size: how many threads there are.
    """

    def __init__(self, size: int) -> None:
        self.size: int = size
        self._changed = threading.Condition()
        self._running = 0
        #: The values of the round that is to be full before a thread goes on, and where it waits for that.
        self._awaited: list[dict[int, Any]] = [dict.fromkeys(range(size))] * size
        self._doing = [""] * size
        #: The values of the next round, by communicator; threads of the last round hold its dict.
        self._next: defaultdict[object, dict[int, Any]] = defaultdict(dict)
        self._hopeless: set[int] = set()
        self._why = ""

    def allgather(self, communicator: object, rank: int, value: Any) -> list[Any]:
        """Let the others run until all threads have brought a value; return the values in rank order.

        Raises on all threads that wait if no thread can go on.
        """
        values = self._next[communicator]
        values[rank] = value
        if len(values) == self.size:
            del self._next[communicator]
        self.pass_on(rank, values, f"waits at {site_of(sys._getframe(1)).text}")
        self.begin(rank)
        if rank in self._hopeless:
            self._hopeless.remove(rank)
            del values[rank]
            raise CollectiveMismatchError(self._why)
        return [values[peer] for peer in range(self.size)]

    def begin(self, me: int) -> None:
        """Wait for the turn of this thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == me)

    def pass_on(self, me: int, values: dict[int, Any], doing: str) -> None:
        """Let another thread run: the next one whose round is full.

        Args:
            me: this thread.
            values: of the round for which it waits; an empty dict, which stays empty, for a thread that has ended.
            doing: where it waits.
        """
        with self._changed:
            self._awaited[me], self._doing[me] = values, doing
            in_turn = [(me + step) % self.size for step in range(1, self.size + 1)]
            able = [rank for rank in in_turn if rank in self._hopeless or len(self._awaited[rank]) == self.size]
            if not able:
                able = [rank for rank in in_turn if self._doing[rank] != _ENDED]
                self._hopeless = set(able)
                rows = [f"  replica {rank}: {where}" for rank, where in enumerate(self._doing)]
                self._why = "\n".join(["no replica can go on: the calls do not fit together", *rows])
            self._running = able[0] if able else -1
            self._changed.notify_all()


class Threads(Ranks, ControlChannel):
    """A `mpistrategy.mpi.interface.ranks.Ranks` among threads of this process.

    Args:
        turns: of the threads.
        rank: this thread's number.
        node_of: the number of the node of each thread, from 0 on.
        communicator: tells the calls of communicators apart; the same object on all ranks.
        devices: of all ranks.
    """

    is_simulated = True

    def __init__(
        self,
        turns: Turns,
        rank: int,
        node_of: Sequence[int],
        communicator: object = None,
        devices: tuple[Device, ...] = (),
    ) -> None:
        self._turns, self._communicator = turns, communicator
        super().__init__(rank, node_of, Guard(self if turns.size > 1 else None, rank, turns.size), devices)

    def _gathered(self, value: Any) -> list[Any]:
        return self._turns.allgather(self._communicator, self.rank, copy.deepcopy(value))

    def duplicate(self) -> Threads:
        """Return a communicator of the same ranks whose calls are separate from this one's.  Collective."""
        communicator = self._turns.allgather(self._communicator, self.rank, object())[0]
        return Threads(self._turns, self.rank, self.node_of, communicator, self.devices)

    def all_equal(self, digest: int, look: Callable[[], object] | None = None) -> bool:
        """Wait for every rank's digest; return whether all are equal; `Turns` ends the wait for a thread that ended."""
        return len(set(self._gathered(digest))) == 1

    def start(self, digest: int) -> None:
        """Do nothing: `Turns` notes that a thread has ended."""

    def finished(self) -> bool | None:
        """Return True: a thread may end at any time."""
        return True


#: The ranks of all replicas of which this thread is one; None in an ordinary thread.
replicas_here: ContextVar[Threads | None] = ContextVar("replicas_here", default=None)


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
    turns, numbers = Turns(count), list(dict.fromkeys(nodes or [0]))
    node_of = [numbers.index(node) for node in nodes or [0] * count]

    def replica(rank: int) -> Ending:
        replicas_here.set(Threads(turns, rank, node_of))
        turns.begin(rank)
        try:
            return Ending(function())
        except BaseException as error:
            return Ending(error=error)
        finally:
            turns.pass_on(rank, {}, _ENDED)

    pool = ThreadPoolExecutor(count, "replica")
    endings = pool.map(replica, range(count))
    pool.shutdown(wait=False)  # Ctrl-C need not wait for the replicas
    return list(endings)
