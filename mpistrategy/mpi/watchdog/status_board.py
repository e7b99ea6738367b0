"""The status of each rank of a node, in memory that all of them see.

A rank's watchdog writes it and never calls MPI: the peers can read it when that rank hangs, is stopped, or has died.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpistrategy.errors import RankCall
from mpistrategy.mpi.shared_memory.segments import SharedMemory

BYTES = 1024
_NUMBERS = 16
_TEXT_FROM = 8 * _NUMBERS
_LONGEST_TEXT = BYTES - _TEXT_FROM

#: How far a rank has come with a late collective: it knows of it; its record and its stacks are written; the roll call
#: is printed.
WELL, ALARMED, ANSWERED, CALLED = range(4)

_STATE, _RANK, _PROCESS, _BEAT, _EXPECTED, _WAITED, _LIMIT, _SIGNAL, _VERSION, _LENGTH, _STRATEGY, _WHOLE = range(12)


@dataclass(frozen=True)
class RankStatus:
    """One rank, as its watchdog last saw it.

    Attributes:
        rank: its number in the job.
        process: its process id; 0 while it has no watchdog yet.
        state: WELL, ALARMED, ANSWERED or CALLED.
        beat: when this was written; seconds of time.monotonic().
        expected: until when it is busy, as it said (`expect_long`); seconds of time.monotonic(), or 0.
        waited: how long it had waited in a collective, in seconds; 0 when it was in none.
        limit: the timeout of that collective, in seconds.
        signal: the signal that makes the process print its stacks; 0 without one.
        text: where it was.
        strategy: a number for the strategy in which it waited; 0 for none.
        has_all_ranks: whether that strategy has all ranks of the job.
    """

    rank: int
    process: int
    state: int
    beat: float
    expected: float
    waited: float
    limit: float
    signal: int
    text: str
    strategy: int = 0
    has_all_ranks: bool = False


def call_in(text: str) -> RankCall:
    """Return the call of a status such as ``in #7 Strategy.reduce SUM float64[3] (24 B) for 2 s; at train.py:12``.

    A text of no collective becomes `left`.
    """
    call = re.match(r"in #\d+ (\S+)(?: ([A-Z]+)\b)?", text)
    if call is None:
        return RankCall(left=text)
    return RankCall(call=call[1], op=call[2] or "", site=text.rpartition(" at ")[2] if " at " in text else "")


class StatusBoard:
    """The statuses of the ranks of one node.

    Args:
        memory: `BYTES` for each rank, zeroed; only this rank's where it is not shared.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.local_rank: int = memory.local_rank
        self.count: int = len(memory.segments)
        self._fence = memory.fence
        self._numbers = [segment[:_TEXT_FROM].data.cast("B").cast("q") for segment in memory.segments]
        self._texts = [segment[_TEXT_FROM:BYTES].data.cast("B") for segment in memory.segments]
        self._mine = self._numbers[self.local_rank]

    def write(self, status: RankStatus) -> None:
        """Replace this rank's status; its state only ever rises."""
        mine, text = self._mine, status.text.encode()[:_LONGEST_TEXT]
        mine[_VERSION] += 1  # odd: being written
        self._order()
        mine[_RANK], mine[_PROCESS], mine[_SIGNAL] = status.rank, status.process, status.signal
        mine[_BEAT], mine[_EXPECTED] = _to_ns(status.beat), _to_ns(status.expected)
        mine[_WAITED], mine[_LIMIT] = _to_ns(status.waited), _to_ns(status.limit)
        mine[_LENGTH], mine[_STRATEGY], mine[_WHOLE] = len(text), status.strategy, status.has_all_ranks
        self._texts[self.local_rank][: len(text)] = text
        mine[_STATE] = max(mine[_STATE], status.state)
        self._order()
        mine[_VERSION] += 1

    def expect(self, until: float) -> None:
        """Say at once until when this rank is busy."""
        self._mine[_EXPECTED] = _to_ns(until)

    def set_state(self, state: int) -> None:
        """Say at once how far this rank has come."""
        self._order()
        self._mine[_STATE] = state

    def state(self) -> int:
        """Return the highest state of the node's ranks."""
        return max(numbers[_STATE] for numbers in self._numbers)

    def expected(self) -> float:
        """Return until when some rank of the node is busy; seconds of time.monotonic()."""
        return max(numbers[_EXPECTED] for numbers in self._numbers) / 1e9

    def read(self) -> list[RankStatus]:
        """Return all statuses, by local rank; one that is being written all the time may be mixed."""
        return [self._read(local) for local in range(self.count)]

    def _read(self, local: int) -> RankStatus:
        numbers = self._numbers[local]
        for _ in range(100):
            before = numbers[_VERSION]
            self._order()
            found = list(numbers)
            text = bytes(self._texts[local][: max(0, min(found[_LENGTH], _LONGEST_TEXT))]).decode(errors="replace")
            self._order()
            if before == numbers[_VERSION] and not before & 1:
                break
        return RankStatus(
            found[_RANK],
            found[_PROCESS],
            found[_STATE],
            found[_BEAT] / 1e9,
            found[_EXPECTED] / 1e9,
            found[_WAITED] / 1e9,
            found[_LIMIT] / 1e9,
            found[_SIGNAL],
            text,
            found[_STRATEGY],
            bool(found[_WHOLE]),
        )

    def _order(self) -> None:
        if self._fence is not None:
            self._fence()


def _to_ns(seconds: float) -> int:
    return int(min(seconds, 2.0**32) * 1e9)
