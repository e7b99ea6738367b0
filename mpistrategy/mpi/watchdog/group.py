"""The ranks of one communicator, as the watchdog sees them, and what their watchdogs tell each other.

Ranks of one node read each other's statuses in shared memory.  The first rank of each node regularly writes those of
its node to the run directory, for the other nodes, and looks there for an alarm.

What one rank says to all (that it is busy, that a collective is late) is a name in that directory, so that nobody opens
a file a node to hear it.  One rank of a node looks, and the others read its answer in shared memory.  The node that
raises the alarm first calls the roll, and is the only one that reads the files of all others, once each.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mpistrategy.mpi.contract.failures import PATIENCE_SECONDS, Failure
from mpistrategy.mpi.contract.flight_recorder import CurrentCall, in_words
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog.run_directory import BUSY, CLAIM, LEFT, MOST_BYTES, ROLL_CALL, RunDirectory
from mpistrategy.mpi.watchdog.status_board import ALARMED, LastCalls, RankStatus, StatusBoard
from mpistrategy.objects.later import later

if TYPE_CHECKING:
    from mpistrategy.mpi.watchdog.local_process import inside_of, node_name
    from mpistrategy.mpi.watchdog.roll_call import Account
else:
    later(globals(), "mpistrategy.mpi.watchdog.local_process", "inside_of", "node_name")
    later(globals(), "mpistrategy.mpi.watchdog.roll_call", "Account")

#: A rank may wait so many times the limit for its own GPU: its peers wait for it, unless all GPUs have stopped.
_OWN_GPU = 2
_FIRST_PAUSE_SECONDS = 0.5
#: How old the status of a rank may be that reads for its node, and how long the others wait for it to read again.
_READER_SECONDS = 3.0
_CLAIM_LOOKS, _CLAIM_SECONDS = 50, 0.02
#: How long a rank may take to leave a wait that is in vain, after `PATIENCE_SECONDS`; it cannot leave a call of MPI.
_LEAVING_SECONDS = 1.5
_LONGEST_SECONDS_BETWEEN_LOOKS = 2.5
_LONGEST_SECONDS_BETWEEN_FILES = 60.0


class Group:
    """The ranks of one communicator.

    Args:
        guard: of this rank.
        board: the statuses of the ranks of this node.
        node: the number of this node.
        nodes: how many there are.
        directory: for the other nodes, and for records.
        shown: returns the numbers of the exchanges that the ranks of this node have come to; None where none can.
        identity: a number that only this communicator has, the same on all its ranks; 0 where there is none.

    Attributes:
        ranks: the numbers in the job of all ranks, in the order of the communicator.
    """

    def __init__(
        self,
        guard: Guard,
        board: StatusBoard,
        node: int,
        nodes: int,
        directory: RunDirectory,
        shown: Callable[[], list[int]] | None = None,
        identity: int = 0,
    ) -> None:
        self.identity = identity
        self.guard = guard
        self.board = board
        self.ranks: Sequence[int] = ()
        self.node = node
        self.nodes = nodes
        self.directory = directory
        self._shown = shown
        self._looked = self._wrote = time.monotonic()
        self._heard = False
        #: The name that says until when this node is busy, and that time; seconds of time.monotonic().
        self._busy, self._told_expected, self._told = "", 0.0, 0.0
        #: Since when this rank asks whether another node is busy; as the reader: when to look again, after which pause.
        self._asks_since = self._next_look = self._pause = 0.0
        #: What other nodes have said after an alarm, and whether it is final.
        self._heard_of: dict[int, tuple[bool, list[Account]]] = {}
        self._noted = 0
        self._told_left = False
        #: The wait in which this rank has seen that another one takes no more calls, and since when.
        self._left_call: CurrentCall | None = None
        self._left_since = 0.0
        #: Since when this rank has been told to stop waiting; infinity if it has not.
        self._told_since = math.inf
        self._entry: CurrentCall | None = None
        self._again = False

    @property
    def limit(self) -> float:
        """How long the present collective may take, in seconds."""
        current, flight = self.guard.current, self.guard.gpu_progress
        if current is not None and current.timeout is not None:
            return float(current.timeout)
        if current is None and flight is not None:
            return float(flight.limit(self.guard.timeout))
        return self.guard.timeout

    def look(self) -> None:
        """Note which collective this rank is in; only one that is found twice in a row can be late."""
        entry = inside_of(self.guard)
        self._again = entry is not None and entry is self._entry
        self._entry = entry
        if self.guard.gpu_progress is not None:
            self.guard.gpu_progress.look(time.monotonic())

    def note_calls(self) -> None:
        """Show when this rank entered its last collectives, to whoever looks from outside at who came last."""
        entries = list(self.guard.record.entries)  # copies without letting the program's threads run, which write more
        if entries and entries[-1].number != self._noted:
            self._noted = entries[-1].number
            entered = {entry.number: int(entry.entered * 1e9) for entry in entries}
            self.board.write_calls(LastCalls(self.identity, len(self.ranks), entered))

    def is_late(self, now: float, not_before: float) -> bool:
        """Return whether this rank or its GPU has waited longer than the limit (for its own GPU, far longer)."""
        flight = self.guard.gpu_progress
        if flight is not None and flight.waited(now, not_before) > flight.limit(self.guard.timeout):
            return True
        if now - max(self.guard.own_gpu_since, not_before) > _OWN_GPU * self.limit:
            return True
        return self._again and self.host_waited(now, not_before) > self.limit

    @property
    def has_failed(self) -> bool:
        """Whether the collective on this rank's GPU will never end."""
        flight = self.guard.gpu_progress
        return flight is not None and bool(flight.has_failed)

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

    def last_calls(self) -> dict[int, str]:
        """Return where the ranks of this node are, for those that cannot say it; {} while this rank is in no call.

        All ranks make the same calls: a rank that has not come to this one was in the one before.
        """
        here, before = inside_of(self.guard), self.guard.record.last(1)
        if self._shown is None or here is None:
            return {}
        shown = self._shown()
        mine = shown[self.board.local_rank]
        last = "it has made no collective yet" if before is None else f"its last was {in_words(before)}"
        words = [f"; it has come to #{here.number}" if theirs >= mine else f"; {last}" for theirs in shown]
        return {status.rank: text for status, text in zip(self.board.read(), words, strict=True)}

    def tell_of_end(self) -> None:
        """Tell all nodes, once, that this rank takes no more calls, where it has not told the other ranks itself."""
        broken = self.guard.broken
        if broken is not None and self.guard.is_untold and not self._told_left:
            self._told_left = True
            if not self.directory.has(LEFT):
                self.directory.write(LEFT, json.dumps([broken.error, broken.rank, broken.where]))
            self.board.note_left()

    def waits_in_vain(self, now: float) -> Failure | None:
        """Return why this rank waits in vain: for one that takes no more calls; None where it does not.

        A rank that finds that out where it waits is given the time to leave.
        """
        failures = self.guard.failures
        left = None if failures is None or not self._again else failures.left_by()
        if failures is not None and left is not None:
            if self._left_call is not self._entry:
                self._left_call, self._left_since = self._entry, now
            if now - self._left_since > PATIENCE_SECONDS + _LEAVING_SECONDS and self.host_waited(now):
                return failures.failure_of(left)
        if not self.board.has_left() or self.host_waited(now) < PATIENCE_SECONDS:
            return None
        with contextlib.suppress(ValueError, TypeError):
            return Failure(*json.loads(self.directory.read(LEFT)))
        return Failure("another rank takes no more calls")

    def cannot_leave(self, now: float) -> bool:
        """Return whether this rank was told to stop waiting, and is in a call of MPI, which it cannot leave."""
        if not self.guard.is_told_late or not self.host_waited(now):
            self._told_since = math.inf
            return False
        self._told_since = min(self._told_since, now)
        return now - self._told_since > PATIENCE_SECONDS

    def is_alarmed(self) -> bool:
        """Return whether this rank knows of a rank that has found a collective late."""
        return self._heard or self.board.state() >= ALARMED

    def alarm(self) -> None:
        """Tell the other nodes that a collective is late, and that this node calls the roll; the first one does."""
        if self.nodes > 1:
            self.directory.claim(ROLL_CALL, f"node {self.node}\n")

    def calls_the_roll(self) -> bool:
        """Return whether this node does: it was the first to raise the alarm, or it can read no other's."""
        if self.nodes == 1:
            return True
        for _ in range(_CLAIM_LOOKS):
            told = self.directory.read(ROLL_CALL)
            if told or not self.directory.has(ROLL_CALL):
                break
            time.sleep(_CLAIM_SECONDS)  # it has just been made
        claim = CLAIM.fullmatch(told)
        return not told or (claim is not None and int(claim[1]) == self.node)

    def is_excused(self, now: float, limit: float) -> bool:
        """Return whether some rank said that it would be busy, and that time and the limit are not over.

        What another node has said counts as it was when the rank that reads for this node has last looked; where that
        was too early, it is waited for.
        """
        if self.board.expected() + limit > now:
            return True
        if self.nodes == 1:
            return False
        if not self._asks_since:
            self._asks_since = now
            self.board.ask(now)
        self._look_for_busy_nodes(now, limit)
        looked, until = self.board.answered()
        due = max(self._asks_since, until + limit)
        return due > now or (looked < due and now < due + 2 * _READER_SECONDS)

    def end_wait(self) -> None:
        """Note that this rank is not late."""
        if self._asks_since:
            self._asks_since = 0.0
            self.board.ask(0.0)

    def _look_for_busy_nodes(self, now: float, limit: float) -> None:
        """As the reader of this node, find out until when other nodes are busy, and tell the node.

        The directory is read again after growing pauses, up to a tenth of the limit.
        """
        if now < self._next_look or self.board.reader(now - _READER_SECONDS) != self.board.local_rank:
            return
        found = (BUSY.fullmatch(name) for name in self.directory.names())
        wall = max((int(name[2]) for name in found if name and int(name[1]) != self.node), default=0)
        until = max(0.0, now + wall - time.time())
        is_busy = until + limit > now
        self._pause = min(2 * self._pause or _FIRST_PAUSE_SECONDS, limit / 10) if is_busy else 0.0
        self._next_look = min(now + self._pause, until + limit) if is_busy else now
        self.board.answer(now, until)

    def update_nodes(self, now: float) -> None:
        """When it is time: tell the other nodes about this one, look for their alarm, and whether one is busy."""
        if self.nodes == 1:
            return
        if self.board.asked():
            self._look_for_busy_nodes(now, self.limit)
        if self.board.local_rank:
            return
        self._tell_expected(now)
        if now - self._wrote > min(self.guard.timeout / 10, _LONGEST_SECONDS_BETWEEN_FILES):
            self._wrote = now
            self.tell()
        if now - self._looked > min(self.guard.timeout / 10, _LONGEST_SECONDS_BETWEEN_LOOKS):
            self._looked = now
            self._heard = self.directory.has(ROLL_CALL)
            if self.directory.has(LEFT):
                self.board.note_left()

    def _tell_expected(self, now: float) -> None:
        """Tell the other nodes until when this one is busy: at once if that is far longer than they know."""
        expected, told, pause = self.board.expected(), self._told_expected, self.guard.timeout / 10
        if told <= expected <= told + (pause if told else 0.0) or (expected < told and now < self._told + pause):
            return
        old, busy = self._busy, f"busy-{self.node}-{math.ceil(time.time() + expected - now)}"
        if busy != old:
            if not self.directory.write(busy, ""):
                return  # the next look tries again
            if old:
                self.directory.discard(old)
        self._busy, self._told_expected, self._told = busy, expected, now

    def take_back_expected(self) -> None:
        """Remove what this rank has written about a busy node: after an alarm the roll call says more."""
        if self._busy:
            self.directory.discard(self._busy)
            self._busy, self._told_expected = "", 0.0

    def tell(self, accounts: Sequence[Account] | None = None) -> bool:
        """Write this node's statuses for the other nodes; with `accounts`, the final ones, and records, after an alarm.

        Return whether that was possible.
        """
        now = time.monotonic()
        lines = [asdict(_relative(status, now)) for status in self.board.read()]
        silent = {str(each.status.rank): each.silent for each in accounts or ()}
        told = {
            "wall": time.time(),
            "final": accounts is not None,
            "lines": lines,
            "silent": silent,
            "host": node_name(),
        }
        if accounts is not None:
            told["records"] = self.records()
        return self.directory.write(_file_of(self.node), json.dumps(told, indent=1 if accounts else None))

    def records(self) -> dict[int, list[str]]:
        """Return the lines of the records of this node's ranks, which fit into one file together."""
        longest = MOST_BYTES // 2 // self.board.count  # as JSON, text takes more
        return {rank: text.splitlines() for rank, text in self.board.records(longest).items()}

    def all_are_final(self) -> bool:
        """Return whether all other nodes have written their final statuses; each is read until it has."""
        for node in range(self.nodes):
            if node != self.node and not self._heard_of.get(node, (False,))[0]:
                with contextlib.suppress(ValueError, TypeError, KeyError):  # not there (yet)
                    told = json.loads(self.directory.read(_file_of(node)))
                    self._heard_of[node] = bool(told["final"]), _accounts_in(told)
        return sum(final for final, _ in self._heard_of.values()) == self.nodes - 1

    def others(self) -> list[Account]:
        """Return what `all_are_final` has found out about the ranks of other nodes."""
        return [account for _, accounts in list(self._heard_of.values()) for account in accounts]

    def publish(self, text: str) -> None:
        """Write the roll call to the run directory, in which it says more than this node's own file."""
        self.directory.write(ROLL_CALL, text)
        self.directory.discard(_file_of(self.node))

    def is_published(self) -> bool:
        """Return whether another node has written the roll call."""
        told = self.directory.read(ROLL_CALL)
        return bool(told) and not CLAIM.fullmatch(told)


def _accounts_in(told: Mapping[str, Any]) -> list[Account]:
    passed = max(0.0, time.time() - told["wall"])
    lines = [RankStatus(**status) for status in told["lines"]]
    why = {each.rank: told["silent"].get(str(each.rank), "nothing on its node does") for each in lines}
    return [Account(each, passed - each.beat, why[each.rank]) for each in lines]


def _file_of(node: int) -> str:
    return f"node-{node}.json"


def _relative(status: RankStatus, now: float) -> RankStatus:
    """Return a status with times relative to `now`: other nodes have other clocks."""
    return replace(status, beat=status.beat - now, expected=status.expected - now)
