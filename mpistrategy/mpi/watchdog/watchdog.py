"""The watchdog: one thread that never calls MPI and notices when a collective is late.

It regularly notes where this rank is, in a status that its peers can read.  When the rank has waited in a collective
for longer than its timeout, or a peer says that it has, that is an alarm: records, stacks, roll call, and the end of
the job.  Time in which the whole process stood still (a suspended job, a sleeping machine) does not count.

When an alarm reaches a rank, it shows its record to its node and sets its status to answered.  The first such rank of a
node writes a file with the records of its node.  On the node that raised the alarm first, that rank reads the files of
the other nodes and prints the roll call.  Nothing here waits without a limit.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple, replace
from typing import Any, NoReturn

from mpistrategy.mpi.contract.flight_recorder import in_words
from mpistrategy.mpi.contract.guard import Failure, Guard, error_in_words
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.watchdog import local_process, reports
from mpistrategy.mpi.watchdog.roll_call import RollCall, as_data, statuses_in
from mpistrategy.mpi.watchdog.run_directory import ERROR, FILE_SECONDS, LEFT, ROLL_CALL, RunDirectory
from mpistrategy.mpi.watchdog.status_board import ANSWERED, CALLED, RankStatus, StatusBoard
from mpistrategy.objects.settings import checked_number, positive
from mpistrategy.objects.text import encoded

_SHORTEST_TICK, _LONGEST_TICK = 0.05, 1.0
_STOOD_STILL_SECONDS = 1.0
#: How long a look may take, at files of other nodes; a longer look has stood still.
_LOOKING_SECONDS = 3 * FILE_SECONDS
#: The status of a job that a late collective has ended, as of `timeout`.
STATUS = 124
#: How long the watchdog waits for the ranks of its node, and for the other nodes.
_NODE_SECONDS, _NODES_SECONDS = 3.0, 7.0
#: How long the rank that speaks for its node may take: it waits for the other nodes, reads and writes two files.
_SPEAKING_SECONDS = _NODES_SECONDS + 3 * FILE_SECONDS
#: How long this thread, or the end of the job by MPI, may take to come to its end.
_END_SECONDS = 1.0
#: The pause between two looks at memory and at files of other nodes.
_LOOK_SECONDS = 0.1
_RECORDS = "Each rank's stacks and its last collectives"
#: A rank may wait so many times the limit for its own GPU: its peers wait for it, unless all GPUs have stopped.
_OWN_GPU = 2
#: How often a node looks into the run directory, at least.
_MESSAGES_SECONDS = 2.5
#: For how long another node may not know that this node is busy.
_UNTOLD_SECONDS = 60.0
#: After how long a wait for a rank that takes no more calls ends with the job, where a rank stays in it.
_ENDS_SECONDS = 5.0


class Group:
    """The ranks of one communicator.

    A rank works, waits in a collective or waits for its own GPU.  It may have announced until when it is busy.  Ranks
    of one node read each other's statuses in shared memory.  What is said to all nodes (that a node is busy, that a
    rank takes no more calls, that a collective is late) is a name in the run directory.  The first rank of each node
    looks there, and all ranks where errors are contained; a rank that is late looks once more.

    Args:
        guard: of this rank.
        memory: for the status board of this node.
        ranks: the numbers in the job of all ranks, in the order of the communicator.
        node_of: the number of the node of each rank.
        path: of the run directory, the same on all ranks; the first rank warns if it cannot be written.

    Attributes:
        board: the statuses of the ranks of this node.
        node, nodes: the number of this node, and how many there are.
        directory: for the other nodes, and for reports.
    """

    def __init__(
        self, guard: Guard, memory: SharedMemory, ranks: Sequence[int], node_of: Sequence[int], path: str
    ) -> None:
        self.guard = guard
        self.ranks = ranks
        self.node: int = node_of[guard.rank]
        self.nodes: int = max(node_of) + 1
        self.directory: RunDirectory = RunDirectory(path, warns=guard.rank == 0)
        self.board: StatusBoard = StatusBoard(memory)
        guard.board = self.board
        self.board.introduce(1 + zlib.crc32(encoded(path)), len(ranks), guard.record)
        self._next_look = 0.0
        #: Which of `ROLL_CALL` and `LEFT` have been seen in the run directory.
        self._heard: set[str] = set()
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
        entry = local_process.inside_of(self.guard)
        return 0.0 if entry is None else max(0.0, now - max(entry.entered, self.guard.since, not_before))

    def limit_passed(self, now: float, not_before: float) -> float:
        """Return the limit that is over, a longer limit for this rank's own GPU; infinity where no limit is over."""
        waited, limit = self.wait(now, not_before)
        own_gpu = now - max(self.guard.own_gpu_since, not_before)
        return limit if waited > limit or own_gpu > _OWN_GPU * limit else math.inf

    def is_alarmed(self) -> bool:
        """Return whether this rank knows of a rank that has found a collective late, or of a failure on its own GPU."""
        flight = self.guard.gpu_progress
        return ROLL_CALL in self._heard or any(self.board.all("state")) or (flight is not None and bool(flight.failure))

    def is_excused(self, now: float, limit: float) -> bool:
        """Return whether some rank has announced work, and neither its time nor the limit after it is over."""
        here = max(self.board.all("expected"))
        if self.nodes > 1 and max(here, self._remote_end) + limit <= now:
            self._remote_end = now + self.directory.busy_until() - time.time()
        return max(here, self._remote_end) + limit > now

    # ------------------------------------------------------------------------------------------- no result will come

    def waits_in_vain(self, now: float) -> bool:
        """Return whether this rank stays in a wait although no result will come: it can leave no wait in MPI itself."""
        guard = self.guard
        if guard.due is None and (failure := self._failure()) is not None:
            guard.due = failure, failure.as_error(), now
        return guard.due is not None and min(now - guard.due[2], self.host_waited(now)) > _ENDS_SECONDS

    def _failure(self) -> Failure | None:
        """Return why some rank takes no more calls; where another node must hear it of this rank, tell it."""
        guard = self.guard
        if guard.broken is not None and guard.is_untold:
            self.directory.show(LEFT, json.dumps(astuple(guard.broken)))
        if guard.broken is None and LEFT in self._heard:
            with suppress(ValueError, TypeError):
                return Failure(*json.loads(self.directory.read(LEFT)))
        return guard.broken or (self.board.failure() if guard.shares_board else None)

    # ------------------------------------------------------------------------------------------- the other nodes

    def look_at_nodes(self, now: float) -> None:
        """As the first rank of a node, when it is time: look what other nodes say, and say if this node is busy.

        In a save a rank says again and again that it is busy until now: other nodes hear of it from time to time.
        """
        is_first = self.board.local_rank == 0 or self.guard.contains_errors
        if self.nodes == 1 or not is_first or now < self._next_look or self.guard.due is not None:
            return
        self._next_look = now + min(self.guard.timeout / 10, _MESSAGES_SECONDS)
        self._heard.update({ROLL_CALL, LEFT}.intersection(self.directory.names()))
        expected, step = max(self.board.all("expected")), min(self.guard.timeout / 10, _UNTOLD_SECONDS)
        if expected > self._announced_end + step:
            self._announced_end = expected
            self.directory.show(f"busy-{self.node}-{math.ceil(time.time() + expected - now)}")
        elif expected < now - 2 * step:  # the next save may be short
            self._announced_end = now
            self.directory.show("")


class Watchdog:
    """Watches over the collectives of this process.

    Attributes:
        rank: this process's number in the job, once MPI has said it.
        size: how many there are; 0 before.
        end: ends the job with a status, where the launcher would otherwise report another status; may hang.
        groups: the communicators that are watched; none in a forked child.
    """

    rank: int = 0
    size: int = 0
    end: Callable[[int], object] | None = None

    def __init__(self) -> None:
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
        """Stop watching the communicator of `guard`; the thread takes back what it showed, and ends after the last."""
        if self.groups.pop(guard, None) is not None:
            self._changed.set()
            if not self.groups and self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join(_END_SECONDS + FILE_SECONDS)

    @contextmanager
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
        self._expected = until
        for group in list(self.groups.values()):
            group.board.put("expected", until)

    def _run(self) -> None:
        last, directories = time.monotonic(), set[RunDirectory]()
        while self.groups and self._thread is threading.current_thread():
            limits = [group.wait(last, last)[1] for group in list(self.groups.values())]
            tick = min(max(min(limits, default=0) / 10, _SHORTEST_TICK), _LONGEST_TICK)
            self._changed.wait(tick)
            self._changed.clear()
            now = time.monotonic()
            if now - last > tick + _STOOD_STILL_SECONDS:
                self._resumed = now
            groups = list(self.groups.values())
            before, directories = directories, {group.directory for group in groups}
            for directory in before - directories:
                directory.show("")  # here: another thread might do so while this one shows something
            try:
                self._look(now, groups)
            except Exception as error:  # an error in here must neither end the job nor hide a hang
                reports.say(f"mpistrategy's watchdog has failed: {error!r}")
            groups.clear()  # keeps no memory of a strategy that is closed meanwhile
            last = min(time.monotonic(), now + _LOOKING_SECONDS)  # a slow file system does not stop the clock
        for directory in directories:
            directory.show("")

    def _look(self, now: float, groups: list[Group]) -> None:
        self._show(groups)
        for group in groups:
            group.look_at_nodes(now)
            if group.waits_in_vain(now):
                self._end_in_vain(group)
            if group.guard.due is None and group.guard.contains_errors and self._is_alarmed(now, [group]):
                error = self._call_the_roll([group]).as_error()
                failure = Failure(error_in_words(error), group.guard.rank, "a wait for the others")
                group.guard.due = failure, error, time.monotonic()  # the roll call may have taken long
        ending = [group for group in groups if not group.guard.contains_errors]
        if self._is_alarmed(now, ending):
            self._answer(ending)

    def _is_alarmed(self, now: float, groups: list[Group]) -> bool:
        """Return whether this rank or another one has found a collective of these groups late."""
        limit = min((group.limit_passed(now, self._resumed) for group in groups), default=math.inf)
        return any(group.is_alarmed() for group in groups) or (
            limit < math.inf and not any(group.is_excused(now, limit) for group in groups)
        )

    def _show(self, groups: list[Group]) -> None:
        """Write the status of this moment."""
        now = time.monotonic()
        waits = [group.wait(now, self._resumed) for group in groups]
        waited, limit = max(waits, key=lambda wait: wait[0] / wait[1], default=(0.0, math.inf))
        text = local_process.now_doing(group.guard for group in groups)
        for group in groups:
            group.board.write(RankStatus(self.rank, os.getpid(), stack_signal, now, waited, limit, text))

    # ------------------------------------------------------------------------------------------------------- the alarm

    def _answer(self, groups: Sequence[Group]) -> NoReturn:
        """Answer the alarm of this rank or of another rank, and end this process."""
        try:
            self._call_the_roll(groups)
        except Exception as error:  # an error in here must not keep the job from ending
            reports.say(f"a collective is late, and mpistrategy could not say where: {error!r}")
        finally:
            self._end_job(STATUS)

    def _end_in_vain(self, group: Group) -> NoReturn:
        """End the job, since this rank stays in a wait although no result will come: see `Group.waits_in_vain`."""
        try:
            where, error = local_process.now_doing([group.guard]), group.guard.due and group.guard.due[1]
            reports.say(f"{where}\nwaits in vain: {error} The whole job ends here.")
            reports.finish(FILE_SECONDS)
        finally:
            self._end_job(1)

    def _end_job(self, status: int) -> NoReturn:
        if (end := self.end) is not None:
            reports.in_time(lambda: end(status), None, _END_SECONDS)
        os._exit(status)

    def _call_the_roll(self, groups: Sequence[Group]) -> RollCall:
        """Answer an alarm, and print the roll call on one rank; return the roll call as this rank knows it.

        Args:
            groups: those that are watched; their boards have this rank's status of this moment.
        """
        widest = max(groups, key=lambda group: len(group.ranks))
        guards, began = [group.guard for group in groups], time.monotonic()
        record = f"{local_process.now_doing(guards)}\n\n{local_process.record(guards)}"
        for group in groups:
            group.directory.show("")
            group.board.put("record", record)
            group.board.put("state", ANSWERED)
        _until(lambda: min(widest.board.all("state")) >= ANSWERED, began + _NODE_SECONDS)
        states = widest.board.all("state")
        first = next(local for local, state in enumerate(states) if state)
        speaks = CALLED not in states and first == widest.board.local_rank
        called = _speak(widest) if speaks else None
        reports.finish(FILE_SECONDS)
        for group in groups if speaks else ():
            group.board.put("state", CALLED)
        _until(lambda: CALLED in widest.board.all("state"), began + _NODE_SECONDS + _SPEAKING_SECONDS)
        statuses = _on_this_node(widest)
        # Only the rank that calls the roll hears of other nodes: on other ranks an unknown rank is not a missing rank.
        return called or RollCall(statuses, widest.ranks if widest.nodes == 1 else [status.rank for status in statuses])


def _speak(widest: Group) -> RollCall | None:
    """Write the records of this node; call the roll, and return it, unless another node does."""
    directory, local_statuses = widest.directory, _on_this_node(widest)
    for status in local_statuses:
        if status.silent and status.signal:  # print your stacks: this needs no Python in that process
            with suppress(OSError):
                os.kill(status.process, status.signal)
    calls = directory.claim(ROLL_CALL)  # by the first node that makes this file, which is an alarm
    remote_statuses = _hear_others(widest) if calls and widest.nodes > 1 else []
    called = RollCall(local_statuses + remote_statuses, widest.ranks)
    text = called.text(f"{_RECORDS}: {directory.path}/*.json", widest.guard.contains_errors) if calls else ""
    is_written = directory.write(f"error-{widest.node}.json", _as_json(widest, local_statuses, called, text))
    if is_written and calls:
        reports.say(text)
        directory.write(ROLL_CALL, text)
    elif not is_written or not _until(lambda: bool(directory.read(ROLL_CALL)), time.monotonic() + _SPEAKING_SECONDS):
        for status in local_statuses:
            reports.say(f"record of rank {status.rank}:\n{status.record}")
        reports.say(called.text(f"{_RECORDS} are above.", widest.guard.contains_errors))
    return called if calls else None


def _on_this_node(widest: Group) -> list[RankStatus]:
    """Return the statuses of the ranks of this node."""
    words = {entry.number: in_words(entry) for entry in list(widest.guard.record.entries)}  # the other ranks' as well
    return [_with_reason(status, words) for status in widest.board.read() if status.process]


def _with_reason(status: RankStatus, words: Mapping[int, str]) -> RankStatus:
    """Return a status with the name of its node; where the rank has not answered, also with why and its last calls."""
    if status.state:
        return replace(status, host=local_process.node_name())
    now = time.monotonic()
    calls = [(at - now, words.get(number, f"#{number}")) for number, at in status.calls.items()]
    last = f"its last was {calls[-1][1]}, {-calls[-1][0]:.1f} s ago" if calls else "it has made no collective yet"
    silent = f"{local_process.why_silent(status.process)}; {last}"
    lines = [f"{at:12.6f} s  {text}" for at, text in calls]
    record = "\n".join(["when it entered its last collectives, as the other ranks call them:", *lines])
    return replace(status, silent=silent, record=record, host=local_process.node_name())


def _as_json(widest: Group, local_statuses: Sequence[RankStatus], called: RollCall, text: str) -> str:
    """Return the text of a node's file: the statuses, and the records of its ranks."""
    fields = {"ranks": as_data(called.statuses), "unknown": called.unknown, "missing": called.missing}
    records = {status.rank: status.record.splitlines() for status in local_statuses}
    return json.dumps({"text": text, "node": widest.node, **fields, "records": records}, indent=1)


def _hear_others(widest: Group) -> list[RankStatus]:
    """Return the statuses that other nodes have written since the alarm, once all have, or after some time."""
    directory, own_name, statuses = widest.directory, f"error-{widest.node}.json", list[RankStatus]()

    def other_files() -> list[str]:
        return [name for name in directory.names() if ERROR.fullmatch(name) and name != own_name]

    _until(lambda: len(other_files()) >= widest.nodes - 1, time.monotonic() + _NODES_SECONDS)
    for name in other_files():
        with suppress(ValueError, TypeError, KeyError):
            statuses += statuses_in(json.loads(directory.read(name))["ranks"])
    return statuses


def _until(ready: Callable[[], bool], end: float) -> bool:
    """Wait until `ready`; return False if it is not by `end`."""
    while not (is_ready := ready()) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    return is_ready


#: The watchdog of this process.
here: Watchdog = Watchdog()
os.register_at_fork(after_in_child=here.groups.clear)
#: The signal that makes this process print its stacks, whatever it is doing; 0 without one.
stack_signal = 0


def expect_long(seconds: Any, where: str) -> AbstractContextManager[None]:
    """Do `Watchdog.expect`.

    Raises:
        OptionTypeError, OptionError: for anything but a number of seconds above 0.
    """
    return here.expect(checked_number(where, "seconds", seconds, "a number above 0", positive))
