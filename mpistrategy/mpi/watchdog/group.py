"""The ranks of one communicator, as the watchdog sees them, and what their watchdogs tell each other.

Ranks of one node read each other's statuses in shared memory.  The first rank of each node regularly writes those of
its node to the run directory, for the other nodes, and looks there for an alarm.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from mpistrategy.mpi.contract.flight_recorder import ENTERED, NUMBER, Entry, in_words
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.watchdog.local_process import inside_of
from mpistrategy.mpi.watchdog.roll_call import Account
from mpistrategy.mpi.watchdog.run_directory import RunDirectory
from mpistrategy.mpi.watchdog.status_board import ALARMED, RankStatus, StatusBoard

_ALARM, _ROLL_CALL = "alarm", "roll-call.txt"
#: A rank may wait so many times the limit for its own GPU: its peers wait for it, unless all GPUs have stopped.
_OWN_GPU = 2
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_SECONDS_BETWEEN_LOOKS = 5.0
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
        is_making: whether the ranks meet here to make a communicator.
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
        self.is_making = False
        self.node = node
        self.nodes = nodes
        self.directory = directory
        self._shown = shown
        self._looked = self._wrote = time.monotonic()
        self._told_expected = 0.0
        self._heard = False
        #: Until when another node is known to be busy, and how long before its word is read again.
        self._excused_until = self._pause = 0.0
        self._entry: Entry | None = None
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
        return max(0.0, now - max(float(entry[ENTERED]), self.guard.since, not_before))

    def was_met_by(self, rank: int, other: int) -> bool:
        """Return whether a rank of this node has come, or may have come, to the call that another one is in.

        Without mailboxes it may have; but a rank that waits elsewhere does not take part in making a communicator.
        """
        if self._shown is None:
            return not self.is_making
        shown = {status.rank: number for status, number in zip(self.board.read(), self._shown(), strict=True)}
        return rank in shown and other in shown and shown[rank] >= shown[other]

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
        words = [f"; it has come to #{here[NUMBER]}" if theirs >= mine else f"; {last}" for theirs in shown]
        return {status.rank: text for status, text in zip(self.board.read(), words, strict=True)}

    def is_alarmed(self) -> bool:
        """Return whether this rank knows of a rank that has found a collective late."""
        return self._heard or self.board.state() >= ALARMED

    def alarm(self) -> None:
        """Tell the other nodes that a collective is late."""
        if self.nodes > 1:
            self.directory.write(_ALARM, "")

    def is_excused(self, now: float, limit: float) -> bool:
        """Return whether some rank said that it would be busy, and that time and the limit are not over.

        What other nodes say is read again after growing pauses, up to a tenth of the limit: all ranks of a large job
        may ask at every tick, and each reads a file a node.
        """
        if self.board.expected() + limit > now or now < self._excused_until:
            return True
        busy = (told["wall"] + status["expected"] for told in self._other_nodes() for status in told["lines"])
        if not max(busy, default=-math.inf) + limit > time.time():
            self._pause = 0.0
            return False
        self._pause = min(2 * self._pause or _FIRST_PAUSE_SECONDS, limit / 10)
        self._excused_until = now + self._pause
        return True

    def update_nodes(self, now: float) -> None:
        """On a node's first rank, when it is time: tell the other nodes about this one and look for their alarm."""
        if self.nodes == 1 or self.board.local_rank:
            return
        limit = self.guard.timeout
        expected = self.board.expected()
        if expected != self._told_expected or now - self._wrote > min(limit / 10, _LONGEST_SECONDS_BETWEEN_FILES):
            self._wrote, self._told_expected = now, expected
            self.tell()
        if now - self._looked > min(limit / 10, _LONGEST_SECONDS_BETWEEN_LOOKS):
            self._looked = now
            self._heard = self.directory.has(_ALARM)

    def tell(self, accounts: Sequence[Account] | None = None) -> None:
        """Write this node's statuses for the other nodes; with `accounts`, the final ones after an alarm."""
        now = time.monotonic()
        lines = [asdict(_relative(status, now)) for status in self.board.read()]
        silent = {str(each.status.rank): each.silent for each in accounts or ()}
        told = {"wall": time.time(), "final": accounts is not None, "lines": lines, "silent": silent}
        self.directory.write(_file_of(self.node), json.dumps(told))

    def others(self) -> list[tuple[int, bool, list[Account]]]:
        """Return for each other node that has written: its number, whether this is final, and its ranks."""
        found = []
        for told in self._other_nodes():
            passed = max(0.0, time.time() - told["wall"])
            lines = [RankStatus(**status) for status in told["lines"]]
            why = {each.rank: told["silent"].get(str(each.rank), "nothing on its node does") for each in lines}
            accounts = [Account(each, passed - each.beat, why[each.rank]) for each in lines]
            found.append((told["node"], bool(told["final"]), accounts))
        return found

    def publish(self, text: str) -> None:
        """Write the roll call to the run directory."""
        self.directory.write(_ROLL_CALL, text)

    def is_published(self) -> bool:
        """Return whether another node has written the roll call."""
        return self.nodes > 1 and self.directory.has(_ROLL_CALL)

    def _other_nodes(self) -> Iterator[dict[str, Any]]:
        for node in range(self.nodes if self.nodes > 1 else 0):
            if node == self.node:
                continue
            try:
                told = json.loads(self.directory.read(_file_of(node)))
                yield {**told, "node": node}
            except (ValueError, TypeError):
                continue  # not there (yet)


def _file_of(node: int) -> str:
    return f"node-{node}.json"


def _relative(status: RankStatus, now: float) -> RankStatus:
    """Return a status with times relative to `now`: other nodes have other clocks."""
    return replace(status, beat=status.beat - now, expected=status.expected - now)
