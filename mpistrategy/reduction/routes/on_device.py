"""Broadcasts and gathers of arrays in GPU memory, on the strategy's path: nothing of them goes to the host.

All calls are made inside an agreed call by all ranks, with the device of the arrays current or not.  `prepare` comes
before the agreement, since it may fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import placed_as
from mpistrategy.arrays.gpu import DeviceArray, check_no_capture, cupy_for
from mpistrategy.mpi.gpu.transports.choice import any_path
from mpistrategy.mpi.interface.gpu_transport import communication_memory, device_paths
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.shared_memory.segments import aligned

_WHAT = "arrays in GPU memory"
#: So much of an array is sent to the GPUs at a time.
_PIECE_BYTES = 32 * 2**20


def prepare(communicator: Ranks, arrays: Sequence[DeviceArray], where: str) -> None:
    """Raise where the ranks cannot send these arrays.

    Raises:
        UnsupportedError: while the current stream is captured.
    """
    check_no_capture(cupy_for(_WHAT), where)
    with arrays[0].device:
        device_paths(communicator).check()


def packed(arrays: Sequence[DeviceArray]) -> tuple[DeviceArray, list[DeviceArray]]:
    """Return memory that every path takes, as bytes, with copies of the arrays; and the copies.  One kernel."""
    from mpistrategy.reduction.routes.gpu_copy import move  # here: on CPUs nothing reads it

    cupy: Any = cupy_for(_WHAT)
    with arrays[0].device:
        starts = [0, *accumulate(aligned(array.nbytes) for array in arrays)]
        memory = communication_memory(cupy, starts[-1], np.dtype(np.uint8))
        made = [
            memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]
        move(arrays, made)
    return memory, made


def bcast(communicator: Ranks, array: DeviceArray, root: int) -> None:
    """Write rank `root`'s array, which is contiguous and in memory that every path takes, into everybody's."""
    if array.size:
        with array.device:
            any_path(communicator).bcast(communicator, array.reshape(-1), root)


def write_that_of(communicator: Ranks, root: int, array: Any, target: DeviceArray) -> None:
    """Write rank `root`'s array into every rank's `target`, in pieces.  If a rank has no memory for that, all raise.

    Args:
        communicator: the ranks.
        root: the rank that has the array.
        array: on the host or a GPU, as large as `target`; what the other ranks have is not looked at.
        target: where it goes: contiguous, in whatever memory.
    """
    step = min(max(1, _PIECE_BYTES // target.itemsize), target.size)

    def room_for_pieces() -> DeviceArray:
        device_paths(communicator).check()
        return communication_memory(cupy_for(_WHAT), step, target.dtype)

    with target.device:
        room, there = communicator.guard.on_all(room_for_pieces), target.reshape(-1)
        for start in range(0, target.size, max(1, step)):
            piece = room[: min(step, target.size - start)]
            if communicator.rank == root:
                piece[...] = placed_as(array.reshape(-1)[start : start + piece.size], piece)
            bcast(communicator, piece, root)
            there[start : start + piece.size] = piece


def room_for_rows(communicator: Ranks, block: DeviceArray, rows: Sequence[int]) -> tuple[DeviceArray, DeviceArray]:
    """Return memory for the blocks of all ranks along the first axis, and in it this rank's block, which comes first.

    ``rows[r]`` is the length of rank r's block.
    """
    with block.device:
        width = prod(block.shape[1:])
        together = communication_memory(cupy_for(_WHAT), sum(rows) * width, block.dtype)
        mine = together[sum(rows[: communicator.rank]) * width :][: block.size]
        mine[...] = block.reshape(-1)
        device_paths(communicator).check()
        return mine, together.reshape((sum(rows), *block.shape[1:]))


def gather_rows(communicator: Ranks, mine: DeviceArray, counts: Sequence[int], together: DeviceArray) -> None:
    """Fill the memory of `room_for_rows`; ``counts[r]`` elements are of rank r."""
    if together.size:
        with together.device:
            path = any_path(communicator)
            path.allgather(communicator, mine, counts, together.reshape(-1))
