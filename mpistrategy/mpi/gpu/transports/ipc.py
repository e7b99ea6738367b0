"""The path within a node: every rank writes its buffer where its peers can read it, and adds up all of them itself.

Each rank has two slots of GPU memory that its peers have opened (CUDA's inter-process communication: between GPUs that
reach each other's memory, or for ranks that share one GPU).  An all-reduce, or a piece of one, is

1. wait for this rank's last kernel, and copy the buffer to a slot, on the current stream;
2. wait for both (an event);
3. meet the ranks of the node (a barrier of the host, a microsecond);
4. launch the kernel that reads this slot of all ranks, in rank order, and writes the result to the buffer.

One barrier is enough, since the slots are taken in turn.  Call k reads slot k % 2 after its barrier; the next to write
that slot is call k + 2, after the barrier of call k + 1, which every peer enters only after the wait of its call k + 1:
its kernel of call k is done then.  Without the wait for the last kernel a peer on another stream might still read.

A kernel waits for nobody, so two ranks on one GPU cannot block each other, and a GPU never hangs; a peer that does not
come is missed by the host, in the barrier, where the watchdog sees it.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.errors import DeviceError
from mpistrategy.mpi.gpu import inventory
from mpistrategy.mpi.gpu.transports import ipc_kernels
from mpistrategy.mpi.gpu.transports.staged import StagedPath
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import PathName, communication_memory, error_of, first_error

#: What goes in one piece: a pack of the usual size.  Each piece costs a wait and a barrier, some 20 us.
SLOT_BYTES = 32 * 2**20
_ON_DEVICE = 3  # cudaMemcpyKind
_TRIAL_SIZE = 1003


class IpcPath:
    """See `mpistrategy.mpi.interface.gpu_transport.DevicePath`; made by `join`, on the current device.

    Args:
        ranks: who takes part: the ranks of one node.
        slot_bytes: of each of the two slots; a multiple of 1 MiB, since CUDA may place smaller memory together.
    """

    name: PathName = "ipc"

    def __init__(self, ranks: Communicator, slot_bytes: int) -> None:
        self._cupy = cupy_for("an array in GPU memory")
        self._ranks = ranks
        self._slot_bytes = slot_bytes
        self._runtime = self._cupy.cuda.runtime
        self._device = self._runtime.getDevice()
        # CUDA's objects are made later, in `offer`: the peers are told if that fails.
        self._staged: Any = None
        self._written: Any = None
        self._read: Any = None
        self._mine = 0
        #: The peers' memory, by rank.
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
        """Open the peers' memory.

        Raises:
            OSError: when this rank's GPU cannot read that of a peer; CUDA's errors are other ones.
        """
        for rank, offer in enumerate(offers):
            if rank != self._ranks.rank:
                told = json.loads(offer)
                self._look_at(told["gpu"], rank)
                self._opened[rank] = self._runtime.ipcOpenMemHandle(bytes.fromhex(told["handle"]))
        addresses = [self._opened.get(rank, self._mine) for rank in range(len(offers))]
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

    def allreduce(self, ranks: Communicator, buffer: DeviceArray, op: str) -> None:
        """Replace `buffer` by its combination over the ranks, in pieces of at most a slot."""
        kernel = self._kernels.get(f"{op.lower()}_{buffer.dtype.name}")
        if kernel is None or getattr(ranks, "rounds", False):
            self._staged.allreduce(ranks, buffer, op)
            return
        step = self._slot_bytes // buffer.itemsize
        for start in range(0, buffer.size, step):
            piece = buffer[start : start + step]
            offset = self._write(piece)
            self._ranks.node_barrier()
            self._combine(kernel, piece, offset)

    def _write(self, piece: DeviceArray) -> int:
        """Copy a piece to the next slot and wait until it is there, and this rank's last kernel done."""
        offset = self._calls % 2 * self._slot_bytes
        self._calls += 1
        stream = self._cupy.cuda.get_current_stream()
        stream.wait_event(self._read)
        self._runtime.memcpyAsync(self._mine + offset, piece.data.ptr, piece.nbytes, _ON_DEVICE, stream.ptr)
        self._written.record(stream)
        with self._ranks.guard.own_gpu():
            self._written.synchronize()
        return offset

    def _combine(self, kernel: Any, piece: DeviceArray, offset: int) -> None:
        """Launch the kernel that reads the slot of every rank and writes the result to `piece`."""
        is_aligned = piece.data.ptr % ipc_kernels.PACK_BYTES == 0
        packs = piece.nbytes // ipc_kernels.PACK_BYTES if is_aligned else 0
        blocks = -(-(packs or piece.size) // ipc_kernels.THREADS)
        numbers = (np.int32(self._ranks.size), np.uint64(offset), np.uint64(packs), np.uint64(piece.size))
        grid = (max(1, min(blocks, ipc_kernels.MOST_BLOCKS)),)
        kernel(grid, (ipc_kernels.THREADS,), (piece, self._table, *numbers))
        self._read.record(self._cupy.cuda.get_current_stream())

    def trial(self, number: int) -> str:
        """Sum known numbers over the ranks; return what is wrong, "" if nothing, on all ranks alike.  Collective."""
        buffer = communication_memory(self._cupy, min(_TRIAL_SIZE, self._slot_bytes // 8), np.dtype("float64"))
        offsets: list[int] = []

        def write() -> None:
            buffer.fill(self._ranks.rank + number)
            offsets.append(self._write(buffer))

        def combine() -> str:
            self._combine(self._kernels["sum_float64"], buffer, offsets[0])
            found = np.unique(buffer.get()).tolist()
            right = sum(rank + number for rank in range(self._ranks.size))
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
