"""The status of each rank of a node, in memory that all of them see.

A rank's watchdog writes it and never calls MPI: the peers can read it when that rank hangs, is stopped, or has died.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import RankCall
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.objects.text import decoded, encoded

#: What the status of a rank takes; with when it came to its last calls; and with the record it writes after an alarm.
STATUS_BYTES = 1024
SEEN_BYTES = STATUS_BYTES + 4160
BYTES = 52 * 1024
_NUMBERS = 15
_TEXT_FROM = 8 * _NUMBERS
_LONGEST_TEXT = STATUS_BYTES - _TEXT_FROM
_LONGEST_RECORD = BYTES - SEEN_BYTES
#: Before the last calls, of two numbers each.
_CALLS_HEAD = 8
_MOST_CALLS = (SEEN_BYTES - STATUS_BYTES) // 8 // 2 - _CALLS_HEAD // 2
_CUT = b"\n... (cut)\n"

#: How far a rank has come with a late collective: it knows of it; its record and its stacks are written; the roll call
#: is printed.
WELL, ALARMED, ANSWERED, CALLED = range(4)

_STATE, _RANK, _PROCESS, _BEAT, _EXPECTED, _WAITED, _LIMIT, _SIGNAL, _VERSION, _LENGTH = range(10)
#: What the ranks of a node ask the one that reads the other nodes' files, and its answer; the length of the record;
#: whether some rank takes no more calls.
_ASKED, _LOOKED, _EXCUSED, _RECORD, _LEFT = range(10, 15)


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


@dataclass(frozen=True)
class LastCalls:
    """When a rank came to its last collectives of one strategy.

    Attributes:
        strategy: a number for that strategy; 0 for none.
        ranks: how many ranks it has.
        entered: when the rank entered them, in nanoseconds of time.monotonic(), by their numbers; in order.
    """

    strategy: int = 0
    ranks: int = 0
    entered: Mapping[int, int] = field(default_factory=dict)


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
        memory: `BYTES` for each rank, zeroed; only this rank's where it is not shared.  `STATUS_BYTES` are enough to
            read statuses, `SEEN_BYTES` for the last calls, too.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.local_rank: int = memory.local_rank
        self.count: int = len(memory.segments)
        self._fence = memory.fence
        self._numbers = [segment[:_TEXT_FROM].data.cast("B").cast("q") for segment in memory.segments]
        self._texts = [segment[_TEXT_FROM:STATUS_BYTES].data.cast("B") for segment in memory.segments]
        self._calls = [segment[STATUS_BYTES:SEEN_BYTES].view(np.int64) for segment in memory.segments]
        self._records = [segment[SEEN_BYTES:BYTES] for segment in memory.segments]
        self._mine = self._numbers[self.local_rank]

    def write(self, status: RankStatus) -> None:
        """Replace this rank's status; its state only ever rises."""
        mine, text = self._mine, encoded(status.text, _LONGEST_TEXT)
        mine[_VERSION] += 1  # odd: being written
        self._order()
        mine[_RANK], mine[_PROCESS], mine[_SIGNAL] = status.rank, status.process, status.signal
        mine[_BEAT], mine[_EXPECTED] = _to_ns(status.beat), _to_ns(status.expected)
        mine[_WAITED], mine[_LIMIT] = _to_ns(status.waited), _to_ns(status.limit)
        mine[_LENGTH] = len(text)
        self._texts[self.local_rank][: len(text)] = text
        mine[_STATE] = max(mine[_STATE], status.state)
        self._order()
        mine[_VERSION] += 1

    def write_calls(self, calls: LastCalls) -> None:
        """Say when this rank entered its last collectives; of many, the last ones."""
        mine, pairs = self._calls[self.local_rank], list(calls.entered.items())[-_MOST_CALLS:]
        mine[0] += 1  # odd: being written
        self._order()
        mine[1:4] = calls.strategy, calls.ranks, len(pairs)
        mine[_CALLS_HEAD : _CALLS_HEAD + 2 * len(pairs)] = np.array(pairs, np.int64).reshape(-1)
        self._order()
        mine[0] += 1

    def calls(self) -> list[LastCalls]:
        """Return the last collectives of the node's ranks, by local rank; none where they are being written."""
        return [self._calls_of(numbers) for numbers in self._calls]

    def _calls_of(self, numbers: Array) -> LastCalls:
        for _ in range(100):
            before = int(numbers[0])
            self._order()
            found = numbers.tolist()
            self._order()
            if before == numbers[0] and not before & 1:
                pairs = found[_CALLS_HEAD : _CALLS_HEAD + 2 * max(0, min(found[3], _MOST_CALLS))]
                return LastCalls(found[1], found[2], dict(zip(pairs[::2], pairs[1::2], strict=True)))
        return LastCalls()

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

    def note_left(self) -> None:
        """Say that some rank, of any node, takes no more calls, and that the others may wait for it."""
        self._mine[_LEFT] = 1

    def has_left(self) -> bool:
        """Return whether some rank of the node has said so."""
        return any(numbers[_LEFT] for numbers in self._numbers)

    def ask(self, since: float) -> None:
        """Ask whether another node is busy, as a rank that has been late since then; 0 takes the question back."""
        self._mine[_ASKED] = _to_ns(since)

    def asked(self) -> bool:
        """Return whether some rank of the node asks."""
        return any(numbers[_ASKED] for numbers in self._numbers)

    def answer(self, looked: float, excused: float) -> None:
        """Say when this rank has looked at what the other nodes say, and until when one of them is known to be busy."""
        self._mine[_EXCUSED] = _to_ns(excused)
        self._order()
        self._mine[_LOOKED] = _to_ns(looked)

    def answered(self) -> tuple[float, float]:
        """Return the latest of what the node's ranks have said by `answer`; seconds of time.monotonic()."""
        looked = max(numbers[_LOOKED] for numbers in self._numbers)
        self._order()
        return looked / 1e9, max(numbers[_EXCUSED] for numbers in self._numbers) / 1e9

    def reader(self, oldest: float) -> int:
        """Return the local rank that reads files for its node: the first whose watchdog has written since `oldest`."""
        beats = (numbers[_BEAT] / 1e9 for numbers in self._numbers)
        return next((local for local, beat in enumerate(beats) if beat >= oldest), self.local_rank)

    def write_record(self, text: str) -> None:
        """Show the node this rank's record; of a long one its beginning and its end."""
        data = shortened(encoded(text), _LONGEST_RECORD)
        self._records[self.local_rank][: len(data)] = np.frombuffer(data, np.uint8)
        self._order()
        self._mine[_RECORD] = len(data)

    def records(self, longest: int = _LONGEST_RECORD) -> dict[int, str]:
        """Return the records that the node's ranks have written, by their numbers in the job; each of so many bytes."""
        lengths = [max(0, min(numbers[_RECORD], _LONGEST_RECORD)) for numbers in self._numbers]
        self._order()
        return {
            int(numbers[_RANK]): decoded(shortened(record[:length].tobytes(), longest))
            for numbers, record, length in zip(self._numbers, self._records, lengths, strict=True)
            if length
        }

    def read(self) -> list[RankStatus]:
        """Return all statuses, by local rank; one that is being written all the time may be mixed."""
        return [self._read(local) for local in range(self.count)]

    def _read(self, local: int) -> RankStatus:
        numbers = self._numbers[local]
        for _ in range(100):
            before = numbers[_VERSION]
            self._order()
            found = list(numbers)
            text = decoded(self._texts[local][: max(0, min(found[_LENGTH], _LONGEST_TEXT))])
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
        )

    def _order(self) -> None:
        if self._fence is not None:
            self._fence()


def shortened(data: bytes, most: int) -> bytes:
    """Return a text of at most so many bytes: of a longer one its beginning and its end."""
    if len(data) <= most:
        return data
    half = (most - len(_CUT)) // 2
    return data[:half] + _CUT + data[-half:]


def _to_ns(seconds: float) -> int:
    return int(min(seconds, 2.0**32) * 1e9)
