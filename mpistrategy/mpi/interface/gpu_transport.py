"""How a buffer in GPU memory is reduced: what every path offers, and the memory that all of them can work with.

A path works on CuPy's current stream.  It reads a buffer when everything that was put on the stream before is done, and
what is put on the stream afterwards finds the result; nothing waits for the whole device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.mpi.interface.communicator import Communicator, PathName

if TYPE_CHECKING:
    from mpistrategy.arrays.gpu import DeviceArray


class Alone:
    """The path of one rank: nothing goes anywhere."""

    name: PathName = "alone"

    def make_room(self, nbytes: int) -> None:
        """Need nothing."""

    def allreduce(self, ranks: Communicator, buffer: DeviceArray, op: str) -> None:
        """Leave `buffer`: its sum over one rank is itself."""

    def free(self) -> None:
        """Hold nothing."""


def communication_memory(cupy: Any, size: int, dtype: np.dtype[Any]) -> DeviceArray:
    """Return an array with undefined values in memory of cudaMalloc, on the current device.

    MPI libraries cannot exchange managed memory, nor that of CUDA's asynchronous pools, in their fast way; some fail
    on it.  Whatever pool the program has chosen, what travels is in CuPy's default one, which the program shares: what
    one of the two no longer uses the other may have.
    """
    return cupy.ndarray((size,), dtype, memptr=cupy.get_default_memory_pool().malloc(max(1, size * dtype.itemsize)))
