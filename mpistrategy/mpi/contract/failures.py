"""How a rank that fails after the agreement tells the others of its node: in shared memory.

Before the agreement a rank sends its error in the comparison.  After it the other ranks move data: they wait for
counters in shared memory, and look there from time to time whether a rank has failed.  A rank whose wait ends anyway
has the data that it needs; it finds out in its next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import MpiStrategyError, RemoteError
from mpistrategy.objects.text import decoded, encoded

#: How much memory each rank needs.
BYTES = 1024
_NUMBERS = 4
_TEXT_FROM = 8 * _NUMBERS
_LONGEST_TEXT = BYTES - _TEXT_FROM
_BROKEN, _ORIGIN, _WHERE, _LENGTH = range(_NUMBERS)
#: How long a rank that knows of a failure goes on waiting for the counters of the others.
PATIENCE_SECONDS = 2.0
NO_MORE_CALLS = "This strategy takes no more calls. Make another one, on all its ranks, or let the job end."


@dataclass(frozen=True)
class Failure:
    """Why a strategy takes no more calls.

    Attributes:
        error: the name and the text of the error.
        rank: which rank raised it; None where it is of no single rank.
        where: the call that raised it; "" for a program that has ended.
    """

    error: str
    rank: int | None = None
    where: str = ""

    def __str__(self) -> str:
        if self.rank is None:
            return self.error
        return f"rank {self.rank} {f'failed in {self.where}' if self.where else 'has ended'}: {self.error}"

    def as_error(self) -> RemoteError:
        """Return the error that tells the other ranks of it."""
        error = RemoteError(f"{self}. {NO_MORE_CALLS}")
        if self.rank is not None:
            error.rank, error.error = self.rank, self.error
        return error


class _Memory(Protocol):
    """The part of `mpistrategy.mpi.shared_memory.segments.SharedMemory` that is used here."""

    @property
    def local_rank(self) -> int: ...
    @property
    def fence(self) -> Callable[[], object] | None: ...
    @property
    def segments(self) -> Sequence[Array]: ...


class Failures:
    """The failures on the ranks of one node.

    Args:
        memory: `BYTES` for each rank, zeroed.
        agreements: returns the number of this rank's last agreement; the same on all ranks in one call.

    Attributes:
        agreements: as above.
        on_broken: called when this rank takes no more calls, with the reason.
        late: the error that the watchdog makes this rank raise where it waits, and the number of that agreement.
    """

    def __init__(self, memory: _Memory, agreements: Callable[[], int]) -> None:
        self.agreements = agreements
        self.on_broken: Callable[[Failure], object] = lambda reason: None
        self._rank = memory.local_rank
        self._fence = memory.fence
        self._numbers = [segment[:_TEXT_FROM].data.cast("B").cast("q") for segment in memory.segments]
        self._texts = [segment[_TEXT_FROM:BYTES].data.cast("B") for segment in memory.segments]
        self._noticed = (-1, 0.0)
        self.late: tuple[MpiStrategyError, int] | None = None
        self._is_broken = False

    def break_off(self, where: str, error: BaseException) -> None:
        """Tell the other ranks that this rank takes no more calls: how far it came with the last one is not known."""
        if not self._is_broken:
            self._break(Failure(in_words(error), self._rank, where))

    def look(self) -> None:
        """Raise RemoteError if this rank waits and another one has failed."""
        if self.late is not None and self.is_told_late:
            self.break_off("a wait for the others", self.late[0])
            raise self.late[0]
        others = [rank for rank, numbers in enumerate(self._numbers) if numbers[_BROKEN] and rank != self._rank]
        if not others:
            return
        number, since = self._noticed
        if number != self.agreements():
            self._noticed = (self.agreements(), time.monotonic())
        elif time.monotonic() - since > PATIENCE_SECONDS:
            raise self.remote_error(others[0])

    @property
    def is_told_late(self) -> bool:
        """Whether `late` was set for the present wait."""
        return self.late is not None and self.late[1] == self.agreements()

    def left_by(self) -> int | None:
        """Return the first rank that takes no more calls; None while all do."""
        return next((rank for rank, numbers in enumerate(self._numbers) if numbers[_BROKEN]), None)

    def remote_error(self, rank: int) -> MpiStrategyError:
        """Take no more calls; return the error that tells of another rank's failure."""
        failure = self.failure_of(rank)
        if not self._is_broken:
            self._break(failure)
        return failure.as_error()

    def failure_of(self, rank: int) -> Failure:
        """Return why a rank takes no more calls."""
        numbers, text = self._numbers[rank], self._texts[rank]
        first, last = numbers[_WHERE], numbers[_LENGTH]
        where, error = (decoded(part) for part in (text[:first], text[first:last]))
        return Failure(error, int(numbers[_ORIGIN]), where)

    def _break(self, failure: Failure) -> None:
        self._write(failure)
        self._numbers[self._rank][_BROKEN] = 1
        self._is_broken = True
        self.on_broken(failure)

    def _write(self, failure: Failure) -> None:
        where = encoded(failure.where, _LONGEST_TEXT // 2)
        mine, data = self._numbers[self._rank], where + encoded(failure.error, _LONGEST_TEXT - len(where))
        self._texts[self._rank][: len(data)] = data
        mine[_WHERE], mine[_LENGTH] = len(where), len(data)
        mine[_ORIGIN] = self._rank if failure.rank is None else failure.rank
        if self._fence is not None:
            self._fence()


def in_words(error: BaseException) -> str:
    """Return the name and the text of an error, as ``KeyError: 'x'``."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
