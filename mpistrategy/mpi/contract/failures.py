"""Why a strategy takes no more calls, and how the ranks of one node show it to each other: in shared memory.

A rank that fails before the ranks have agreed on a call sends its error in place of the call.  Afterwards the other
ranks move data, and cannot be sent anything: where they wait, they look at these numbers from time to time.  A rank
whose wait ends anyway has the data that it needs; it finds out in its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import RemoteError
from mpistrategy.objects.text import decoded, encoded

#: What each rank shows; `origin` is the rank that has failed.
_SHOWN = np.dtype([("broken", np.int64), ("origin", np.int64), ("where", "S400"), ("error", "S608")])
_NONE = np.zeros(1, _SHOWN)[0]
#: How much memory each rank needs.
BYTES = _SHOWN.itemsize
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


class Failures:
    """The failures on the ranks of one node.

    Args:
        segments: `BYTES` of each rank, zeroed.
        local_rank: this rank.
        fence: keeps writes in order.
    """

    def __init__(self, segments: Sequence[Array], local_rank: int, fence: Callable[[], object]) -> None:
        self._rank, self._fence = local_rank, fence
        self._shown = [segment[:BYTES].view(_SHOWN)[0] for segment in segments]

    def show(self, failure: Failure) -> None:
        """Tell the other ranks that this rank takes no more calls."""
        row = self._shown[self._rank]
        row["where"], row["error"], row["origin"] = (
            encoded(failure.where, 400),
            encoded(failure.error, 608),
            failure.rank,
        )
        self._fence()
        row["broken"] = 1

    def first(self) -> Failure | None:
        """Return why the first rank that takes no more calls does so; None while all ranks take calls."""
        broken, origin, where, error = next((row for row in self._shown if row["broken"]), _NONE).item()
        return Failure(decoded(error), origin, decoded(where)) if broken else None


def in_words(error: BaseException) -> str:
    """Return the name and the text of an error, as ``KeyError: 'x'``."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
