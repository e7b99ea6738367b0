"""The watchdog: one thread that never calls MPI and notices when a collective is late.

It regularly notes where this rank is, in a status that its peers can read.  When the rank has waited in a collective
for longer than its timeout, or a peer says that it has, the alarm is answered (`watchdog.alarm`): records, stacks, roll
call, and the end of the job.

Time in which the whole process stood still (a suspended job, a sleeping machine) does not count.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog import alarm, local_process, reports
from mpistrategy.mpi.watchdog.group import Group
from mpistrategy.mpi.watchdog.run_directory import FILE_SECONDS
from mpistrategy.mpi.watchdog.status_board import RankStatus
from mpistrategy.objects.settings import checked_number, positive

_SHORTEST_TICK, _LONGEST_TICK = 0.05, 1.0
_STOOD_STILL_SECONDS = 1.0
#: How long a look may take, at files of other nodes; a longer look has stood still.
_LOOKING_SECONDS = 3 * FILE_SECONDS
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
        #: The communicators that are watched.
        self.groups: dict[Guard, Group] = {}
        #: Until when this rank is busy, as the peers know; and since when this process runs again.
        self._expected = self._resumed = 0.0
        self._changed = threading.Event()
        self._thread = threading.Thread()  # none yet

    def add(self, group: Group) -> None:
        """Watch over one more communicator."""
        group.board.put("expected", self._expected)
        self._show([group])  # a rank that is stopped before the thread looks is known as well
        starts = not self.groups or not self._thread.is_alive()  # a signal may come before it is started
        self.groups[group.guard] = group
        self._changed.set()
        if starts:
            self._thread = threading.Thread(target=self._run, name="mpistrategy watchdog", daemon=True)
            self._thread.start()

    def remove(self, guard: Guard) -> None:
        """Stop watching the communicator of `guard`; the thread ends after the last one."""
        group = self.groups.pop(guard, None)
        self._changed.set()
        if not self.groups and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)
        if group is not None:
            group.directory.show("")

    @contextlib.contextmanager
    def expect(self, seconds: float) -> Iterator[None]:
        """Tell the peers that this rank is busy for so many seconds; they wait that much longer."""
        before = self._expected
        self._set_expected(max(before, time.monotonic() + seconds))
        try:
            yield
        finally:
            self._set_expected(max(before, time.monotonic()))

    def moves_on(self) -> None:
        """Tell the peers that this rank makes progress with work whose end is not known."""
        self._set_expected(max(self._expected, time.monotonic()))

    def _set_expected(self, until: float) -> None:
        if os.getpid() == self.pid:  # a forked child sees the board, too, but must not write there
            self._expected = until
            for group in list(self.groups.values()):
                group.board.put("expected", until)

    def _run(self) -> None:
        last = time.monotonic()
        while self.groups and self._thread is threading.current_thread():
            limits = [group.wait(last, last)[1] for group in list(self.groups.values())]
            tick = min(max(min(limits, default=0) / 10, _SHORTEST_TICK), _LONGEST_TICK)
            self._changed.wait(tick)
            self._changed.clear()
            now = time.monotonic()
            if now - last > tick + _STOOD_STILL_SECONDS:
                self._resumed = now
            try:
                self._look(now, list(self.groups.values()))
            except Exception as error:  # an error in here must neither end the job nor hide a hang
                reports.say(self.title, f"mpistrategy's watchdog has failed: {error!r}")
            last = min(time.monotonic(), now + _LOOKING_SECONDS)  # a slow file system does not stop the clock

    def _look(self, now: float, groups: list[Group]) -> None:
        self._show(groups)
        for group in groups:
            group.look_at_nodes(now)
            if group.waits_in_vain(now):
                alarm.end_in_vain(group, self.title, self._end)
            if group.due is None and group.guard.contains_errors and self._is_alarmed(now, [group]):
                error = alarm.call_the_roll([group], self.title).as_error()
                group.end_waits(error, time.monotonic())  # the roll call may have taken long
                group.guard.stop_waiting(error)
        ending = [group for group in groups if not group.guard.contains_errors]
        if self._is_alarmed(now, ending):
            alarm.answer(ending, self.title, self._end)

    def _is_alarmed(self, now: float, groups: list[Group]) -> bool:
        """Return whether this rank or another one has found a collective of these groups late."""
        if any(group.is_alarmed() for group in groups):
            return True
        limit = min((group.limit_passed(now, self._resumed) for group in groups), default=math.inf)
        return limit < math.inf and not any(group.is_excused(now, limit) for group in groups)

    def _show(self, groups: list[Group]) -> None:
        """Write the status of this moment."""
        now = time.monotonic()
        waits = [group.wait(now, self._resumed) for group in groups]
        waited, limit = max(waits, key=lambda wait: wait[0] / wait[1], default=(0.0, math.inf))
        text = local_process.now_doing(group.guard for group in groups)
        for group in groups:
            group.board.write(RankStatus(self.rank, self.pid, stack_signal, now, waited, limit, text))


#: The watchdog of this process, or of the process that has forked it; or None.
running: Watchdog | None = None
#: The signal that makes this process print its stacks, whatever it is doing; 0 without one.
stack_signal = 0


def of_this_process(rank: int, size: int, end: Callable[[int], object] | None = None) -> Watchdog:
    """Return the watchdog of this process, made by the first call."""
    global running
    running = running or Watchdog(rank, size, end)
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
        OptionTypeError, OptionError: for anything but a number of seconds above 0.
    """
    checked = checked_number(where, "seconds", seconds, "a number above 0", positive)
    return contextlib.nullcontext() if running is None else running.expect(checked)
