"""Sums of float32 that travel as 16-bit floats by NCCL, piece by piece: `CommunicationOptions.wire`.

NCCL adds numbers of the wire's dtype and rounds each sum to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray
from mpistrategy.mpi.interface.gpu_transport import communication_memory

#: How many numbers travel at once; the memory for them is kept.
PIECE = 8 * 2**20


def dtype_for(cupy: Any, ranks: Any, dtype: np.dtype[Any], op: str) -> np.dtype[Any] | None:
    """Return the dtype in which a buffer shall travel between these ranks; None for its own.

    A CuPy before 14 knows no bfloat16, and sends all digits.
    """
    wanted: Callable[[np.dtype[Any], str], np.dtype[Any] | None] | None = getattr(ranks, "wire_by_nccl", None)
    found = None if wanted is None else wanted(dtype, op)
    if found is not None and found.kind != "f" and int(cupy.__version__.partition(".")[0]) < 14:
        return None
    return found


class Rounded:
    """The memory in which numbers travel.

    Args:
        cupy: the package.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._room: dict[str, DeviceArray] = {}

    def combine(self, buffer: DeviceArray, wire: np.dtype[Any], send: Callable[[DeviceArray], None]) -> None:
        """Combine a buffer on the current stream, `send` doing so with each piece of the wire's dtype."""
        room = self._room.get(wire.name)
        if room is None or room.size < min(PIECE, buffer.size):
            room = self._room[wire.name] = communication_memory(self._cupy, min(PIECE, buffer.size), wire)
        for start in range(0, buffer.size, PIECE):
            part = buffer[start : start + PIECE]
            piece = room[: part.size]
            piece[...] = part
            send(piece)
            part[...] = piece
