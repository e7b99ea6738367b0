"""The staged path: through pinned memory on the host, in chunks of which three are under way.

While the host reduces one chunk with its peers, the next is on its way from the device and the one before on its way
back.  MPI sees memory of the host only: this path is right with every MPI library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.mpi.interface.gpu_transport import DevicePath, PathName, own_part
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.reduced_precision import between_nodes
from mpistrategy.mpi.multi_node.two_level import allreduce_across

CHUNK_BYTES = 4 * 2**20
_SLOTS = 3
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
#: An address on the device, where in the slot its bytes are, and how many.
_Span = tuple[int, int, int]


class Slot:
    """Pinned memory for one piece, and what tells when the copy out of it is done."""

    def __init__(self, nbytes: int) -> None:
        from cupyx import empty_pinned

        self.memory: Array = empty_pinned((nbytes,), np.uint8)
        self.address: int = self.memory.ctypes.data
        self.is_free: Any = None


@dataclass(frozen=True)
class _Piece:
    """What is under way in one slot.

    Attributes:
        nbytes: how much of the slot it takes.
        brought: what is copied from the device to the slot.
        combine: what the ranks do then with the bytes of the slot.
        taken: what is copied from the slot to the device at last.
    """

    nbytes: int
    brought: Sequence[_Span]
    combine: Callable[[Array], None]
    taken: Sequence[_Span]


class StagedPath(DevicePath):
    """See `mpistrategy.mpi.interface.gpu_transport.DevicePath`.

    Args:
        chunk_bytes: what is under way in one piece; a multiple of 16.
    """

    name: PathName = "staged"

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._cuda = cupy_for("an array in GPU memory").cuda
        self._slots: list[Slot] = [Slot(chunk_bytes) for _ in range(_SLOTS)]
        #: For each device, the streams of the copies from it and to it: an event belongs to a stream of its device.
        self._streams: dict[int, tuple[Any, Any]] = {}
        self._streams_here()

    def reduce(
        self,
        ranks: Ranks,
        buffer: DeviceArray,
        op: str,
        root: int | None = None,
        wire: str | None = None,
    ) -> None:
        """Replace `buffer` by its combination over the ranks, on `root` or on all."""
        sent = between_nodes(ranks, wire, buffer.dtype, op)

        def combine(memory: Array) -> None:
            values = memory.view(buffer.dtype)
            if root is not None:
                ranks.reduce(values, root, op)
            elif sent is None:
                ranks.allreduce(values, op)
            else:
                allreduce_across(ranks, values, op, wire=sent)

        self._run_chunks(ranks, buffer, combine, is_taken=root is None or root == ranks.rank)

    def bcast(self, ranks: Ranks, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by that of `root`."""
        sends = ranks.rank == root
        self._run_chunks(ranks, buffer, lambda memory: ranks.bcast(memory, root), is_brought=sends, is_taken=not sends)

    def _run_chunks(
        self,
        ranks: Ranks,
        buffer: DeviceArray,
        combine: Callable[[Array], None],
        *,
        is_brought: bool = True,
        is_taken: bool,
    ) -> None:
        """Let the ranks combine a buffer chunk by chunk; some ranks give it, or get it, only."""
        step = self._chunk_bytes // buffer.itemsize * buffer.itemsize
        pieces = []
        for start in range(0, buffer.nbytes, step):
            size = min(step, buffer.nbytes - start)
            at = [(buffer.data.ptr + start, 0, size)]
            pieces.append(_Piece(size, at if is_brought else [], combine, at if is_taken else []))
        self._run(ranks, pieces)

    def allgather(self, ranks: Ranks, block: DeviceArray, counts: Sequence[int], together: DeviceArray) -> None:
        """Write all ranks' blocks into `together`: of each piece every rank has a part."""
        self._run(ranks, list(self._parts(ranks, block, counts, together)))

    def _parts(
        self, ranks: Ranks, block: DeviceArray, counts: Sequence[int], together: DeviceArray
    ) -> Iterator[_Piece]:
        sizes = [count * block.itemsize for count in counts]
        begins = [0, *accumulate(sizes)]
        step = max(1, self._chunk_bytes // ranks.size)
        for start in range(0, max(sizes), step):
            parts = [min(step, max(0, size - start)) for size in sizes]
            places = [0, *accumulate(parts)]
            own = own_part(ranks, parts)

            def combine(memory: Array, parts: list[int] = parts, own: slice = own) -> None:
                ranks.allgatherv(memory[own], parts, memory)

            where = zip(begins, places, parts, strict=False)
            taken = [(together.data.ptr + begin + start, place, part) for begin, place, part in where]
            yield _Piece(places[-1], [(block.data.ptr + start, own.start, parts[ranks.rank])], combine, taken)

    def _run(self, ranks: Ranks, pieces: Sequence[_Piece]) -> None:
        """Do all pieces, three of which are under way."""
        users = self._cuda.get_current_stream()
        out, back = self._streams_here()
        out.wait_event(self._noted(users))
        try:
            arrived = [self._bring(number, piece, out) for number, piece in enumerate(pieces[:_SLOTS])]
            for number, piece in enumerate(pieces):
                slot = self._slots[number % _SLOTS]
                with ranks.guard.own_gpu():
                    arrived[number].synchronize()
                piece.combine(slot.memory[: piece.nbytes])
                for address, start, nbytes in piece.taken:
                    self._copy(address, slot.address + start, nbytes, _TO_DEVICE, back)
                slot.is_free = self._noted(back)
                if number + _SLOTS < len(pieces):
                    arrived.append(self._bring(number + _SLOTS, pieces[number + _SLOTS], out))
        except BaseException:
            users.wait_event(self._noted(out))
            raise
        finally:
            # The buffer's next user waits for the last copy into it, even if MPI has failed: then its memory is soon
            # somebody else's.  The slots' next user waits for the copies out of them.
            users.wait_event(self._noted(back))

    def _streams_here(self) -> tuple[Any, Any]:
        device, kind = self._cuda.runtime.getDevice(), self._cuda.Stream
        if device not in self._streams:
            self._streams[device] = (kind(non_blocking=True), kind(non_blocking=True))
        return self._streams[device]

    def _noted(self, stream: Any) -> Any:
        """Return an event behind what is on a stream so far."""
        return stream.record(self._cuda.Event(disable_timing=True))

    def _bring(self, number: int, piece: _Piece, out: Any) -> Any:
        """Start to copy a piece into its slot, once that is free; return what tells when it is there."""
        slot = self._slots[number % _SLOTS]
        if slot.is_free is not None:
            out.wait_event(slot.is_free)
        for address, start, nbytes in piece.brought:
            self._copy(slot.address + start, address, nbytes, _TO_HOST, out)
        return self._noted(out)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        if nbytes:
            self._cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)

    def free(self) -> None:
        """Give back the pinned memory, once nothing is copied out of it or, after a failure, into it."""
        for both in self._streams.values():
            for stream in both:
                stream.synchronize()
        self._slots = []
