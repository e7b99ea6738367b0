"""The status of each rank of a node, in memory that all these ranks see: one row of `ROW` for each rank.

A rank's watchdog writes it and never calls MPI: the peers can read it when that rank hangs, is stopped, or has died.
A text that is read while it is written may be mixed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrategy.mpi.contract.flight_recorder import LENGTH, FlightRecord
from mpistrategy.mpi.contract.guard import Failure
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.objects.text import decoded, encoded

#: How far a rank has come with a late collective: its record and its stacks are written; the roll call is printed.
ANSWERED, CALLED = 1, 2

_NUMBER, _SECONDS = "i8", "f8"  # of time.monotonic(), but `waited` and `limit`
#: The numbers in a rank's status, in the order of the attributes of `RankStatus`.
_OWN_FIELDS = {
    **dict.fromkeys(("rank", "process", "signal"), _NUMBER),
    **dict.fromkeys(("beat", "waited", "limit"), _SECONDS),
}
ROW = np.dtype(
    [
        ("mark", "S16"),
        ("ranks", _NUMBER),  # of the node, as many as there are rows
        ("strategy", _NUMBER),  # a number that only this strategy has, equal on its ranks; or 0
        ("size", _NUMBER),  # how many ranks the strategy has
        *_OWN_FIELDS.items(),
        ("text", "S900"),
        ("expected", _SECONDS),  # until when this rank is busy, as it said
        ("state", _NUMBER),  # 0, ANSWERED or CALLED: an alarm for the other ranks
        ("origin", _NUMBER),  # why this rank takes no more calls: the fields of a `Failure`
        ("where", "S400"),
        ("error", "S600"),
        ("failed", _NUMBER),  # 1 once they are written
        ("before", _NUMBER, LENGTH),  # see `FlightRecord`, as for `times` and `after`
        ("times", _SECONDS, LENGTH),
        ("after", _NUMBER, LENGTH),
        ("record", "S45000"),
    ],
    align=True,
)
#: What a row takes in the memory of a node.
BYTES = 52 * 1024
MARK = b"mpistrategy rank"


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
        state: 0, ANSWERED or CALLED.
        calls: when it entered its last collectives, in seconds of time.monotonic(), by their numbers; in order.
        record: its stacks and its last collectives in words; "" before it has written them.
        silent: why it has not answered an alarm; "" where it has answered, or there is no alarm.
        host: the name of its node; "" if unknown.
    """

    rank: int
    process: int
    signal: int
    beat: float
    waited: float
    limit: float
    text: str
    state: int = 0
    calls: Mapping[int, float] = field(default_factory=dict)
    record: str = ""
    silent: str = ""
    host: str = ""

    @property
    def age(self) -> float:
        """How long ago this was written, in seconds."""
        return max(0.0, time.monotonic() - self.beat)


class StatusBoard:
    """The statuses of the ranks of one node.

    Args:
        memory: `BYTES` for each rank, zeroed; only this rank's where it is not shared.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.local_rank: int = memory.local_rank
        self._fence = memory.fence
        self._rows: list[Any] = [segment[: ROW.itemsize].view(ROW)[0] for segment in memory.segments]
        self._own_row = self._rows[self.local_rank]

    def introduce(self, strategy: int, ranks: int, record: FlightRecord) -> None:
        """Say which strategy this is, and how many ranks it has; keep its calls here from the first one on."""
        row = self._own_row
        row["strategy"], row["size"], row["ranks"], row["mark"] = strategy, ranks, len(self._rows), MARK
        record.show_in(row["before"], row["times"], row["after"])

    def write(self, status: RankStatus) -> None:
        """Replace this rank's status, from its rank to its text."""
        for name in (*_OWN_FIELDS, "text"):
            self.put(name, getattr(status, name))

    def put(self, name: str, value: float | str) -> None:
        """Write a field of `ROW` after all earlier writes; the end of a very long text is cut."""
        self._fence()
        self._own_row[name] = encoded(value, ROW[name].itemsize) if isinstance(value, str) else value

    def show_failure(self, failure: Failure) -> None:
        """Say that this rank takes no more calls."""
        self.put("origin", failure.rank)
        self.put("where", failure.where)
        self.put("error", failure.error)
        self.put("failed", 1)

    def failure(self) -> Failure | None:
        """Return why the first rank of the node that takes no more calls does so; None while all take calls."""
        for row in self._rows:
            if row["failed"]:
                return Failure(decoded(bytes(row["error"])), int(row["origin"]), decoded(bytes(row["where"])))
        return None

    def all(self, name: str) -> list[float]:
        """Return one number of each rank of the node."""
        return [float(row[name]) for row in self._rows]

    def read(self) -> list[RankStatus]:
        """Return all statuses, by local rank."""
        return [_status_in(row) for row in self._rows]


def _status_in(row: Any) -> RankStatus:
    text, record = (decoded(bytes(row[name])) for name in ("text", "record"))
    # Read in the reverse of the order in which they are written; an entry that is being written is left out.
    entries = zip(*(row[name].tolist() for name in ("after", "times", "before")), strict=True)
    calls = {number: at for number, at, before in sorted(entries) if number == before > 0}
    numbers: list[Any] = [row[name].item() for name in _OWN_FIELDS]
    return RankStatus(*[*numbers, text, int(row["state"]), calls, record])
