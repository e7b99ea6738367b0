"""The status of each rank of a node, in memory that all of them see: one row of `ROW` for each rank.

A rank's watchdog writes it and never calls MPI: the peers can read it when that rank hangs, is stopped, or has died.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrategy.mpi.contract.flight_recorder import LENGTH
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.objects.text import decoded, encoded

#: How far a rank has come with a late collective: it knows of it; its record and its stacks are written; the roll call
#: is printed.
WELL, ALARMED, ANSWERED, CALLED = range(4)

_NUMBER, _SECONDS = np.int64, np.float64  # of time.monotonic(), but `waited` and `limit`
#: The attributes of `RankStatus`, in their order.
STATUS = np.dtype(
    [
        *((name, _NUMBER) for name in ("rank", "process", "state")),
        *((name, _SECONDS) for name in ("beat", "expected", "waited", "limit")),
        ("signal", _NUMBER),
        ("text", "S900"),
    ],
    align=True,
)
ROW = np.dtype(
    [
        ("mark", "S16"),
        ("ranks", _NUMBER),  # of the node, as many as there are rows
        ("sequence", _NUMBER),  # odd while `status` or `calls` are written
        ("status", STATUS),
        ("strategy", _NUMBER),  # see `LastCalls`
        ("size", _NUMBER),
        ("calls", np.dtype([("number", _NUMBER), ("entered", _NUMBER)]), LENGTH),
        ("elsewhere", _SECONDS),  # until when another node is busy
        ("left", _NUMBER),  # whether some rank takes no more calls
        ("caller", _NUMBER),  # whether this node calls the roll
        ("record", "S47000"),
    ],
    align=True,
)
#: What a row takes in the memory of a node.
BYTES = 52 * 1024
MARK = b"mpistrategy rank"
_LONGEST_TEXT = STATUS["text"].itemsize
_LONGEST_RECORD = ROW["record"].itemsize
_CUT = b"\n... (cut)\n"


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


class StatusBoard:
    """The statuses of the ranks of one node.

    Args:
        memory: `BYTES` for each rank, zeroed; only this rank's where it is not shared.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.local_rank: int = memory.local_rank
        self.count: int = len(memory.segments)
        self._fence = memory.fence
        self._rows: list[Any] = [segment[: ROW.itemsize].view(ROW)[0] for segment in memory.segments]
        self._mine = self._rows[self.local_rank]

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """Yield this rank's row; who reads its `status` or `calls` meanwhile reads again."""
        self._mine["sequence"] += 1
        self._order()
        yield self._mine
        self._order()
        self._mine["sequence"] += 1

    def write(self, status: RankStatus) -> None:
        """Replace this rank's status; its state only ever rises."""
        *numbers, text = vars(status).values()
        with self._writing() as row:
            state = max(int(row["status"]["state"]), status.state)
            row["mark"], row["ranks"] = MARK, self.count
            row["status"] = (*numbers, encoded(text, _LONGEST_TEXT))
            row["status"]["state"] = state

    def write_calls(self, calls: LastCalls) -> None:
        """Say when this rank entered its last collectives; of many, the last ones."""
        pairs = list(calls.entered.items())[-LENGTH:]
        with self._writing() as row:
            row["strategy"], row["size"] = calls.strategy, calls.ranks
            row["calls"][: len(pairs)] = pairs

    def calls(self) -> list[LastCalls]:
        """Return the last collectives of the node's ranks, by local rank."""
        found = [dict(self._whole(row, "calls").tolist()) for row in self._rows]
        for entered in found:
            entered.pop(0, None)  # of places that no call has taken yet
        return [
            LastCalls(int(row["strategy"]), int(row["size"]), entered)
            for row, entered in zip(self._rows, found, strict=True)
        ]

    def expect(self, until: float) -> None:
        """Say at once until when this rank is busy."""
        self._mine["status"]["expected"] = until

    def set_state(self, state: int) -> None:
        """Say at once how far this rank has come."""
        self._order()
        self._mine["status"]["state"] = state

    def state(self) -> int:
        """Return the highest state of the node's ranks."""
        return max(int(row["status"]["state"]) for row in self._rows)

    def expected(self) -> float:
        """Return until when some rank of the node is busy; seconds of time.monotonic()."""
        return max(float(row["status"]["expected"]) for row in self._rows)

    def expect_elsewhere(self, until: float) -> None:
        """Say until when another node is busy."""
        self._mine["elsewhere"] = until

    def expected_elsewhere(self) -> float:
        """Return until when another node is busy, as far as this one knows; seconds of time.monotonic()."""
        return max(float(row["elsewhere"]) for row in self._rows)

    def note_left(self) -> None:
        """Say that some rank, of any node, takes no more calls, and that the others may wait for it."""
        self._mine["left"] = 1

    def has_left(self) -> bool:
        """Return whether some rank of the node has said so."""
        return any(row["left"] for row in self._rows)

    def note_caller(self) -> None:
        """Say that this node calls the roll."""
        self._mine["caller"] = 1

    def is_caller(self) -> bool:
        """Return whether some rank of the node has said so."""
        return any(row["caller"] for row in self._rows)

    def write_record(self, text: str) -> None:
        """Show the node this rank's record; of a long one its beginning and its end."""
        self._mine["record"] = shortened(encoded(text), _LONGEST_RECORD)

    def records(self, longest: int = _LONGEST_RECORD) -> dict[int, str]:
        """Return the records that the node's ranks have written, by their numbers in the job; each of so many bytes."""
        told = {int(row["status"]["rank"]): bytes(row["record"]) for row in self._rows}
        return {rank: decoded(shortened(record, longest)) for rank, record in told.items() if record}

    def read(self) -> list[RankStatus]:
        """Return all statuses, by local rank; one that is being written all the time may be mixed."""
        return [_status(self._whole(row, "status")) for row in self._rows]

    def _whole(self, row: Any, name: str) -> Any:
        """Return a copy of what `_writing` protects."""
        for _ in range(100):
            before = int(row["sequence"])
            self._order()
            found = row[name].copy()
            self._order()
            if before == row["sequence"] and not before & 1:
                break
        return found

    def _order(self) -> None:
        if self._fence is not None:
            self._fence()


def _status(found: Any) -> RankStatus:
    told = dict(zip(STATUS.names or (), found.item(), strict=True))
    return RankStatus(**{**told, "text": decoded(told["text"])})


def shortened(data: bytes, most: int) -> bytes:
    """Return a text of at most so many bytes: of a longer one its beginning and its end."""
    if len(data) <= most:
        return data
    half = (most - len(_CUT)) // 2
    return data[:half] + _CUT + data[-half:]
