"""Gives GPU memory to MPI in all ranks, and checks the results.

The doctor does this last, in its own ranks: an MPI that does not take GPU memory may end them.  There is no trial where
the library does not say that it takes GPU memory, unless the user says so.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mpistrategy.cli.doctor.findings import Job
from mpistrategy.cli.ranks import Ranks
from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.gpu import cuda_aware
from mpistrategy.mpi.gpu.cuda_aware import VARIABLE, Outcome
from mpistrategy.mpi.gpu.device_selection import Sight
from mpistrategy.mpi.tuning.thresholds import library_name
from mpistrategy.options import is_on

#: MPI libraries send small and large messages by different protocols.
_COUNTS = (2, 2**10, 2**18, 2**21)
_ROUNDS = 3
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA
#: What turns on the GPU support of a library that is off by default, by how its version text begins.
SWITCHES = {
    "mpi version    : cray mpich": "MPICH_GPU_SUPPORT_ENABLED",
    "mvapich2": "MV2_USE_CUDA",
    "mvapich ": "MVP_USE_CUDA",
    "intel(r) mpi": "I_MPI_OFFLOAD",
}


def obstacle() -> str:
    """Return why GPU memory is not given to MPI here: by the user's word, else the library's; "" where it is tried."""
    try:
        word, version = cuda_aware.user_setting(), cuda_aware.identity()[0]
        if word is not None:
            return "" if word else "the user says so"
        switch = next((name for start, name in SWITCHES.items() if version.lower().startswith(start)), "")
        if is_on(os.environ.get(switch, "")) if switch else says_yes(cuda_aware.mapped_files()):
            return ""
        does_not = f"takes GPU memory with {switch}=1 only" if switch else "does not say that it supports CUDA"
        return f"{library_name(version)} {does_not}"
    except (MpiStrategyError, OSError) as error:
        return str(error)


def says_yes(files: Sequence[str]) -> bool:
    """Return whether the MPI library among these files says that it supports CUDA.

    Raises:
        OSError: when a file is gone.
    """
    opened = [ctypes.CDLL(path) for path in files if cuda_aware.is_mpi(path) or "/libopen-pal.so" in path]
    for library in opened:  # conda-forge's Open MPI is built with CUDA and switched off
        with suppress(ValueError):
            if not ctypes.c_bool.in_dll(library, "opal_cuda_support").value:
                return False
    for library in opened:  # before the next one: MPICH 4.0's ends the process where asserts are compiled in
        if hasattr(library, "MPIX_GPU_query_support"):
            flag = ctypes.c_int(0)
            return library.MPIX_GPU_query_support(_CUDA, ctypes.byref(flag)) == 0 and bool(flag.value)
    return any(library.MPIX_Query_cuda_support() for library in opened if hasattr(library, "MPIX_Query_cuda_support"))


def try_all(ranks: Ranks, local_rank: int, job: Job) -> Outcome | None:
    """Return what came of GPU memory, and keep it for strategies; None where it was not tried.  Collective.

    Args:
        ranks: all of them.
        local_rank: this rank's index on its node.
        job: the facts of all ranks, as rank 0 knows them.
    """
    willing = all(Sight.read(rank["sight"]).gpus and not rank["cuda_refused"] for rank in job.facts)
    if not ranks.from_first(int(willing and ranks.size > 1)):
        return None
    if ranks.rank == 0:
        sys.stderr.write(f"mpistrategy doctor: gives GPU memory to MPI. If this ends here: export {VARIABLE}=0\n")
    outcome = _trial(ranks, local_rank)
    if ranks.rank == 0 and outcome.outcome != "unverified":
        with suppress(OSError):  # strategies then go on as if nobody had tried
            cuda_aware.save("several nodes" if len(job.nodes) > 1 else "one node", outcome)
    return outcome


def _trial(ranks: Ranks, local_rank: int) -> Outcome:
    """Return what came of sums of known numbers.  Collective."""
    pattern = np.resize(np.arange(251, dtype=np.float32), _COUNTS[-1])
    pairs: list[tuple[Any, Any]] = []
    try:
        import cupy
        import cupyx

        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        operand = cupy.asarray(pattern + np.float32(ranks.rank))
        pairs += [(operand[:count], cupy.zeros_like(operand[:count])) for count in _COUNTS]
        on_host, total = (cupyx.empty_pinned(pattern.shape, np.float32) for _ in range(2))
        stream = cupy.cuda.get_current_stream()
        stream.synchronize()
    except Exception as error:  # of CuPy's many types
        sys.stderr.write(f"[rank {ranks.rank}] GPU memory was not tried: {type(error).__name__}: {error}\n")
        pairs.clear()
    if not ranks.all_right(bool(pairs)):
        return Outcome("unverified", "some rank could not try it: see its message")
    expected, is_right = pattern * ranks.size + ranks.size * (ranks.size - 1) / 2, True
    for part, result in pairs:
        ranks.comm.Allreduce(part, result)
        is_right = is_right and bool((cupy.asnumpy(result) == expected[: len(part)]).all())
    if not ranks.all_right(is_right):
        return Outcome("wrong", "other numbers than were sent")

    def staged() -> None:
        operand.get(out=on_host)
        ranks.comm.Allreduce(on_host, total)
        result.set(total)
        stream.synchronize()

    direct = pattern.nbytes / _seconds(ranks, lambda: ranks.comm.Allreduce(operand, result))
    by_host = pattern.nbytes / _seconds(ranks, staged)
    text = f"{ranks.size} ranks, {direct / 1e9:.1f} GB/s; {by_host / 1e9:.1f} GB/s staged through the host"
    return Outcome("right" if direct >= by_host else "slower", text)


def _seconds(ranks: Ranks, work: Callable[[], None]) -> float:
    """Return the seconds of one call of several in a row; the slowest rank counts.  Collective."""
    ranks.comm.Barrier()
    before = time.perf_counter()
    for _ in range(_ROUNDS):
        work()
    return ranks.slowest(time.perf_counter() - before) / _ROUNDS
