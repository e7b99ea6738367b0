"""The two paths on which MPI moves buffers in GPU memory: it gets pointers to that memory, or to a copy on the host.

The staged path goes through pinned memory on the host, in chunks of which two are under way.  While the host reduces a
chunk with its peers, the result of the chunk before goes back to the device, and the next chunk comes.  All copies are
on the program's current stream, in this order.  MPI sees memory of the host only: this path is right with every MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, cycle
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import DeviceArray, cupy_for
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.gpu_transport import DevicePath, PathName, in_order, kernels_for, own_part
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.two_level import between_nodes
from mpistrategy.mpi.shared_memory.node_sum import Halves, overlapped

CHUNK_BYTES = 4 * 2**20
_SLOTS = 2
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
#: An address on the device, where in the slot its bytes are, and how many.
_Span = tuple[int, int, int]


class StagedPath(DevicePath):
    """See `mpistrategy.mpi.interface.gpu_transport.DevicePath`.

    Args:
        chunk_bytes: the size of a piece that is under way; a multiple of 16.
    """

    name: PathName = "staged"

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        from cupyx import empty_pinned

        self._chunk_bytes = chunk_bytes
        self._cuda = cupy_for("an array in GPU memory").cuda
        self._slots: Iterator[Array] = cycle([empty_pinned((chunk_bytes,), np.uint8) for _ in range(_SLOTS)])
        #: The event after the last copies: the next call may be on another stream.
        self._last_copy: Any = None

    def reduce(
        self,
        ranks: Ranks,
        buffer: DeviceArray,
        op: str,
        root: int | None = None,
        wire: str | None = None,
    ) -> None:
        """Replace `buffer` by its combination over the ranks, on `root` or on all."""
        link_wire = between_nodes(ranks, wire, buffer.dtype, op)

        def combine(memory: Array) -> None:
            values = memory.view(buffer.dtype)
            if root is not None:
                ranks.reduce(values, root, op)
            else:
                ranks.allreduce(values, op, wire=link_wire)

        self._run(self._chunks(ranks, buffer, combine, stores=root is None or root == ranks.rank))

    def bcast(self, ranks: Ranks, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by `root`'s buffer."""
        sends = ranks.rank == root
        self._run(self._chunks(ranks, buffer, lambda memory: ranks.bcast(memory, root), loads=sends, stores=not sends))

    def _chunks(
        self,
        ranks: Ranks,
        buffer: DeviceArray,
        combine: Callable[[Array], None],
        *,
        loads: bool = True,
        stores: bool,
    ) -> Iterator[Halves]:
        """Let the ranks combine a buffer chunk by chunk; some ranks only load it, or only store it."""
        for start in range(0, buffer.nbytes, self._chunk_bytes):
            size = min(self._chunk_bytes, buffer.nbytes - start)
            at = [(buffer.data.ptr + start, 0, size)]
            yield self._piece(ranks, size, at if loads else [], combine, at if stores else [])

    def allgather(self, ranks: Ranks, block: DeviceArray, counts: Sequence[int], target: DeviceArray) -> None:
        """Write all ranks' blocks into `target`: every rank has a part of each piece."""
        self._run(self._parts(ranks, block, counts, target))

    def _parts(self, ranks: Ranks, block: DeviceArray, counts: Sequence[int], target: DeviceArray) -> Iterator[Halves]:
        sizes = [count * block.itemsize for count in counts]
        begins = [0, *accumulate(sizes)]
        step = max(1, self._chunk_bytes // ranks.size)
        for start in range(0, max(sizes), step):
            parts = [min(step, max(0, size - start)) for size in sizes]
            places = [0, *accumulate(parts)]
            own_slice = own_part(ranks, parts)

            def combine(memory: Array, parts: list[int] = parts, own_slice: slice = own_slice) -> None:
                ranks.allgatherv(memory[own_slice], parts, memory)

            where = zip(begins, places, parts, strict=False)
            stores = [(target.data.ptr + begin + start, place, part) for begin, place, part in where]
            loads = [(block.data.ptr + start, own_slice.start, parts[ranks.rank])]
            yield self._piece(ranks, places[-1], loads, combine, stores)

    def _run(self, pieces: Iterable[Halves]) -> None:
        """Move all pieces, two at a time."""
        stream = self._cuda.get_current_stream()
        if self._last_copy is not None:
            stream.wait_event(self._last_copy)
        try:
            overlapped(pieces)
        finally:
            self._last_copy = stream.record(self._cuda.Event(disable_timing=True))

    def _piece(
        self,
        ranks: Ranks,
        nbytes: int,
        loads: Sequence[_Span],
        combine: Callable[[Array], None],
        stores: Sequence[_Span],
    ) -> Halves:
        """Start to load a piece into a slot; then combine it there, and start to store it.

        Args:
            ranks: the ranks that take part.
            nbytes: how much of the slot it takes.
            loads: the copies from the device to the slot.
            combine: called then with the bytes of the slot.
            stores: the copies from the slot to the device at last.
        """
        slot, stream = next(self._slots), self._cuda.get_current_stream()
        for address, start, size in loads:
            self._copy(slot.ctypes.data + start, address, size, _TO_HOST, stream)
        arrived = stream.record(self._cuda.Event(disable_timing=True))
        yield
        ranks.guard.wait_for_gpu(arrived)
        combine(slot[:nbytes])
        for address, start, size in stores:
            self._copy(address, slot.ctypes.data + start, size, _TO_DEVICE, stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        if nbytes:
            self._cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)

    def free(self) -> None:
        """Free the pinned memory once no copy uses it."""
        if self._last_copy is not None:
            self._last_copy.synchronize()
        self._slots = iter(())


class DirectPath(DevicePath):
    """See `gpu_transport.DevicePath`; for a CUDA-aware MPI only: any other fails on the first pointer.

    MPI knows no streams: nothing on the current one may write a buffer any more.  A wire has no effect: MPI sends all
    digits.
    """

    name: PathName = "mpi"

    def __init__(self) -> None:
        self._cupy = cupy_for("an array in GPU memory")
        kernels_for(self._cupy)

    def reduce(
        self,
        ranks: Any,
        buffer: DeviceArray,
        op: str,
        root: int | None = None,
        wire: str | None = None,
    ) -> None:
        """Replace `buffer` by its combination over the ranks, on `root` or on all."""
        with in_order(self._cupy, buffer, op) as values:
            ranks.guard.wait_for_gpu(self._cupy.cuda.get_current_stream())
            ranks.reduce(values, root, op)

    def bcast(self, ranks: Any, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by `root`'s buffer."""
        ranks.guard.wait_for_gpu(self._cupy.cuda.get_current_stream())
        ranks.bcast(buffer, root)

    def allgather(self, ranks: Any, block: DeviceArray, counts: Sequence[int], target: DeviceArray) -> None:
        """Write all ranks' blocks into `target`."""
        super().allgather(ranks, block, counts, target)
        ranks.guard.wait_for_gpu(self._cupy.cuda.get_current_stream())
        ranks.allgatherv(None, counts, target)
