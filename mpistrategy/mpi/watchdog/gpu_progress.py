"""How far this rank's GPU has come with collectives that run while the program goes on.

An all-reduce on a stream outlives the call that began it.  A program that waits for its result is in no collective of
ours, so the watchdog has to look at the GPU itself.  It must not ask CUDA: a query may wait for a lock that the hanging
call holds.  Instead the GPU writes the numbers of the collectives that it begins and ends, in the order of the stream,
into memory of the host, where any thread can read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from mpistrategy.mpi.contract.flight_recorder import CurrentCall, in_words
from mpistrategy.mpi.watchdog.roll_call import FAILED

#: Numbers are counted modulo this.
_RING = 1024
#: How many may be under way: half of the ring, so that it is clear which number is ahead.
MOST = _RING // 2
_BEGUN, _ENDED = 0, 1
_NUMBER_BYTES = 8
_TO_HOST = 2  # cudaMemcpyKind

#: Puts the writing of a number on a stream: ``write(stream, address, number)``.
_Write: TypeAlias = Callable[[int, int, int], None]
_Writer: TypeAlias = Callable[[int, int], "_Write | None"]


class GpuProgress:
    """The collectives on this rank's GPU.

    The thread that makes collectives makes it; the watchdog calls `look`, and reads what that has found.

    Args:
        cupy: the package; the device must be the current one.
        check: raises when the communication library has failed; calls nothing of CUDA, and never waits.
        writer: returns for a stream and an address of pinned memory what puts the writing of a number to such memory
            on a stream: ``write(stream, address, number)``; or None where the number must be copied there.

    Attributes:
        entry: the collective whose result is missing, as of the last look; None without one.
        failure: why the library says that its result will never come; "" if it does not.
    """

    def __init__(self, cupy: Any, check: Any, writer: _Writer = lambda stream, address: None) -> None:
        from cupyx import empty_pinned

        self._cupy = cupy
        self._check = check
        self._reached = empty_pinned((2,), "int64")
        self._reached[:] = 0
        stream = cupy.cuda.get_current_stream()
        self._write = writer(stream.ptr, self._reached.ctypes.data)
        self._numbers = cupy.arange(_RING, dtype="int64")
        self._given = 0
        self._entries: list[tuple[CurrentCall | None, float | None]] = [(None, None)] * _RING
        self._last = cupy.cuda.Event(disable_timing=True)
        self._last.record(stream)
        self._last.synchronize()  # other streams read the numbers, too
        self._stream = stream.ptr
        self.entry: CurrentCall | None = None
        self.failure = ""
        #: The numbers that the GPU had written when the watchdog saw new ones, since when, and the collective's limit.
        self._seen = (0, 0)
        self._since = math.inf
        self._limit: float | None = None

    @property
    def is_full(self) -> bool:
        """Whether `begin` has to wait until a collective is over."""
        return self._under_way() >= MOST

    @property
    def is_over(self) -> bool:
        """Whether all collectives are over; asks CUDA."""
        return bool(self._last.done)

    @property
    def is_in_one(self) -> bool:
        """Whether the GPU is in a collective, or about to be; does not ask CUDA."""
        ended = int(self._reached[_ENDED])
        return int(self._reached[_BEGUN]) != ended

    def begin(self, entry: CurrentCall | None, limit: float | None = None) -> None:
        """Note that the next thing on the current stream is a collective.

        Args:
            entry: its entry in the flight record.
            limit: its timeout in seconds; None: that of the strategy.
        """
        stream = self._cupy.cuda.get_current_stream()
        if stream.ptr != self._stream:
            stream.wait_event(self._last)  # one after the other, whatever streams the program uses
            self._stream = stream.ptr
        self._given = (self._given + 1) % _RING
        self._entries[self._given] = entry, limit
        self._note(_BEGUN, stream)

    def given(self) -> None:
        """Note that the collective that was begun is on the stream."""
        stream = self._cupy.cuda.get_current_stream()
        self._note(_ENDED, stream)
        self._last.record(stream)

    def _note(self, which: int, stream: Any) -> None:
        address = self._reached.ctypes.data + which * _NUMBER_BYTES
        if self._write is not None:
            self._write(stream.ptr, address, self._given)
        else:
            number = self._numbers.data.ptr + self._given * _NUMBER_BYTES
            self._cupy.cuda.runtime.memcpyAsync(address, number, _NUMBER_BYTES, _TO_HOST, stream.ptr)

    def _under_way(self) -> int:
        ended = int(self._reached[_ENDED])  # read first: what is given may only become more meanwhile
        return (self._given - ended) % _RING

    def look(self, now: float) -> None:
        """Look how far the GPU has come; for the watchdog."""
        ended = int(self._reached[_ENDED])
        begun, given = int(self._reached[_BEGUN]), self._given
        if ended == given:
            self.entry, self._since, self.failure = None, math.inf, ""
            return
        if (begun, ended) != self._seen or self._since == math.inf:
            self._seen, self._since = (begun, ended), now
        self.entry, self._limit = self._entries[(ended + 1) % _RING]
        try:
            self._check()
        except Exception as error:  # of the library's own type
            self.failure = str(error)

    def waited(self, now: float, not_before: float) -> float:
        """Return how long the GPU has been in the oldest collective; 0 before it has come to it."""
        begun, ended = self._seen
        return 0.0 if begun == ended else max(0.0, now - max(self._since, not_before))

    def limit(self, usual: float) -> float:
        """Return how long the oldest collective may take, in seconds."""
        return usual if self._since == math.inf or self._limit is None else self._limit

    def in_words(self, now: float) -> str:
        """Return where the GPU is; "" when no result is missing."""
        if self._since == math.inf:
            return ""
        what = "a collective" if self.entry is None else in_words(self.entry)
        begun, ended = self._seen
        if begun == ended:
            return f"on its way: its GPU is still at what comes before {what}"
        failed = f"{FAILED}{self.failure}" if self.failure else ""
        return f"in {what} on its GPU for {now - self._since:.1f} s{failed}"
