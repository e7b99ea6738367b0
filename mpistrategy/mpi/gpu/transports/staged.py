"""The staged path: through pinned memory on the host, in chunks of which three are under way.

While the host reduces one chunk with its peers, the next is on its way from the device and the one before on its way
back.  MPI sees memory of the host only: this path is right with every MPI library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import PathName

CHUNK_BYTES = 4 * 2**20
_SLOTS = 3
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


class StagedPath:
    """See `mpistrategy.mpi.interface.gpu_transport.DevicePath`.

    Args:
        chunk_bytes: what is under way in one piece; a multiple of 16.
    """

    name: PathName = "staged"

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._cupy = cupy_for("an array in GPU memory")
        self._slots: list[_Slot] = []
        #: For each device, the streams of the copies from it and to it: an event belongs to a stream of its device.
        self._streams: dict[int, tuple[Any, Any]] = {}
        self._streams_of(self._cupy.cuda.runtime.getDevice())

    def make_room(self, nbytes: int) -> None:
        """Have as many slots, and as large ones, as a buffer of so many bytes needs."""
        count = min(_SLOTS, -(-nbytes // self._chunk_bytes))
        least = min(nbytes, self._chunk_bytes)
        if count == 0 or (len(self._slots) >= count and self._slots[0].memory.nbytes >= least):
            return
        count = max(count, len(self._slots))
        most = max([least, *(slot.memory.nbytes for slot in self._slots)])
        self.free()
        self._slots = [_Slot(min(self._chunk_bytes, 1 << (most - 1).bit_length())) for _ in range(count)]

    def make_room_for_all(self) -> None:
        """Take what buffers of any size need, for callers that do not know the size in time."""
        self.make_room(_SLOTS * self._chunk_bytes)

    def allreduce(self, ranks: Communicator, buffer: DeviceArray, op: str) -> None:
        """Replace `buffer` by its combination over the ranks."""
        self.make_room(buffer.nbytes)
        step = self._chunk_bytes // buffer.itemsize
        chunks = [buffer[start : start + step] for start in range(0, buffer.size, step)]
        cuda = self._cupy.cuda
        users = cuda.get_current_stream()
        out, back = self._streams_of(cuda.runtime.getDevice())
        out.wait_event(users.record(cuda.Event(disable_timing=True)))
        try:
            arrived = [self._bring(number, chunk, out) for number, chunk in enumerate(chunks[:_SLOTS])]
            for number, chunk in enumerate(chunks):
                slot = self._slots[number % _SLOTS]
                with ranks.guard.own_gpu():
                    arrived[number].synchronize()
                ranks.allreduce(slot.as_dtype(chunk.dtype, chunk.size), op)
                self._copy(chunk.data.ptr, slot.address, chunk.nbytes, _TO_DEVICE, back)
                slot.is_free = back.record(cuda.Event(disable_timing=True))
                if number + _SLOTS < len(chunks):
                    arrived.append(self._bring(number + _SLOTS, chunks[number + _SLOTS], out))
        except BaseException:
            users.wait_event(out.record(cuda.Event(disable_timing=True)))
            raise
        finally:
            # The buffer's next user waits for the last copy into it, even if MPI has failed: then its memory is soon
            # somebody else's.  The slots' next user waits for the copies out of them.
            users.wait_event(back.record(cuda.Event(disable_timing=True)))

    def _streams_of(self, device: int) -> tuple[Any, Any]:
        found = self._streams.get(device)
        if found is None:
            kind = self._cupy.cuda.Stream
            found = self._streams[device] = (kind(non_blocking=True), kind(non_blocking=True))
        return found

    def _bring(self, number: int, chunk: DeviceArray, out: Any) -> Any:
        """Start to copy a chunk into its slot, once that is free; return what tells when it is there."""
        slot = self._slots[number % _SLOTS]
        if slot.is_free is not None:
            out.wait_event(slot.is_free)
        self._copy(slot.address, chunk.data.ptr, chunk.nbytes, _TO_HOST, out)
        return out.record(self._cupy.cuda.Event(disable_timing=True))

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        self._cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)

    def free(self) -> None:
        """Give back the pinned memory, once nothing is copied out of it or, after a failure, into it."""
        for stream in (each for both in self._streams.values() for each in both):
            stream.synchronize()
        self._slots = []


class _Slot:
    """Pinned memory for one chunk, and what tells when the copy out of it is done."""

    def __init__(self, nbytes: int) -> None:
        from cupyx import empty_pinned

        self.memory: Array = empty_pinned((nbytes,), np.uint8)
        self.address = self.memory.ctypes.data
        self.is_free: Any = None

    def as_dtype(self, dtype: np.dtype[Any], size: int) -> Array:
        return self.memory[: size * dtype.itemsize].view(dtype)
