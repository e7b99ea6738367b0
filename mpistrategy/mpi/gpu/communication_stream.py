"""The stream on which a strategy's reductions go on while the program's own streams go on computing.

Events order them: the stream waits for what was put on the program's stream before the call, and a program's stream
waits for the reduction where the result is asked for.  Nothing waits on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.mpi.interface.buffers import Freed
from mpistrategy.mpi.interface.ranks import Ranks


class CommunicationStream(Freed):
    """One stream for each device, made at the first use; an event belongs to a stream of its device."""

    def __init__(self) -> None:
        self._cupy: Any = cupy_for("arrays in GPU memory")
        self._streams: dict[int, Any] = {}
        #: What the stream may still use, and the events behind it; the oldest first.
        self._used: deque[tuple[Any, object]] = deque()

    def note(self) -> Any:
        """Return an event behind what is on the current stream so far."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._cupy.cuda.get_current_stream())
        return event

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Make the stream of the current device the current one, behind an event."""
        device = self._cupy.cuda.runtime.getDevice()
        if device not in self._streams:
            self._streams[device] = self._cupy.cuda.Stream(non_blocking=True)
        with self._streams[device] as stream:
            stream.wait_event(event)
            yield

    def keep(self, what: object) -> Any:
        """Return an event behind what is on the current stream, and keep `what` alive until it has been reached."""
        event = self.note()
        self._used.append((event, what))
        while self._used and self._used[0][0].done:
            self._used.popleft()
        return event

    def free(self) -> None:
        """Wait for what is on the streams: then nothing of it uses any memory."""
        for stream in self._streams.values():
            stream.synchronize()
        self._used.clear()


def communication_stream(communicator: Ranks) -> CommunicationStream:
    """Return the stream of a communicator."""
    return communicator.once(CommunicationStream, CommunicationStream)
