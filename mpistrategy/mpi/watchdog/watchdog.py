"""The watchdog: one thread that never calls MPI and notices when a collective is late.

It regularly notes where this rank is, in a status that its peers can read.  When the rank has waited in a collective
for longer than its timeout, or a peer says that it has, the alarm is answered (`watchdog.alarm`): records, stacks, roll
call, and the end of the job.

Time in which the whole process stood still (a suspended job, a sleeping machine) does not count.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpistrategy.errors import OptionError
from mpistrategy.mpi.contract.failures import PATIENCE_SECONDS
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog import alarm, local_process, reports
from mpistrategy.mpi.watchdog.gpu_progress import GpuProgress
from mpistrategy.mpi.watchdog.group import Group
from mpistrategy.mpi.watchdog.status_board import RankStatus

_SHORTEST_TICK, _LONGEST_TICK = 0.05, 1.0
_STOOD_STILL_SECONDS = 1.0
#: How often `Watchdog.moves_on` tells the peers.
_MOVES_SECONDS = 0.25
_JOIN_SECONDS = 1.0


class Watchdog:
    """Watches over the collectives of this process.

    Args:
        rank: this process's number in the job.
        size: how many there are.
        end: see `mpistrategy.mpi.watchdog.alarm.answer`.
    """

    def __init__(self, rank: int, size: int, end: Callable[[int], object] | None = None) -> None:
        self._end = end
        self.rank = rank
        self.size = size
        self.title: str = f"[rank {rank}/{size}] "
        self.pid: int = os.getpid()
        self._groups: dict[Guard, Group] = {}
        self._expected = 0.0
        #: Until when, for each `expect` that lasts.
        self._busy: list[float] = []
        self._resumed = 0.0
        self._reminded = self._failed = False
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, group: Group) -> None:
        """Watch over one more communicator."""
        now, limit = time.monotonic(), group.limit
        begun = RankStatus(self.rank, self.pid, stack_signal, now, 0.0, limit, "has just begun")
        group.board.introduce(group.identity, len(group.ranks))
        group.board.put("expected", self._expected)
        group.board.write(begun)  # a rank that is stopped before the thread looks is known as well
        with self._lock:
            self._groups[group.guard] = group
            self._changed.set()
            if self._thread is None or not self._thread.is_alive():  # a signal may come before it is started
                self._thread = threading.Thread(target=self._run, name="mpistrategy watchdog", daemon=True)
                self._thread.start()

    def groups(self) -> list[Group]:
        """Return the groups that are watched."""
        return list(self._groups.values())

    def group_of(self, guard: Guard) -> Group | None:
        """Return the group of `guard`; None where it is not watched."""
        return self._groups.get(guard)

    def remove(self, guard: Guard) -> None:
        """Stop watching the communicator of `guard`; the thread ends after the last one."""
        with self._lock:
            group = self._groups.pop(guard, None)
            thread = None if self._groups else self._thread
            self._changed.set()
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
        if group is not None:
            group.has_ended = True
            group.end()

    @contextlib.contextmanager
    def expect(self, seconds: float) -> Iterator[None]:
        """Tell the peers that this rank is busy for so many seconds; they wait that much longer."""
        until = time.monotonic() + seconds
        self._busy.append(until)
        self._set_expected(max(self._busy))
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # in a child that was forked inside
                self._busy.remove(until)
            self._set_expected(max(self._busy, default=time.monotonic()))

    def moves_on(self) -> None:
        """Tell the peers that this rank makes progress with work whose end is not known."""
        now = time.monotonic()
        if now > self._expected + _MOVES_SECONDS:
            self._set_expected(now)

    def _set_expected(self, until: float) -> None:
        if os.getpid() != self.pid:
            return  # a forked child sees the board, too, but must not write there
        self._expected = until
        for group in self.groups():
            group.board.put("expected", until)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._is_over():
            tick = self._tick()
            self._changed.wait(tick)
            self._changed.clear()
            now = time.monotonic()
            if now - last > tick + _STOOD_STILL_SECONDS:
                self._resumed = now
            last = now
            try:
                self._look(now)
            except Exception as error:  # an error in here must neither end the job nor hide a hang
                if not self._failed:
                    reports.write_at_once(f"{self.title}mpistrategy's watchdog has failed: {error!r}\n")
                self._failed = True

    def _is_over(self) -> bool:
        """Return whether nothing is watched any more; another thread is started for what comes after that."""
        with self._lock:
            if not self._groups:
                self._thread = None
            return not self._groups

    def _tick(self) -> float:
        limit = min((group.limit for group in self.groups()), default=math.inf)
        return min(max(limit / 10, _SHORTEST_TICK), _LONGEST_TICK)

    def _look(self, now: float) -> None:
        groups = self.groups()
        if not groups:
            return
        for flight in _on_gpus(groups):
            flight.look(now)
        self._show(groups)
        for group in groups:
            group.look_at_nodes(now)
            group.tell_of_end()
            in_vain = group.seconds_in_vain(now)
            if in_vain > 0 and group.guard.contains_errors and not group.guard.is_told_late:
                group.guard.stop_waiting(group.failure().as_error())
            elif in_vain > (PATIENCE_SECONDS if group.guard.contains_errors else 0):
                alarm.end_for(group, group.failure(), self.title, self._end)
        contained = [group for group in groups if group.guard.contains_errors]
        for group in contained:
            if group.guard.is_told_late or not (group.is_alarmed() or self._is_late(now, [group])):
                continue
            if group.told is not None:  # this rank comes late to the call whose roll was called
                group.guard.stop_waiting(group.told)
            else:
                self._show(groups)
                alarm.contain(group, self.title)
        ending = [group for group in groups if not group.guard.contains_errors]
        if any(group.is_alarmed() for group in ending) or self._is_late(now, ending):
            self._show(groups)
            alarm.answer(ending, self.title, self._end)
        self._remind(now, groups)

    def _is_late(self, now: float, groups: list[Group]) -> bool:
        if any(flight.has_failed for flight in _on_gpus(groups)):
            return True
        late = [group for group in groups if group.is_late(now, self._resumed)]
        limit = min((group.limit for group in late), default=math.inf)
        return bool(late) and not any(group.is_excused(now, limit) for group in groups)

    def _show(self, groups: list[Group]) -> None:
        """Write the status of this moment."""
        now = time.monotonic()
        longest = max(groups, key=lambda group: group.waited(now, self._resumed) / group.limit)
        text = local_process.now_doing(group.guard for group in groups)
        waited, limit = longest.waited(now, self._resumed), longest.limit
        for group in groups:
            group.board.write(RankStatus(self.rank, self.pid, stack_signal, now, waited, limit, text))

    def _remind(self, now: float, groups: list[Group]) -> None:
        """Say once that this rank has ended and waits for the others, which may still be at work."""
        waiting = [group for group in groups if group.guard.leaving]
        if self._reminded or not any(now - group.guard.since > group.guard.timeout for group in waiting):
            return
        self._reminded = True
        widest = max(waiting, key=lambda group: len(group.ranks))
        others = [
            status for status in widest.board.read() if status.rank != self.rank and "at its end" not in status.text
        ]
        told = "".join(f"\n  rank {status.rank}: {status.text}" for status in others)
        reports.write_at_once(f"{self.title}has ended its program and waits for the other ranks.{told}\n")


def _on_gpus(groups: list[Group]) -> list[GpuProgress]:
    return [group.guard.gpu_progress for group in groups if group.guard.gpu_progress is not None]


#: The watchdog of this process, or of the one that has forked it; None where there is none.
running: Watchdog | None = None
#: The signal that makes this process print its stacks, whatever it is doing; 0 without one.
stack_signal = 0


def of_this_process(rank: int, size: int, end: Callable[[int], object] | None = None) -> Watchdog:
    """Return the watchdog of this process, made by the first call; a child of a rank gets one of its own."""
    global running
    if running is None or running.pid != os.getpid():
        running = Watchdog(rank, size, end)
    return running


def in_this_process() -> Watchdog | None:
    """Return the watchdog of this process, if it has one: from the first communicator of several ranks on."""
    return running if running is not None and running.pid == os.getpid() else None


def forget(guard: Guard) -> None:
    """Stop watching the communicator of `guard`."""
    if (watchdog := in_this_process()) is not None:  # the files are not a forked child's
        watchdog.remove(guard)


def expect_long(seconds: Any, where: str) -> contextlib.AbstractContextManager[None]:
    """Do `Watchdog.expect`, if there is one.

    Raises:
        OptionError: for anything but a number of seconds above 0.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not 0 < float(seconds) < math.inf:
        raise OptionError.at(where, found=f"seconds={seconds!r}", expected="a number above 0")
    return contextlib.nullcontext() if running is None else running.expect(float(seconds))
