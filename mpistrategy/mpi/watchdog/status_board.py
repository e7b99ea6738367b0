"""The status of each rank of a node, in memory that all of them see: one row of `ROW` for each rank.

A rank's watchdog writes it and never calls MPI: the peers can read it when that rank hangs, is stopped, or has died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.contract.flight_recorder import LENGTH
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.objects.text import decoded, encoded

#: How far a rank has come with a late collective: it knows of it; its record and its stacks are written; the roll call
#: is printed.
WELL, ALARMED, ANSWERED, CALLED = range(4)

_NUMBER, _SECONDS = np.int64, np.float64  # of time.monotonic(), but `waited` and `limit`
#: What a rank says of itself at a time: attributes of `RankStatus`.
STATUS = np.dtype(
    [
        *((name, _NUMBER) for name in ("rank", "process", "signal")),
        *((name, _SECONDS) for name in ("beat", "waited", "limit")),
        ("text", "S900"),
    ],
    align=True,
)
ROW = np.dtype(
    [
        ("mark", "S16"),
        ("ranks", _NUMBER),  # of the node, as many as there are rows
        ("strategy", _NUMBER),  # see `LastCalls`, as for `size`
        ("size", _NUMBER),
        ("sequence", _NUMBER),  # odd while `status` is written
        ("status", STATUS),
        ("state", _NUMBER),  # WELL, ALARMED, ANSWERED or CALLED
        ("expected", _SECONDS),  # until when this rank is busy, as it said
        ("elsewhere", _SECONDS),  # until when another node is busy
        ("looked", _SECONDS),  # when this rank has looked for that
        ("left", _NUMBER),  # whether some rank takes no more calls
        ("caller", _NUMBER),  # whether this node calls the roll
        ("before", _NUMBER, LENGTH),  # see `FlightRecord`, as for `entered` and `after`
        ("entered", _SECONDS, LENGTH),
        ("after", _NUMBER, LENGTH),
        ("record", "S45000"),
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
        signal: the signal that makes the process print its stacks; 0 without one.
        beat: when this was written; seconds of time.monotonic().
        waited: how long it had waited in a collective, in seconds; 0 when it was in none.
        limit: the timeout of that collective, in seconds.
        text: where it was.
        state: WELL, ALARMED, ANSWERED or CALLED.
        silent: why it has not answered an alarm; "" where it has, or there is none.
    """

    rank: int
    process: int
    signal: int
    beat: float
    waited: float
    limit: float
    text: str
    state: int = WELL
    silent: str = ""


@dataclass(frozen=True)
class LastCalls:
    """When a rank came to its last collectives of one strategy.

    Attributes:
        strategy: a number for that strategy; 0 for none.
        ranks: how many ranks it has.
        entered: when the rank entered them, in seconds of time.monotonic(), by their numbers; in order.
    """

    strategy: int = 0
    ranks: int = 0
    entered: Mapping[int, float] = field(default_factory=dict)


class StatusBoard:
    """The statuses of the ranks of one node.

    Args:
        memory: `BYTES` for each rank, zeroed; only this rank's where it is not shared.

    Attributes:
        entries: memory for the `FlightRecord` of this rank, as `FlightRecord.show_in` takes it.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.local_rank: int = memory.local_rank
        self.count: int = len(memory.segments)
        self._fence = memory.fence
        self._rows: list[Any] = [segment[: ROW.itemsize].view(ROW)[0] for segment in memory.segments]
        self._mine = self._rows[self.local_rank]
        mine = memory.mine[: ROW.itemsize].view(ROW)
        self.entries: tuple[Array, Array, Array] = (mine["before"][0], mine["entered"][0], mine["after"][0])

    def introduce(self, strategy: int, ranks: int) -> None:
        """Say which strategy this is, and how many ranks it has."""
        self._mine["strategy"], self._mine["size"] = strategy, ranks
        self._mine["ranks"], self._mine["mark"] = self.count, MARK

    def write(self, status: RankStatus) -> None:
        """Replace this rank's status, but for `state` and `silent`."""
        values = [getattr(status, name) for name in STATUS.names or ()]
        self._mine["sequence"] += 1
        self._order()
        self._mine["status"] = (*values[:-1], encoded(status.text, _LONGEST_TEXT))
        self._order()
        self._mine["sequence"] += 1

    def put(self, name: str, value: float) -> None:
        """Say at once one thing: `state`, `expected`, `elsewhere`, `looked`, `left` or `caller` of `ROW`."""
        self._order()
        self._mine[name] = value

    def most(self, name: str) -> float:
        """Return the highest value that a rank of the node has put there."""
        return max(float(row[name]) for row in self._rows)

    def calls(self) -> list[LastCalls]:
        """Return the last collectives of the node's ranks, by local rank."""
        return [LastCalls(int(row["strategy"]), int(row["size"]), self._entered(row)) for row in self._rows]

    def write_record(self, text: str) -> None:
        """Show the node this rank's record; of a long one its beginning and its end."""
        self._mine["record"] = shortened(encoded(text), _LONGEST_RECORD)

    def records(self, longest: int = _LONGEST_RECORD) -> dict[int, str]:
        """Return the records that the node's ranks have written, by their numbers in the job; each of so many bytes."""
        told = {int(row["status"]["rank"]): bytes(row["record"]) for row in self._rows}
        return {rank: decoded(shortened(record, longest)) for rank, record in told.items() if record}

    def read(self) -> list[RankStatus]:
        """Return all statuses, by local rank; one that is being written all the time may be mixed."""
        return [self._status(row) for row in self._rows]

    def _status(self, row: Any) -> RankStatus:
        for _ in range(100):
            before = int(row["sequence"])
            self._order()
            *values, text = row["status"].item()
            self._order()
            if before == row["sequence"] and not before & 1:
                break
        values += decoded(text), int(row["state"])
        return RankStatus(*values)

    def _entered(self, row: Any) -> dict[int, float]:
        """Return when a rank entered its last calls; one that is being written now is left out."""
        after = row["after"].tolist()
        self._order()
        times = row["entered"].tolist()
        self._order()
        entries = zip(after, times, row["before"].tolist(), strict=True)
        return {number: at for number, at, before in sorted(entries) if number == before > 0}

    def _order(self) -> None:
        if self._fence is not None:
            self._fence()


def shortened(data: bytes, most: int) -> bytes:
    """Return a text of at most so many bytes: of a longer one its beginning and its end."""
    if len(data) <= most:
        return data
    half = (most - len(_CUT)) // 2
    return data[:half] + _CUT + data[-half:]
