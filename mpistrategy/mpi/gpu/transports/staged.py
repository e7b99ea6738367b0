"""The staged path: through pinned memory on the host, in chunks of which three are under way.

While the host reduces one chunk with its peers, the next is on its way from the device and the one before on its way
back.  MPI sees memory of the host only: this path is right with every MPI library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.mpi.gpu.transports.pinned import Piece, Slot, Span
from mpistrategy.mpi.interface.gpu_transport import DevicePath, PathName, own_part
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.reduced_precision import between_nodes
from mpistrategy.mpi.multi_node.two_level import allreduce_across

CHUNK_BYTES = 4 * 2**20
_SLOTS = 3
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


class StagedPath(DevicePath):
    """See `mpistrategy.mpi.interface.gpu_transport.DevicePath`.

    Args:
        chunk_bytes: what is under way in one piece; a multiple of 16.
    """

    name: PathName = "staged"

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._cupy = cupy_for("an array in GPU memory")
        self._slots: list[Slot] = []
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
        self._slots = [Slot(min(self._chunk_bytes, 1 << (most - 1).bit_length())) for _ in range(count)]

    def make_room_for_all(self) -> None:
        """Take what buffers of any size need, for callers that do not know the size in time."""
        self.make_room(_SLOTS * self._chunk_bytes)

    def by_host(self, ranks: Ranks, dtype: np.dtype[Any], op: str, wire: str | None = None) -> str:
        """Return that everything is."""
        return "as everything on this path"

    def allreduce(
        self,
        ranks: Ranks,
        buffer: DeviceArray,
        op: str,
        wire: str | None = None,
        room: DeviceArray | None = None,
    ) -> None:
        """Replace `buffer` by its combination over the ranks."""
        sent = between_nodes(ranks, wire, buffer.dtype, op)
        allreduce = ranks.allreduce if sent is None else partial(allreduce_across, ranks, wire=sent)
        combine = _typed(buffer.dtype, lambda x: allreduce(x, op))
        self._run(ranks, [Piece(n, [at], combine, [at]) for n, at in self._chunks(buffer)])

    def reduce(self, ranks: Ranks, buffer: DeviceArray, root: int, op: str) -> None:
        """Replace `buffer` on `root` by its combination over the ranks."""
        combine = _typed(buffer.dtype, lambda x: ranks.reduce(x, root, op))
        wanted = ranks.rank == root
        self._run(ranks, [Piece(n, [at], combine, [at] if wanted else []) for n, at in self._chunks(buffer)])

    def bcast(self, ranks: Ranks, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by that of `root`."""
        sends = ranks.rank == root

        def combine(memory: Array) -> None:
            ranks.bcast(memory, root)

        pieces = [Piece(n, [at] if sends else [], combine, [] if sends else [at]) for n, at in self._chunks(buffer)]
        self._run(ranks, pieces)

    def allgather(self, ranks: Ranks, block: DeviceArray, counts: Sequence[int], together: DeviceArray) -> None:
        """Write all ranks' blocks into `together`: of each piece every rank has a part."""
        self._run(ranks, list(self._parts(ranks, block, counts, together)))

    def _parts(self, ranks: Ranks, block: DeviceArray, counts: Sequence[int], together: DeviceArray) -> Iterator[Piece]:
        sizes = [count * block.itemsize for count in counts]
        begins = [stop - size for stop, size in zip(accumulate(sizes), sizes, strict=True)]
        step = max(1, self._chunk_bytes // ranks.size)
        for start in range(0, max(sizes), step):
            parts = [min(step, max(0, size - start)) for size in sizes]
            places = [stop - part for stop, part in zip(accumulate(parts), parts, strict=True)]
            own = own_part(ranks, parts)

            def combine(memory: Array, parts: list[int] = parts, own: slice = own) -> None:
                ranks.allgatherv(memory[own], parts, memory)

            brought = [(block.data.ptr + start, own.start, parts[ranks.rank])]
            where = zip(begins, places, parts, strict=True)
            taken = [(together.data.ptr + begin + start, place, part) for begin, place, part in where]
            yield Piece(sum(parts), brought, combine, taken)

    def _chunks(self, buffer: DeviceArray) -> list[tuple[int, Span]]:
        """Return the sizes in bytes of the chunks of a buffer, and where they are."""
        step = self._chunk_bytes // buffer.itemsize * buffer.itemsize
        starts = range(0, buffer.nbytes, step)
        sizes = [min(step, buffer.nbytes - start) for start in starts]
        return [(n, (buffer.data.ptr + start, 0, n)) for start, n in zip(starts, sizes, strict=True)]

    def _run(self, ranks: Ranks, pieces: Sequence[Piece]) -> None:
        """Do all pieces, three of which are under way."""
        self.make_room(sum(piece.nbytes for piece in pieces))
        cuda = self._cupy.cuda
        users = cuda.get_current_stream()
        out, back = self._streams_of(cuda.runtime.getDevice())
        out.wait_event(users.record(cuda.Event(disable_timing=True)))
        try:
            arrived = [self._bring(number, piece, out) for number, piece in enumerate(pieces[:_SLOTS])]
            for number, piece in enumerate(pieces):
                slot = self._slots[number % _SLOTS]
                with ranks.guard.own_gpu():
                    arrived[number].synchronize()
                piece.combine(slot.memory[: piece.nbytes])
                for address, start, nbytes in piece.taken:
                    self._copy(address, slot.address + start, nbytes, _TO_DEVICE, back)
                slot.is_free = back.record(cuda.Event(disable_timing=True))
                if number + _SLOTS < len(pieces):
                    arrived.append(self._bring(number + _SLOTS, pieces[number + _SLOTS], out))
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

    def _bring(self, number: int, piece: Piece, out: Any) -> Any:
        """Start to copy a piece into its slot, once that is free; return what tells when it is there."""
        slot = self._slots[number % _SLOTS]
        if slot.is_free is not None:
            out.wait_event(slot.is_free)
        for address, start, nbytes in piece.brought:
            self._copy(slot.address + start, address, nbytes, _TO_HOST, out)
        return out.record(self._cupy.cuda.Event(disable_timing=True))

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        if nbytes:
            self._cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)

    def free(self) -> None:
        """Give back the pinned memory, once nothing is copied out of it or, after a failure, into it."""
        for stream in (each for both in self._streams.values() for each in both):
            stream.synchronize()
        self._slots = []


def _typed(dtype: np.dtype[Any], combine: Callable[[Array], None]) -> Callable[[Array], None]:
    """Return a function that gives the bytes of a slot to `combine` as an array."""
    return lambda memory: combine(memory.view(dtype))
