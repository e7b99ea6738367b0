"""Why a strategy takes no more calls, and how the ranks of one node show it to each other: in shared memory.

A rank that fails before the ranks have agreed on a call sends its error in place of the call.  Afterwards the other
ranks move data, and cannot be sent anything: where they wait, they look at these numbers from time to time.  A rank
whose wait ends anyway has the data that it needs; it finds out in its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import RemoteError
from mpistrategy.objects.text import decoded, encoded

#: How much memory each rank needs.
BYTES = 1024
_NUMBERS = 4
_TEXT_FROM = 8 * _NUMBERS
_LONGEST_TEXT = BYTES - _TEXT_FROM
_BROKEN, _ORIGIN, _WHERE, _LENGTH = range(_NUMBERS)
#: How long ranks wait for each other where one of them has failed.
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


class Failures:
    """The failures on the ranks of one node.

    Args:
        segments: `BYTES` of each rank, zeroed.
        local_rank: this rank.
        fence: keeps writes in order; None where the processor does that itself.
    """

    def __init__(self, segments: Sequence[Array], local_rank: int, fence: Callable[[], object] | None) -> None:
        self._rank, self._fence = local_rank, fence
        self._numbers = [segment[:_TEXT_FROM].data.cast("B").cast("q") for segment in segments]
        self._texts = [segment[_TEXT_FROM:BYTES].data.cast("B") for segment in segments]

    def show(self, failure: Failure) -> None:
        """Tell the other ranks that this rank takes no more calls."""
        where = encoded(failure.where, _LONGEST_TEXT // 2)
        mine, data = self._numbers[self._rank], where + encoded(failure.error, _LONGEST_TEXT - len(where))
        self._texts[self._rank][: len(data)] = data
        mine[_WHERE], mine[_LENGTH] = len(where), len(data)
        mine[_ORIGIN] = self._rank if failure.rank is None else failure.rank
        if self._fence is not None:
            self._fence()
        mine[_BROKEN] = 1

    def left_by(self) -> int | None:
        """Return the first rank that takes no more calls; None while all do."""
        return next((rank for rank, numbers in enumerate(self._numbers) if numbers[_BROKEN]), None)

    def failure_of(self, rank: int) -> Failure:
        """Return why a rank takes no more calls."""
        numbers, text = self._numbers[rank], self._texts[rank]
        first, last = numbers[_WHERE], numbers[_LENGTH]
        where, error = (decoded(part) for part in (text[:first], text[first:last]))
        return Failure(error, int(numbers[_ORIGIN]), where)


def in_words(error: BaseException) -> str:
    """Return the name and the text of an error, as ``KeyError: 'x'``."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
