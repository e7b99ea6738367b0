"""How a rank that fails after the ranks have agreed on a call tells the others of its node: in memory that all see.

Before the agreement a rank takes part in the comparison with its error.  After it the peers are on their way through
the data: they wait for numbers in shared memory, and there they look, now and then, whether some rank has failed.  A
wait that comes to its end in spite of that goes on: the failure came after what the waiting rank needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import MpiStrategyError, RemoteError

#: What each rank's line takes.
BYTES = 1024
_NUMBERS = 4
_TEXT_FROM = 8 * _NUMBERS
_LONGEST_TEXT = BYTES - _TEXT_FROM
_FAILED, _BROKEN, _ORIGIN, _LENGTH = range(_NUMBERS)
#: How long a rank that knows of a failure goes on waiting for the numbers of the others.
PATIENCE_SECONDS = 2.0
NO_MORE_CALLS = "This strategy takes no more calls. Make another one, on all its ranks, or let the job end."


class _Memory(Protocol):
    """What is used of `mpistrategy.mpi.shared_memory.segments.SharedMemory`."""

    @property
    def local_rank(self) -> int: ...
    @property
    def fence(self) -> Callable[[], object] | None: ...
    @property
    def segments(self) -> Sequence[Array]: ...


class Failures:
    """What has failed on the ranks of one node.

    Args:
        memory: `BYTES` for each rank, zeroed.
        agreements: returns the number of the agreement that this rank has come to; the same on all ranks in one call.

    Attributes:
        agreements: as above.
        on_broken: called with the reason when this rank takes no more calls.
        agreed_at: the number of the first agreement of the public call that this rank is in; None before it.
        late: what this rank raises where it waits, since somebody else has found out that it waits for nothing; and
            the number of that agreement.
    """

    def __init__(self, memory: _Memory, agreements: Callable[[], int]) -> None:
        self.agreements = agreements
        self.on_broken: Callable[[str], object] = lambda reason: None
        self._rank = memory.local_rank
        self._fence = memory.fence
        self._numbers = [segment[:_TEXT_FROM].data.cast("B").cast("q") for segment in memory.segments]
        self._texts = [segment[_TEXT_FROM:BYTES].data.cast("B") for segment in memory.segments]
        self._noticed = (-1, 0.0)
        self.agreed_at: int | None = None
        self.late: tuple[MpiStrategyError, int] | None = None
        self._is_broken = False

    def agree(self) -> None:
        """Say that all ranks have agreed on the call that this one is in."""
        if self.agreed_at is None:
            self.agreed_at = self.agreements()

    def tell(self, where: str, error: BaseException) -> None:
        """Tell the peers that wait for what this rank should bring in a call that all have agreed on."""
        self._write(f"{where}: {_in_words(error)}", self._rank)
        self._numbers[self._rank][_FAILED] = self.agreements() + 1  # 0: never

    def break_off(self, where: str, error: BaseException) -> None:
        """Tell the peers that this rank takes no more calls: nobody knows how far it has come with the last one."""
        if not self._is_broken:
            self._break(f"{where}: {_in_words(error)}", self._rank)

    def look(self, *, agreed: bool) -> None:
        """Raise RemoteError if a peer has failed that this rank waits for.

        Args:
            agreed: whether the ranks have agreed on what this rank waits for.
        """
        if self.late is not None and self.is_told_late:
            self.break_off("a wait for the others", self.late[0])
            raise self.late[0]
        first: float = self.agreements() if agreed else math.inf
        if self.agreed_at is not None:
            first = self.agreed_at
        found = next((rank for rank in range(len(self._numbers)) if self._concerns(rank, first)), None)
        if found is None:
            return
        number, since = self._noticed
        if number != self.agreements():
            self._noticed = (self.agreements(), time.monotonic())
        elif time.monotonic() - since > PATIENCE_SECONDS:
            raise self.remote_error(found)

    @property
    def is_told_late(self) -> bool:
        """Whether this rank is still where it was told to wait no longer."""
        return self.late is not None and self.late[1] == self.agreements()

    def left_by(self) -> int | None:
        """Return the first rank that takes no more calls; None while all do."""
        return next((rank for rank, numbers in enumerate(self._numbers) if numbers[_BROKEN]), None)

    def remote_error(self, rank: int) -> MpiStrategyError:
        """Return the error that tells of a peer's failure, after which this rank takes no more calls, either."""
        numbers = self._numbers[rank]
        text = bytes(self._texts[rank][: numbers[_LENGTH]]).decode(errors="replace")
        origin = int(numbers[_ORIGIN])
        if not self._is_broken:
            self._break(text, origin)
        return RemoteError(f"{_of(origin, text)}. {NO_MORE_CALLS}")

    def _concerns(self, rank: int, first: float) -> bool:
        numbers = self._numbers[rank]
        return rank != self._rank and bool(numbers[_BROKEN] or numbers[_FAILED] > first)

    def _break(self, text: str, origin: int) -> None:
        self._write(text, origin)
        self._numbers[self._rank][_BROKEN] = 1
        self._is_broken = True
        self.on_broken(_of(origin, text))

    def _write(self, text: str, origin: int) -> None:
        mine, data = self._numbers[self._rank], text.encode()[:_LONGEST_TEXT]
        self._texts[self._rank][: len(data)] = data
        mine[_LENGTH], mine[_ORIGIN] = len(data), origin
        if self._fence is not None:
            self._fence()


def _of(rank: int, text: str) -> str:
    return f"rank {rank} failed in {text}"


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
