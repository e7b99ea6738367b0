"""The NCCL path: NVIDIA's library reduces on the GPUs, and the host only puts the work on the current stream.

Nothing waits: what is on the stream before is done before NCCL reads, and what comes after finds the result.  How far
the GPU has come is noted where the watchdog sees it (`watchdog.gpu_progress`): a peer that never comes ends the job
with a roll call, wherever the program waits for the result.  Wherever this file waits itself, it does so with a limit.

With NCCL, MPI carries memory of the host only, so the two never wait for each other on a GPU.

Each pack is a call of its own.  NCCL can join calls into one launch (groups), which pays for many small ones: those
are one pack already.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.errors import DeviceError
from mpistrategy.mpi.contract.channel import growing_pauses
from mpistrategy.mpi.gpu.cuda_driver import stream_writer
from mpistrategy.mpi.gpu.transports import ordered_keys
from mpistrategy.mpi.gpu.transports.staged import StagedPath
from mpistrategy.mpi.interface.gpu_transport import (
    DevicePath,
    PathName,
    communication_memory,
    error_of,
    first_error,
    own_part,
)
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.reduced_precision import by_nccl
from mpistrategy.mpi.watchdog.gpu_progress import GpuProgress

#: For how long a first sum may take: NCCL connects to the peers in it.
_TRIAL_SECONDS = 60.0
_TRIAL_SIZE = 2**16
_WHERE = "a collective by NCCL"
#: Never freed: the GPU may still write its progress there.
_left: list[GpuProgress] = []
#: ncclBfloat16, which not every CuPy has a name for.
_BFLOAT16 = 9
_DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")


def version(cupy: Any) -> int:
    """Return the version of the NCCL that CuPy has loaded; 0 without one."""
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns without one; a user who asked for NCCL gets our warning
            from cupy.cuda import nccl

            return int(nccl.get_version()) if nccl.available else 0
    except Exception:  # a CuPy without it, or one that cannot load it: of many types
        return 0


class NcclPath(DevicePath):
    """See `mpistrategy.mpi.interface.gpu_transport.DevicePath`; made by `join`.

    Args:
        ranks: who takes part.
        communicator: CuPy's NcclCommunicator of these ranks, on the current device.
    """

    name: PathName = "nccl"

    def __init__(self, ranks: Ranks, communicator: Any) -> None:
        self._cupy = cupy_for(_WHERE)
        self._ranks = ranks
        self._nccl = communicator
        self._failure = ""
        self._is_gone = False
        #: Held while NCCL is asked how it is, and while it is let go of, which may take long.
        self._asking = threading.Lock()
        self._device = self._cupy.cuda.runtime.getDevice()
        self._staged = StagedPath()
        self._staged.make_room_for_all()
        ordered_keys.compile_for(self._cupy)
        self._progress = GpuProgress(self._cupy, self._ask, stream_writer)
        ranks.guard.gpu_progress = self._progress

    def make_room(self, nbytes: int) -> None:
        """Need nothing; but tell the other ranks, before they agree, if NCCL has failed or is for another GPU.

        Raises:
            DeviceError: then.
        """
        device = self._cupy.cuda.runtime.getDevice()
        if device != self._device:
            raise DeviceError.at(
                _WHERE,
                found=f"arrays on GPU:{device}",
                expected=f"arrays on GPU:{self._device}, as before: NCCL connects one GPU of each rank",
            )
        self._check()

    def _ask(self) -> None:
        """Raise the error that NCCL has reported since, if any; in any thread, and without waiting."""
        if self._asking.acquire(blocking=False):
            try:
                if not self._is_gone:
                    self._nccl.check_async_error()
            finally:
                self._asking.release()

    def _check(self) -> None:
        try:
            self._ask()
        except Exception as error:  # CuPy's NcclError
            self._give_up(str(error))
        if self._failure:
            raise DeviceError.at(
                _WHERE,
                found=f"that NCCL has failed ({self._failure})",
                expected="an NCCL that connects the ranks",
                fix="NCCL_DEBUG=INFO makes it say why; MPISTRATEGY_GPU_PATH=staged does without it.",
            )

    def _give_up(self, why: str) -> None:
        """Abort NCCL's work under way, so that nothing waits for it."""
        if not self._failure:
            self._failure = why
            self._let_go(self._nccl.abort)

    def _let_go(self, how: Callable[[], object]) -> None:
        with self._asking:
            self._is_gone = True
            how()

    def by_host(self, ranks: Ranks, dtype: np.dtype[Any], op: str, wire: str | None = None) -> str:
        """Return why arrays of a dtype are combined on the host; "" where they are not."""
        return "" if _is_native(dtype, op) or ordered_keys.are_for(dtype, op) else f"NCCL knows no {op} of {dtype.name}"

    def allreduce(
        self,
        ranks: Ranks,
        buffer: DeviceArray,
        op: str,
        wire: str | None = None,
        room: DeviceArray | None = None,
    ) -> None:
        """Replace `buffer` by its combination over the ranks, on the current stream.

        What NCCL does not know goes by way of the host.  With a `wire`, float32 travels in its dtype: NCCL rounds each
        sum to it.  A CuPy before 14 knows no bfloat16, and sends all digits.
        """
        if self.by_host(ranks, buffer.dtype, op):
            self._staged.allreduce(ranks, buffer, op, wire)
            return

        def put(nccl: Any, values: DeviceArray, stream: int) -> None:
            pointer, kind = values.data.ptr, _kind(nccl, values.dtype)
            self._nccl.allReduce(pointer, pointer, _count(values), kind, _operation(nccl, op), stream)

        dtype = by_nccl(ranks, wire, buffer.dtype, op)
        if dtype is None or (dtype.kind != "f" and int(self._cupy.__version__.partition(".")[0]) < 14):
            self._combine(buffer, op, put)
            return
        rounded = communication_memory(self._cupy, buffer.size, dtype) if room is None else room
        rounded[...] = buffer
        self._combine(rounded, op, put)
        buffer[...] = rounded

    def reduce(self, ranks: Ranks, buffer: DeviceArray, root: int, op: str) -> None:
        """Replace `buffer` on `root` by its combination over the ranks."""
        if self.by_host(ranks, buffer.dtype, op):
            self._staged.reduce(ranks, buffer, root, op)
            return

        def put(nccl: Any, values: DeviceArray, stream: int) -> None:
            pointer, kind = values.data.ptr, _kind(nccl, values.dtype)
            self._nccl.reduce(pointer, pointer, _count(values), kind, _operation(nccl, op), root, stream)

        self._combine(buffer, op, put)

    def bcast(self, ranks: Ranks, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by that of `root`."""

        def put(nccl: Any, stream: int) -> None:
            self._nccl.bcast(buffer.data.ptr, buffer.nbytes, nccl.NCCL_INT8, root, stream)

        self._begin(buffer.nbytes, put)

    def allgather(self, ranks: Ranks, block: DeviceArray, counts: Sequence[int], together: DeviceArray) -> None:
        """Write all ranks' blocks into `together`; blocks of several sizes are broadcast one after the other."""
        if len(set(counts)) > 1:
            place = together[own_part(ranks, counts)]
            if place.data.ptr != block.data.ptr:
                place[...] = block
            for root, stop in enumerate(accumulate(counts)):
                self.bcast(ranks, together[stop - counts[root] : stop], root)
            return

        def put(nccl: Any, stream: int) -> None:
            self._nccl.allGather(block.data.ptr, together.data.ptr, block.nbytes, nccl.NCCL_INT8, stream)

        self._begin(together.nbytes, put)

    def _combine(self, buffer: DeviceArray, op: str, put: Callable[[Any, DeviceArray, int], None]) -> None:
        """Put a reduction on the current stream; of keys for MIN and MAX of floats, of which NCCL's may lose a NaN."""

        def begin(values: DeviceArray) -> None:
            self._begin(values.size, lambda nccl, stream: put(nccl, values, stream))

        if ordered_keys.are_for(buffer.dtype, op):
            ordered_keys.combine(self._cupy, buffer, op, begin)
        else:
            begin(buffer)

    def _begin(self, size: int, put: Callable[[Any, int], None]) -> None:
        """Put a collective on the current stream, and note it where the watchdog sees it; nothing for a size of 0."""
        from cupy.cuda import nccl

        if not size:
            return
        if self._progress.is_full:
            self._wait_for_all()
        call = self._ranks.guard.current
        self._progress.begin(self._ranks.guard.record.last(), None if call is None else call.timeout)
        put(nccl, self._cupy.cuda.get_current_stream().ptr)
        self._progress.given()

    def _wait_for_all(self, seconds: float = math.inf) -> None:
        """Wait until the GPU is done with all that it was given; a peer that never comes is the watchdog's concern.

        Args:
            seconds: for how long the GPU may be in a collective; what it does before does not count.

        Raises:
            DeviceError: when NCCL has failed, or that takes too long; it is given up then.
        """
        end = math.inf
        with self._ranks.guard.own_gpu():  # the watchdog sees what the GPU is doing
            for pause in growing_pauses():
                if self._progress.is_over:
                    return
                if end == math.inf and self._progress.is_in_one:
                    end = time.monotonic() + seconds
                if time.monotonic() > end:
                    self._give_up(f"no result within {seconds:g} s")
                self._check()
                time.sleep(pause)

    def trial(self) -> str:
        """Sum known numbers over the ranks; return why the result is not there or wrong, "" if it is right."""
        buffer = communication_memory(self._cupy, _TRIAL_SIZE, np.dtype("float64"))
        buffer.fill(self._ranks.rank + 1.0)
        self.allreduce(self._ranks, buffer, "SUM")
        self._wait_for_all(min(_TRIAL_SECONDS, self._ranks.guard.timeout / 2))
        found = np.unique(buffer.get())
        right = self._ranks.size * (self._ranks.size + 1) / 2
        return "" if found.tolist() == [right] else f"a wrong sum: {found[:3].tolist()} for {right}"

    def free(self) -> None:
        """Free NCCL's communicator, once all GPUs are done with it."""
        with self._cupy.cuda.Device(self._device):
            self._staged.free()
            trouble = error_of(self._wait_for_all) or self._failure
            self.leave(first_error(self._ranks, trouble))

    def leave(self, trouble: str) -> None:
        """Let go of NCCL where all ranks do; without waiting for anything if some rank has trouble."""
        self._ranks.guard.gpu_progress = None
        if trouble:
            self._give_up(trouble)
            _left.append(self._progress)
        if not self._failure:
            self._let_go(self._nccl.destroy)


def join(ranks: Ranks) -> NcclPath | str:
    """Return the path, or why NCCL cannot connect these ranks; the same on all.  Collective.

    The current device must be the one that this rank drives.
    """
    made: list[NcclPath] = []
    told = ""
    if ranks.rank == 0:
        try:
            told = _unique_id()
        except Exception as error:  # CuPy's NcclError
            told = f"!{error}"
    told = ranks.allgather_text(told)[0]
    if told.startswith("!"):
        return f"it does not start: {told[1:]}"

    def connect() -> None:
        communicator = _communicator(ranks, bytes.fromhex(told))
        try:
            made.append(NcclPath(ranks, communicator))
        except Exception:
            communicator.abort()  # otherwise CuPy would destroy it, and wait for the peers
            raise

    # All ranks are through before the first of them uses it: what connecting does to a GPU must not meet a collective.
    trouble = first_error(ranks, error_of(connect)) or first_error(ranks, error_of(lambda: made[0].trial()))
    if not trouble:
        return made[0]
    for path in made:
        path.leave(trouble)
    return f"it does not connect the ranks: {trouble}"


def _unique_id() -> str:
    """Return a new unique id of NCCL as text: in CuPy 14 it is bytes, before it was a tuple of signed numbers."""
    from cupy.cuda import nccl

    return bytes(each & 0xFF for each in nccl.get_unique_id()).hex()


def _communicator(ranks: Ranks, unique_id: bytes) -> Any:
    from cupy.cuda import nccl

    try:
        return nccl.NcclCommunicator(ranks.size, unique_id, ranks.rank)
    except TypeError:  # a CuPy before 14
        return nccl.NcclCommunicator(ranks.size, tuple(np.frombuffer(unique_id, np.int8).tolist()), ranks.rank)


def _is_native(dtype: np.dtype[Any], op: str) -> bool:
    """Return whether NCCL does this as the host does.

    Complex numbers are added as pairs; it cannot multiply them.  Whether its MIN and MAX of floats keep a NaN depends
    on its version and on who has it.
    """
    if dtype.kind == "c":
        return op == "SUM" and dtype.itemsize in (8, 16)
    return dtype.name in _DTYPES and not (dtype.kind == "f" and op in ("MIN", "MAX"))


def _kind(nccl: Any, dtype: np.dtype[Any]) -> int:
    """Return NCCL's number of a dtype; of that of the parts of a complex one."""
    name = f"float{dtype.itemsize * 4}" if dtype.kind == "c" else dtype.name
    found: int = _BFLOAT16 if name == "bfloat16" else getattr(nccl, f"NCCL_{name.upper()}")
    return found


def _operation(nccl: Any, op: str) -> int:
    """Return NCCL's number of an operation."""
    found: int = getattr(nccl, f"NCCL_{op}")
    return found


def _count(values: DeviceArray) -> int:
    """Return how many numbers NCCL sees in an array."""
    return int(values.size) * (2 if values.dtype.kind == "c" else 1)
