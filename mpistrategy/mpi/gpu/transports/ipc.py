"""The path within a node: every rank writes its buffer where its peers can read it, and combines what it wants itself.

Each rank has two slots of GPU memory that its peers have opened (CUDA's inter-process communication: between GPUs that
reach each other's memory, or for ranks that share one GPU).  An all-reduce, or a piece of one, is

1. wait for this rank's last kernel, and copy the buffer to a slot, on the current stream;
2. wait for both (an event);
3. meet the ranks of the node (a barrier of the host, a microsecond);
4. launch the kernel that reads this slot of all ranks, in rank order, and writes the result to the buffer.

The other operations differ in who writes and who reads: of a reduction only its root reads, of a broadcast only the
root writes, and where nothing is combined a copy takes the place of the kernel.  All make the same waits.

Three or more ranks, N, read less of a large buffer in two such rounds: each combines one share, and all gather them.
Each then reads 2 (N - 1) / N of the buffer, and not N - 1 of it.

One barrier is enough, since the slots are taken in turn.  Call k reads slot k % 2 after its barrier; the next to write
that slot is call k + 2, after the barrier of call k + 1, which every peer enters only after the wait of its call k + 1:
its kernel of call k is done then.  Without the wait for the last kernel a peer on another stream might still read.

A kernel waits for nobody, so two ranks on one GPU cannot block each other, and a GPU never hangs; a peer that does not
come is missed by the host, in the barrier, where the watchdog sees it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.errors import DeviceError
from mpistrategy.mpi.gpu import inventory
from mpistrategy.mpi.gpu.transports import ipc_kernels
from mpistrategy.mpi.gpu.transports.staged import StagedPath
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import PathName, communication_memory, error_of, first_error
from mpistrategy.mpi.multi_node.reduced_precision import between_nodes
from mpistrategy.mpi.shared_memory.node_sum import share

#: What goes in one piece: a pack of the usual size.  Each piece costs a wait and a barrier, some 20 us.
SLOT_BYTES = 32 * 2**20
#: From this size on, three or more ranks take two rounds.  The second costs a wait and a barrier, some 20 us; in that
#: time two thirds of 1 MiB, which three ranks save, cross the bus of a GPU (PCIe 4, 24 GB/s).  Not measured on GPUs.
SHARED_BYTES = 2**20
_ON_DEVICE = 3  # cudaMemcpyKind
_TRIAL_SIZE = 1003


class IpcPath:
    """See `mpistrategy.mpi.interface.gpu_transport.DevicePath`; made by `join`, on the current device.

    Args:
        ranks: who takes part.  Where they are on several nodes, each node has a path of its own, on which ranks are
            counted from 0 to the number of ranks of the node.
        slot_bytes: of each of the two slots; a multiple of 1 MiB, since CUDA may place smaller memory together.
    """

    name: PathName = "ipc"

    def __init__(self, ranks: Communicator, slot_bytes: int) -> None:
        self._cupy = cupy_for("an array in GPU memory")
        self._ranks = ranks
        nodes = ranks.node_of
        #: The ranks of this node, and this one's place among them.
        self._members = [rank for rank, node in enumerate(nodes) if node == nodes[ranks.rank]]
        self._me, self._size = self._members.index(ranks.rank), len(self._members)
        self._slot_bytes = slot_bytes
        self._runtime = self._cupy.cuda.runtime
        self._device = self._runtime.getDevice()
        # CUDA's objects are made later, in `offer`: the peers are told if that fails.
        self._staged: Any = None
        self._written: Any = None
        self._read: Any = None
        self._mine = 0
        #: The peers' memory, by their place.
        self._opened: dict[int, int] = {}
        #: The addresses of all ranks' memory, on the device.
        self._table: Any = None
        self._kernels: dict[str, Any] = {}
        self._calls = 0

    def offer(self) -> str:
        """Take memory, and have the kernels; return how the peers find the memory."""
        event = self._cupy.cuda.Event
        self._staged, self._written, self._read = StagedPath(), event(disable_timing=True), event(disable_timing=True)
        self._staged.make_room_for_all()
        module = self._cupy.RawModule(code=ipc_kernels.SOURCE, options=ipc_kernels.OPTIONS)
        self._kernels = {name: module.get_function(name) for name in ipc_kernels.NAMES}
        self._mine = self._runtime.malloc(2 * self._slot_bytes)
        handle = bytes(self._runtime.ipcGetMemHandle(self._mine))
        return json.dumps({"handle": handle.hex(), "gpu": inventory.identity(self._device)})

    def open(self, offers: list[str]) -> None:
        """Open the peers' memory, of which all ranks' `offers` tell.

        Raises:
            OSError: when this rank's GPU cannot read that of a peer; CUDA's errors are other ones.
        """
        for place, rank in enumerate(self._members):
            if place != self._me:
                told = json.loads(offers[rank])
                self._look_at(told["gpu"], rank)
                self._opened[place] = self._runtime.ipcOpenMemHandle(bytes.fromhex(told["handle"]))
        addresses = [self._opened.get(place, self._mine) for place in range(self._size)]
        self._table = self._cupy.asarray(np.array(addresses, np.uint64))
        self._read.record(self._cupy.cuda.get_current_stream())

    def _look_at(self, gpu: str, rank: int) -> None:
        """Raise OSError if CUDA says that this rank's GPU cannot read another one's memory.

        It says nothing of GPUs that this process does not see: opening their memory shows it.
        """
        mine = self._device
        for index in range(self._runtime.getDeviceCount()):
            is_theirs = index != mine and gpu != "" and gpu == inventory.identity(index)
            if is_theirs and not self._runtime.deviceCanAccessPeer(mine, index):
                raise OSError(f"GPU:{mine} cannot read the memory of GPU:{index}, which rank {rank} drives")

    def make_room(self, nbytes: int) -> None:
        """Need nothing more than the slots; but tell the other ranks, before they agree, of arrays on another GPU.

        Raises:
            DeviceError: then.
        """
        device = self._runtime.getDevice()
        if device != self._device:
            raise DeviceError.at(
                "a collective within a node",
                found=f"arrays on GPU:{device}",
                expected=f"arrays on GPU:{self._device}, as before: the ranks have opened that one's memory",
            )

    def by_host(self, ranks: Communicator, dtype: np.dtype[Any], op: str, wire: str | None = None) -> str:
        """Return why arrays of a dtype are combined on the host; "" where they are not."""
        if between_nodes(ranks, wire, dtype, op) is not None:
            return "the wire's dtype is made on the host"
        return "" if f"{op.lower()}_{dtype.name}" in self._kernels else f"ipc knows no {op} of {dtype.name}"

    def allreduce(self, ranks: Communicator, buffer: DeviceArray, op: str, wire: str | None = None) -> None:
        """Replace `buffer` by its combination over the ranks, in pieces of at most a slot."""
        if self.by_host(ranks, buffer.dtype, op, wire):
            self._staged.allreduce(ranks, buffer, op, wire)
            return
        shared = self._size > 2 and buffer.nbytes >= SHARED_BYTES
        for piece in self.pieces(buffer):
            parts = [share(piece.size, each, self._size, piece.itemsize) for each in range(self._size)]
            self._reduce(piece, op, parts if shared else [(0, piece.size)] * self._size)
            if shared:
                self.allgather(ranks, piece[slice(*parts[self._me])], [stop - start for start, stop in parts], piece)

    def pieces(self, buffer: DeviceArray) -> Iterator[DeviceArray]:
        """Yield the parts of a buffer that fit into a slot: all ranks have a share of each."""
        step = self._slot_bytes // buffer.itemsize
        for start in range(0, buffer.size, step):
            yield buffer[start : start + step]

    def reduce(self, ranks: Communicator, buffer: DeviceArray, root: int, op: str) -> None:
        """Replace `buffer` on `root` by its combination over the ranks: only that one reads its peers."""
        if self.by_host(ranks, buffer.dtype, op):
            self._staged.reduce(ranks, buffer, root, op)
        else:
            everyone = range(self._size)
            self._reduce(buffer, op, [(0, buffer.size if rank == root else 0) for rank in everyone])

    def reduce_scatter(self, ranks: Communicator, buffer: DeviceArray, counts: Sequence[int], op: str) -> None:
        """Replace each rank's share of `buffer` by its combination: each reads that of its peers."""
        if self.by_host(ranks, buffer.dtype, op):
            self._staged.reduce_scatter(ranks, buffer, counts, op)
        else:
            stops = list(accumulate(counts))
            self._reduce(buffer, op, [(stop - count, stop) for stop, count in zip(stops, counts, strict=True)])

    def _reduce(self, buffer: DeviceArray, op: str, wanted: Sequence[tuple[int, int]]) -> None:
        """Combine what each rank wants of all buffers: the elements from and up to, by rank."""
        kernel, step = self._kernels[f"{op.lower()}_{buffer.dtype.name}"], self._slot_bytes // buffer.itemsize
        begin, end = wanted[self._me]
        for start in range(0, buffer.size, step):
            stop = min(start + step, buffer.size)
            offset = self._write(buffer[start:stop])
            self._ranks.node_barrier()
            first, last = max(start, begin), min(stop, end)
            if first < last:
                self._combine(kernel, buffer[first:last], offset + (first - start) * buffer.itemsize)

    def bcast(self, ranks: Communicator, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by that of `root`: the others copy it out of its memory."""
        for start in range(0, buffer.nbytes, self._slot_bytes):
            nbytes, address = min(self._slot_bytes, buffer.nbytes - start), buffer.data.ptr + start
            sends = self._me == root
            offset = self._write_bytes(address, nbytes if sends else 0)
            self._ranks.node_barrier()
            if not sends:
                self._copy(address, self._opened[root] + offset, nbytes)
                self._has_read()

    def allgather(self, ranks: Communicator, block: DeviceArray, counts: Sequence[int], together: DeviceArray) -> None:
        """Write all ranks' blocks into `together`: each rank copies its peers' out of their memory."""
        sizes = [count * block.itemsize for count in counts]
        begins = [stop - size for stop, size in zip(accumulate(sizes), sizes, strict=True)]
        me = self._me
        if block.data.ptr != together.data.ptr + begins[me]:
            self._copy(together.data.ptr + begins[me], block.data.ptr, sizes[me])
        for start in range(0, max(sizes), self._slot_bytes):
            parts = [min(self._slot_bytes, max(0, size - start)) for size in sizes]
            offset = self._write_bytes(block.data.ptr + start, parts[me])
            self._ranks.node_barrier()
            for peer, address in self._opened.items():
                self._copy(together.data.ptr + begins[peer] + start, address + offset, parts[peer])
            self._has_read()

    def _write(self, piece: DeviceArray) -> int:
        """Copy a piece to the next slot and wait until it is there, and this rank's last kernel done."""
        return self._write_bytes(piece.data.ptr, piece.nbytes)

    def _write_bytes(self, address: int, nbytes: int) -> int:
        offset = self._calls % 2 * self._slot_bytes
        self._calls += 1
        stream = self._cupy.cuda.get_current_stream()
        stream.wait_event(self._read)
        self._copy(self._mine + offset, address, nbytes)
        self._written.record(stream)
        with self._ranks.guard.own_gpu():
            self._written.synchronize()
        return offset

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            stream = self._cupy.cuda.get_current_stream()
            self._runtime.memcpyAsync(target, source, nbytes, _ON_DEVICE, stream.ptr)

    def _has_read(self) -> None:
        """Note that what has been put on the current stream is all that this rank reads in this call."""
        self._read.record(self._cupy.cuda.get_current_stream())

    def _combine(self, kernel: Any, piece: DeviceArray, offset: int) -> None:
        """Launch the kernel that reads the slot of every rank and writes the result to `piece`."""
        is_aligned = piece.data.ptr % ipc_kernels.PACK_BYTES == 0 == offset % ipc_kernels.PACK_BYTES
        packs = piece.nbytes // ipc_kernels.PACK_BYTES if is_aligned else 0
        blocks = -(-(packs or piece.size) // ipc_kernels.THREADS)
        numbers = (np.int32(self._size), np.uint64(offset), np.uint64(packs), np.uint64(piece.size))
        grid = (max(1, min(blocks, ipc_kernels.MOST_BLOCKS)),)
        kernel(grid, (ipc_kernels.THREADS,), (piece, self._table, *numbers))
        self._has_read()

    def trial(self, number: int) -> str:
        """Sum known numbers over the ranks; return what is wrong, "" if nothing, on all ranks alike.  Collective."""
        buffer = communication_memory(self._cupy, min(_TRIAL_SIZE, self._slot_bytes // 8), np.dtype("float64"))
        offsets: list[int] = []

        def write() -> None:
            buffer.fill(self._me + number)
            offsets.append(self._write(buffer))

        def combine() -> str:
            self._combine(self._kernels["sum_float64"], buffer, offsets[0])
            found = np.unique(buffer.get()).tolist()
            right = sum(place + number for place in range(self._size))
            return "" if found == [right] else f"a wrong sum: {found[:3]} for {right}"

        return first_error(self._ranks, error_of(write)) or first_error(self._ranks, error_of(combine))

    def free(self) -> None:
        """Free the memory, once no kernel reads it and no peer has it open."""
        with self._cupy.cuda.Device(self._device):
            self._free()

    def _free(self) -> None:
        if self._staged is not None:
            self._staged.free()
        if self._read is not None:
            error_of(self._read.synchronize)
        self._ranks.node_barrier()
        while self._opened:
            _, address = self._opened.popitem()
            error_of(partial(self._runtime.ipcCloseMemHandle, address))
        self._ranks.node_barrier()
        if self._mine:
            error_of(partial(self._runtime.free, self._mine))
            self._mine = 0


def join(ranks: Communicator) -> IpcPath | str:
    """Return the path, or why these ranks cannot have it; the same on all.  Collective.

    That it works is found out by doing it: containers and MIG devices keep processes from each other's memory in ways
    that CUDA does not tell.
    """
    path, offers = IpcPath(ranks, SLOT_BYTES), []

    def offer() -> None:
        offers.append(path.offer())

    trouble = first_error(ranks, error_of(offer))
    if not trouble:
        everyone = ranks.allgather_text(offers[0])
        trouble = first_error(ranks, error_of(lambda: path.open(everyone)))
    # Each slot once, and the first again.
    trouble = trouble or path.trial(1) or path.trial(2) or path.trial(3)
    if not trouble:
        return path
    path.free()
    return trouble
