"""Buffers in GPU memory that are combined piece by piece in another dtype: wider, for one rounding, or that of a wire.

The memory of a piece is kept.  Work on several streams uses it in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray
from mpistrategy.mpi.interface.gpu_transport import communication_memory

#: How many numbers are combined at once: 32 MiB of float32.
PIECE = 8 * 2**20
_LEAST = 2**14


class Pieces:
    """The memory of the pieces, for one communicator.

    Args:
        cupy: the package.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        #: By device, dtype and size: the memory, and an event behind the work that has used it last.
        self._memory: dict[tuple[int, str, int], tuple[DeviceArray, Any]] = {}

    def make_room(self, size: int, dtype: np.dtype[Any]) -> tuple[DeviceArray, Any]:
        """Have memory for a buffer of so many numbers, on the current device; return it with its event.

        The sizes are powers of two: of all that is asked for, less than twice the largest is kept.
        """
        size = min(PIECE, max(_LEAST, 1 << (size - 1).bit_length()))
        key = (self._cupy.cuda.runtime.getDevice(), dtype.name, size)
        if key not in self._memory:
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._cupy.cuda.get_current_stream())
            self._memory[key] = (communication_memory(self._cupy, size, dtype), event)
        return self._memory[key]

    def combine(
        self,
        buffer: DeviceArray,
        dtype: np.dtype[Any],
        send: Callable[[DeviceArray], None],
        bring: Callable[[DeviceArray, DeviceArray], None] | None = None,
    ) -> None:
        """Combine a buffer on the current stream.

        Args:
            buffer: flat and contiguous.
            dtype: in which it is combined.
            send: combines a piece of that dtype.
            bring: copies a part of the buffer to a piece; None: CuPy does.
        """
        memory, event = self.make_room(buffer.size, dtype)
        stream = self._cupy.cuda.get_current_stream()
        stream.wait_event(event)
        try:
            for start in range(0, buffer.size, memory.size):
                part = buffer[start : start + memory.size]
                piece = memory[: part.size]
                if bring is None:
                    piece[...] = part
                else:
                    bring(part, piece)
                send(piece)
                part[...] = piece
        finally:
            event.record(stream)
