"""How a buffer in GPU memory is reduced: what every path offers, the memory for it, and how ranks report errors.

A path works on CuPy's current stream.  It reads a buffer when everything that was put on the stream before is done, and
what is put on the stream afterwards finds the result; nothing waits for the whole device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.job.launcher import ranks_in_words

if TYPE_CHECKING:
    from mpistrategy.arrays.gpu import DeviceArray


PathName = Literal["alone", "mpi", "staged", "nccl", "ipc"]


class DevicePath(Protocol):
    """One way in which buffers in GPU memory travel.

    Attributes:
        name: as users call it.
    """

    name: PathName

    def make_room(self, nbytes: int) -> None:
        """Take the memory that a buffer of so many bytes needs: before the ranks agree, since it may fail."""

    def allreduce(self, ranks: Communicator, buffer: DeviceArray, op: str) -> None:
        """Replace `buffer` (flat, contiguous, of `communication_memory`) on every rank by its combination."""

    def free(self) -> None:
        """Give back what the path holds, where all ranks are known to do so."""


@dataclass
class DevicePaths:
    """The paths of one strategy.

    Attributes:
        known: the path for each word that was asked for.
        by_name: each of these paths once.
        reasons: why it is this one; by word.
    """

    known: dict[str, DevicePath] = field(default_factory=dict)
    by_name: dict[str, DevicePath] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def free(self) -> None:
        """Free all paths, where all ranks are known to do so."""
        for path in self.by_name.values():
            path.free()
        self.known.clear()
        self.by_name.clear()


def device_paths(communicator: Communicator) -> DevicePaths:
    """Return the paths of a communicator; `mpistrategy.mpi.gpu.transports.setup` fills them."""
    return communicator.once(DevicePaths, DevicePaths)


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


def error_of(work: Callable[[], str | None]) -> str:
    """Return what goes wrong in `work`, "" if nothing; it must not raise, since the peers wait for this rank."""
    try:
        return work() or ""
    except Exception as error:  # CUDA's, NCCL's or ours
        return f"{type(error).__name__}: {error}"


def first_error(ranks: Communicator, mine: str) -> str:
    """Return the error of some rank, with its number; "" if none has any.  Collective, and a barrier."""
    everyone = ranks.allgather_text(mine)
    those = [rank for rank, error in enumerate(everyone) if error]
    return f"{everyone[those[0]]} ({ranks_in_words(those)})" if those else ""
