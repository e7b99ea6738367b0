"""How far this rank's GPU has come with collectives that run while the program goes on.

An all-reduce on a stream outlives the call that began it.  A program that waits for its result is in no collective of
ours, so the watchdog has to look at the GPU itself.  It must not ask CUDA: a query may wait for a lock that the hanging
call holds.  Instead the GPU writes the numbers of the collectives that it begins and ends, in the order of the stream,
into memory of the host, where any thread can read them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpistrategy.mpi.contract.flight_recorder import CurrentCall, in_words
from mpistrategy.mpi.watchdog.roll_call import FAILED

#: Numbers are counted modulo this: two for each collective, an odd one where it begins, an even one where it ends.
_RING = 2048
#: How long a collective that has failed counts as waited for, at least, in seconds.
_LEAST_OF_FAILED = 1e-3
#: How far the GPU may be behind: half of the ring, so that it is clear which number is ahead.
MOST = _RING // 2


class GpuProgress:
    """The collectives on this rank's GPU.

    The thread that makes collectives creates the object; the watchdog calls `wait` and `in_words`.

    Args:
        cupy: the package; the device must be the current one.
        check: raises when the communication library has failed; never calls CUDA and never waits.

    Attributes:
        failure: the library's reason why the missing result will never come; "" without a failure.

    Raises:
        OSError, AttributeError, RuntimeError: where the driver does not let a stream write numbers.
    """

    def __init__(self, cupy: Any, check: Callable[[], None]) -> None:
        from cupyx import empty_pinned

        self._cupy = cupy
        self._check = check
        self._reached = empty_pinned((1,), "int64")
        self._reached[:] = 0
        self._last_number, self._address = 0, self._reached.ctypes.data
        #: The flight record's entry of each collective, by the number of its end.
        self._entries: list[CurrentCall | None] = [None] * _RING
        self._stream_write = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2
        self._stream_write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._last = cupy.cuda.Event(disable_timing=True)
        self._stream = cupy.cuda.get_current_stream().ptr
        self._write(self._stream, 0)  # as a trial
        #: The number that the GPU had reached when the watchdog last missed a result, and since when.
        self._observation: tuple[int, float] | None = None
        self.failure: str = ""

    def _write(self, stream: int, number: int) -> None:
        """Let a stream write a number where the host reads it: no other way costs a GPU less."""
        if code := self._stream_write(stream, self._address, number, 0):
            raise RuntimeError(f"cuStreamWriteValue32: error {code} of the CUDA driver")

    @property
    def is_full(self) -> bool:
        """Whether `collective` has to wait until an earlier collective is over."""
        reached = int(self._reached[0])  # read first: the last number may grow meanwhile
        return (self._last_number - reached) % _RING >= MOST

    @property
    def is_over(self) -> bool:
        """Whether all collectives are over; asks CUDA."""
        return bool(self._last.done)

    @property
    def is_in_one(self) -> bool:
        """Whether the GPU is in a collective; does not ask CUDA."""
        return bool(self._reached[0] % 2)

    @contextmanager
    def collective(self, entry: CurrentCall | None) -> Iterator[int]:
        """Note that the block puts a collective on the current stream, whose pointer it gets.

        Args:
            entry: its entry in the flight record.
        """
        stream = self._cupy.cuda.get_current_stream()
        if stream.ptr != self._stream:
            stream.wait_event(self._last)  # one after the other, whatever streams the program uses
            self._stream = stream.ptr
        end = (self._last_number + 2) % _RING
        self._entries[end] = entry
        self._write(stream.ptr, (end - 1) % _RING)
        self._last_number = end
        yield stream.ptr
        self._write(stream.ptr, end)
        self._last.record(stream)

    def _missing(self) -> CurrentCall | None:
        """Return the entry of the oldest collective that is not over."""
        reached = 0 if self._observation is None else self._observation[0]
        return self._entries[(reached + 2 - reached % 2) % _RING]

    def wait(self, now: float, not_before: float, usual: float) -> tuple[float, float]:
        """Look how far the GPU has come.

        Return how long it has been in the oldest collective (0 before its beginning), and the limit of that.

        Args:
            now, not_before: until when, and from when on, time counts.
            usual: the timeout of a collective without its own.
        """
        reached = int(self._reached[0])
        if reached == self._last_number:
            self._observation, self.failure = None, ""
            return 0.0, usual
        if self._observation is None or self._observation[0] != reached:
            self._observation = reached, now
        try:
            self._check()
        except Exception as error:  # of the library's own type
            self.failure = str(error)
        if not reached % 2:
            return 0.0, usual
        entry, waited = self._missing(), now - max(self._observation[1], not_before)
        # What has failed is waited for, however short the time is since this thread has looked.
        return max(waited, _LEAST_OF_FAILED if self.failure else 0.0), (entry and entry.timeout) or usual

    def in_words(self, now: float) -> str:
        """Return where the GPU is; "" when no result is missing."""
        if self._observation is None:
            return ""
        entry = self._missing()
        words = "a collective" if entry is None else in_words(entry)
        if not self._observation[0] % 2:
            return f"on its way: its GPU is still at what comes before {words}"
        failed = f"{FAILED}{self.failure}" if self.failure else ""
        return f"in {words} on its GPU for {now - self._observation[1]:.1f} s{failed}"
