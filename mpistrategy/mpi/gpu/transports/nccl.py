"""The NCCL path: NVIDIA's library reduces on the GPUs, and the host only puts the work on the current stream.

Nothing waits: NCCL reads after earlier work on the stream, and later work sees the result.  How far
the GPU has come is noted where the watchdog sees it (`watchdog.gpu_progress`): a peer that never comes ends the job
with a roll call, wherever the program waits for the result.  Wherever this file waits itself, it does so with a limit.

With NCCL, MPI carries memory of the host only, so the two never wait for each other on a GPU.

Each pack is a call of its own.  NCCL can join calls into one launch (groups), which pays for many small arrays: those
are already in one pack.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import DeviceArray, cupy_for
from mpistrategy.errors import DeviceError
from mpistrategy.mpi.contract.channel import growing_pauses
from mpistrategy.mpi.interface.gpu_transport import (
    DevicePath,
    PathName,
    communication_memory,
    first_error,
    in_order,
    kernels_for,
)
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.watchdog.gpu_progress import GpuProgress

#: For how long a first sum may take: NCCL connects to the peers in it.
_TRIAL_SECONDS = 60.0
_TRIAL_SIZE = 2**16
_WHERE = "a collective by NCCL"
#: Never freed: the GPU may still write its progress there.
_retained: list[GpuProgress] = []


def version() -> int:
    """Return the version of the NCCL that CuPy has loaded; 0 without one."""
    with warnings.catch_warnings(), suppress(Exception):  # a CuPy without it, or one that cannot load it: of many types
        warnings.simplefilter("ignore")  # CuPy warns without one; a user who asked for NCCL gets our warning
        from cupy.cuda import nccl

        return int(nccl.get_version()) if nccl.available else 0
    return 0


class NcclPath(DevicePath):
    """See `mpistrategy.mpi.interface.gpu_transport.DevicePath`; made by `join`.

    Args:
        ranks: the ranks that take part.
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
        kernels_for(self._cupy)
        self._progress = GpuProgress(self._cupy, self._ask)
        ranks.guard.gpu_progress = self._progress

    def check(self) -> None:
        """Raise DeviceError if NCCL has failed, or is for another GPU."""
        device = self._cupy.cuda.runtime.getDevice()
        if device != self._device:
            raise DeviceError.at(
                _WHERE,
                found=f"arrays on GPU:{device}",
                expected=f"arrays on GPU:{self._device}, as before: NCCL connects one GPU of each rank",
            )
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

    def _ask(self) -> None:
        """Raise the error that NCCL has reported since, if any; in any thread, and without waiting."""
        if self._asking.acquire(blocking=False):
            try:
                if not self._is_gone:
                    self._nccl.check_async_error()
            finally:
                self._asking.release()

    def _give_up(self, why: str) -> None:
        """Abort NCCL's work under way, so that nothing waits for it."""
        if not self._failure:
            self._failure = why
            self._let_go(self._nccl.abort)

    def _let_go(self, how: Callable[[], object]) -> None:
        with self._asking:
            self._is_gone = True
            how()

    def reduce(
        self,
        ranks: Ranks,
        buffer: DeviceArray,
        op: str,
        root: int | None = None,
        wire: str | None = None,
    ) -> None:
        """Replace `buffer` by its combination over the ranks, on `root` or on all, on the current stream."""
        if buffer.dtype.kind == "c" and op == "PROD":  # NCCL sees pairs of floats: it can add them
            blocks = communication_memory(self._cupy, ranks.size * buffer.size, buffer.dtype)
            self.allgather(ranks, buffer, [buffer.size] * ranks.size, blocks)
            buffer[...] = blocks.reshape((ranks.size, buffer.size)).prod(axis=0)
            return
        with in_order(self._cupy, buffer, op) as values:  # NCCL's MIN and MAX of floats may lose a NaN
            parts = 2 if values.dtype.kind == "c" else 1
            name = values.dtype.name if parts == 1 else f"float{values.dtype.itemsize * 4}"
            count, pointer = int(values.size) * parts, values.data.ptr
            arguments = pointer, pointer, count, _number(name.upper()), _number(op)
            if root is None:
                self._begin(count, self._nccl.allReduce, *arguments)
            else:
                self._begin(count, self._nccl.reduce, *arguments, root)

    def bcast(self, ranks: Ranks, buffer: DeviceArray, root: int) -> None:
        """Replace `buffer` by `root`'s buffer."""
        self._begin(buffer.nbytes, self._nccl.bcast, buffer.data.ptr, buffer.nbytes, _number("INT8"), root)

    def allgather(self, ranks: Ranks, block: DeviceArray, counts: Sequence[int], target: DeviceArray) -> None:
        """Write all ranks' blocks into `target`; blocks of several sizes are broadcast one after the other."""
        if len(set(counts)) > 1:
            super().allgather(ranks, block, counts, target)
            for root, stop in enumerate(accumulate(counts)):
                self.bcast(ranks, target[stop - counts[root] : stop], root)
        else:
            arguments = block.data.ptr, target.data.ptr, block.nbytes, _number("INT8")
            self._begin(target.nbytes, self._nccl.allGather, *arguments)

    def _begin(self, size: int, launch: Callable[..., None], *arguments: Any) -> None:
        """Put a collective on the current stream, and note it where the watchdog sees it; nothing for a size of 0."""
        if not size:
            return
        if self._progress.is_full:
            self._wait_for_all()
        with self._progress.collective(self._ranks.guard.record.last()) as stream:
            launch(*arguments, stream)

    def _wait_for_all(self, seconds: float = math.inf) -> str:
        """Wait until the GPU has done all its work; return why NCCL has failed before, else "".

        The watchdog looks for a peer that never comes.

        Args:
            seconds: for how long the GPU may be in a collective; earlier work does not count.

        Raises:
            DeviceError: when NCCL has failed, or that takes too long; it is given up then.
        """
        end = math.inf
        with self._ranks.guard.own_gpu():  # the watchdog sees what the GPU is doing
            for pause in growing_pauses():
                if self._progress.is_over:
                    break
                if end == math.inf and self._progress.is_in_one:
                    end = time.monotonic() + seconds
                if time.monotonic() > end:
                    self._give_up(f"no result within {seconds:g} s")
                self.check()
                time.sleep(pause)
        return self._failure

    def trial(self) -> str:
        """Sum known numbers over the ranks; return why the result is not there or wrong, "" if it is right."""
        buffer = communication_memory(self._cupy, _TRIAL_SIZE, np.dtype("float64"))
        buffer.fill(self._ranks.rank + 1.0)
        self.reduce(self._ranks, buffer, "SUM")
        self._wait_for_all(min(_TRIAL_SECONDS, self._ranks.guard.timeout / 2))
        sums = np.unique(buffer.get())
        total = self._ranks.size * (self._ranks.size + 1) / 2
        return "" if sums.tolist() == [total] else f"a wrong sum: {sums[:3].tolist()} for {total}"

    def free(self) -> None:
        """Free NCCL's communicator, once all GPUs are done with it."""
        with self._cupy.cuda.Device(self._device):
            self.leave(first_error(self._ranks, self._wait_for_all))

    def leave(self, trouble: str) -> None:
        """Let go of NCCL where all ranks do; without waiting for anything if some rank has trouble."""
        self._ranks.guard.gpu_progress = None
        if trouble:
            self._give_up(trouble)
            _retained.append(self._progress)
        if not self._failure:
            self._let_go(self._nccl.destroy)


def join(ranks: Ranks) -> NcclPath | str:
    """Return the path, or why NCCL cannot connect these ranks; the same on all.  Collective.

    The current device must be this rank's GPU.
    """
    paths: list[NcclPath] = []
    unique_id = ranks.allgather_text("" if ranks.rank else _unique_id())[0]
    if unique_id.startswith("!"):
        return f"it does not start: {unique_id[1:]}"

    def connect() -> None:
        communicator = _communicator(ranks, bytes.fromhex(unique_id))
        try:
            paths.append(NcclPath(ranks, communicator))
        except Exception:
            communicator.abort()  # otherwise CuPy would destroy it, and wait for the peers
            raise

    # All ranks are through before the first of them uses it: what connecting does to a GPU must not meet a collective.
    trouble = first_error(ranks, connect) or first_error(ranks, lambda: paths[0].trial())
    if not trouble:
        return paths[0]
    for path in paths:
        path.leave(trouble)
    return f"it does not connect the ranks: {trouble}"


def _unique_id() -> str:
    """Return a new unique id of NCCL as text: in CuPy 14 it is bytes, before it was a tuple of signed numbers.

    Without one the text is "!" and the error.
    """
    from cupy.cuda import nccl

    try:
        return bytes(number & 0xFF for number in nccl.get_unique_id()).hex()
    except Exception as error:  # CuPy's NcclError
        return f"!{type(error).__name__}: {error}"


def _communicator(ranks: Ranks, unique_id: bytes) -> Any:
    from cupy.cuda import nccl

    try:
        return nccl.NcclCommunicator(ranks.size, unique_id, ranks.rank)
    except TypeError:  # a CuPy before 14
        return nccl.NcclCommunicator(ranks.size, tuple(np.frombuffer(unique_id, np.int8).tolist()), ranks.rank)


def _number(name: str) -> int:
    """Return NCCL's number of a dtype or an operation; not every CuPy has a name for bfloat16."""
    from cupy.cuda import nccl

    number: int = 9 if name == "BFLOAT16" else getattr(nccl, f"NCCL_{name}")
    return number
