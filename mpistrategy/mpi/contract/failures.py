"""Why a strategy takes no more calls.

A rank that fails before the ranks have agreed on a call sends its error in place of the call.  Afterwards the other
ranks move data, and cannot be sent anything: their watchdogs see on the board of the node, or in the run directory,
that a rank has failed, and end their waits.  A rank whose wait ends anyway has the data that it needs; it finds out in
its next call.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpistrategy.errors import RemoteError

#: How long ranks wait for each other where a rank has failed.
PATIENCE_SECONDS = 2.0
NO_MORE_CALLS = "This strategy takes no more calls. Make another one, on all its ranks, or let the job end."


@dataclass(frozen=True)
class Failure:
    """Why a strategy takes no more calls.

    Attributes:
        error: the name and the text of the error.
        rank: which rank raised it.
        where: the call that raised it; "" for a program that has ended.
    """

    error: str
    rank: int
    where: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} {f'failed in {self.where}' if self.where else 'has ended'}: {self.error}"

    def as_error(self) -> RemoteError:
        """Return the error for the other ranks."""
        error = RemoteError(f"{self}. {NO_MORE_CALLS}")
        error.rank, error.error = self.rank, self.error
        return error


def in_words(error: BaseException) -> str:
    """Return the name and the text of an error, as ``KeyError: 'x'``."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
