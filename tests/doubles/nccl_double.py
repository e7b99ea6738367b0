"""An NCCL that is not there: what CuPy offers of it, over MPI between the ranks of the test.

As lazy as the streams of `cupy_double`: a rank takes part when somebody waits for its stream.  What it is given wrong
(another number of elements, another dtype than a peer) is not found, as by NCCL.
"""

from __future__ import annotations

import types
from typing import Any

import cupy_double
import numpy as np
from mpi4py import MPI

SUM, PROD, MAX, MIN = range(4)
_DTYPES = {6: "f2", 9: "bfloat16", 0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 7: "f4", 8: "f8"}
_BFLOAT16 = 9
_OPS = {SUM: MPI.SUM, PROD: MPI.PROD, MAX: MPI.MAX, MIN: MPI.MIN}
VERSION = 23203


class NcclError(RuntimeError):
    """What CuPy raises."""


class Faults:
    """What shall go wrong on this rank."""

    def __init__(self) -> None:
        self.no_id = self.no_start = self.wrong = self.stuck = False
        #: What `check_async_error` raises from now on.
        self.later = ""


faults = Faults()
#: The names of what was called.
calls: list[str] = []


class NcclCommunicator:
    """One rank's."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803  # CuPy's name
        calls.append("init")
        if not isinstance(commId, bytes):
            raise TypeError("Argument 'commId' has incorrect type")
        assert (ndev, rank, len(commId)) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank, 128)
        fails = np.array([faults.no_start], np.int32)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, fails, MPI.SUM)
        if fails[0]:  # a rank that cannot start closes its sockets
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR" if faults.no_start else "NCCL_ERROR_REMOTE_ERROR")
        first = np.frombuffer(commId, np.uint8).copy()
        MPI.COMM_WORLD.Bcast(first, 0)
        assert first.tobytes() == commId
        self._comm: Any = MPI.COMM_WORLD.Dup()
        self._begun = self._ended = 0

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        calls.append("allReduce")
        assert sendbuf == recvbuf
        dtype = np.dtype(cupy_double.bfloat16() if datatype == _BFLOAT16 else _DTYPES[datatype])
        memory = cupy_double._at(recvbuf, count * dtype.itemsize).view(dtype)
        under_way: list[Any] = []
        sent = np.empty_like(memory)
        comm, stuck, wrong = self._comm, faults.stuck, faults.wrong

        def ready() -> bool:
            if stuck:
                return False
            if not under_way:
                sent[...] = memory
                received = np.empty((comm.size, *memory.shape), dtype)
                if dtype.itemsize == 2:  # MPI does not add these
                    under_way.extend([comm.Iallgather(sent.view(np.uint8), received.view(np.uint8)), received])
                else:
                    under_way.extend([comm.Iallreduce(sent, received[0], _OPS[op]), received[:1]])
            return bool(under_way[0].Test())

        queue = next(each for each in cupy_double._streams() if each.ptr == stream)
        self._begun += 1

        def finish() -> None:
            total, *others = under_way[1]
            for other in others:
                total = (total + other).astype(dtype)  # as NCCL: each sum is rounded
            np.copyto(memory, total + dtype.type(wrong))
            self._ended += 1

        queue.put(finish, memory, ready=ready)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        calls.append("allGather")
        nbytes = count * np.dtype(_DTYPES[datatype]).itemsize
        mine, everyone = cupy_double._at(sendbuf, nbytes), cupy_double._at(recvbuf, nbytes * self._comm.size)
        received, comm, under_way = np.empty_like(everyone), self._comm, []

        def ready() -> bool:
            if not under_way:
                under_way.extend([mine.copy(), None])
                under_way[1] = comm.Iallgather(under_way[0], received)
            return bool(under_way[1].Test())

        queue = next(each for each in cupy_double._streams() if each.ptr == stream)
        self._begun += 1

        def finish() -> None:
            np.copyto(everyone, received)
            self._ended += 1

        queue.put(finish, everyone, ready=ready)

    def check_async_error(self) -> None:
        if faults.later:
            raise NcclError(faults.later)

    def abort(self) -> None:
        assert self._comm is not None
        calls.append("abort")
        self._comm = None

    def destroy(self) -> None:
        assert self._comm is not None
        calls.append("destroy")
        assert self._begun == self._ended, "freed under a collective"
        self._comm.Free()
        self._comm = None


def _unique_id() -> bytes:
    if faults.no_id:
        raise NcclError("NCCL_ERROR_INTERNAL_ERROR: no network")
    return bytes(range(128, 256))


def made() -> types.ModuleType:
    """Return the module."""
    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.available = True
    nccl.get_version = lambda: VERSION
    nccl.get_unique_id = _unique_id
    nccl.NcclCommunicator, nccl.NcclError = NcclCommunicator, NcclError
    for number, dtype in _DTYPES.items():
        if number == _BFLOAT16:
            continue
        setattr(nccl, f"NCCL_{np.dtype(dtype).name.upper()}", number)
    nccl.NCCL_SUM, nccl.NCCL_PROD, nccl.NCCL_MAX, nccl.NCCL_MIN = SUM, PROD, MAX, MIN
    return nccl
