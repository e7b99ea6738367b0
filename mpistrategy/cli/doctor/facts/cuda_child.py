"""The program of two ranks that passes GPU memory to MPI, in processes of its own because it may crash.

``python -m mpistrategy.cli.doctor.facts.cuda_child``; rank 0 prints JSON objects, of which the last counts.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpistrategy.cli.doctor.facts.ranks import Ranks

#: MPI libraries send small and large messages by different protocols.
_SIZES = (8, 4096, 2**20, 2**23)
_ROUNDS = 3


def main() -> None:
    """Exchange and add up known numbers, from GPU to GPU and through the host."""
    import cupy
    import cupyx

    from mpistrategy.cli.doctor.facts.ranks import Ranks  # starts MPI

    ranks = Ranks()
    print("STARTED", flush=True)
    device = ranks.rank % cupy.cuda.runtime.getDeviceCount()
    with cupy.cuda.Device(device):
        is_right = True
        for nbytes in _SIZES:
            mine = cupy.asarray(_pattern(nbytes, ranks.rank))
            theirs = cupy.zeros(nbytes, dtype=np.uint8)
            cupy.cuda.get_current_stream().synchronize()
            ranks.swap(mine, theirs)
            is_right = is_right and bool((cupy.asnumpy(theirs) == _pattern(nbytes, 1 - ranks.rank)).all())
            sums = cupy.asarray(np.full(nbytes // 4, ranks.rank + 1, np.float32))
            cupy.cuda.get_current_stream().synchronize()
            ranks.allreduce(sums)
            is_right = is_right and bool((cupy.asnumpy(sums) == 3).all())
        is_right = ranks.all_right(is_right)
        on_host = cupyx.empty_pinned((_SIZES[-1] // 4,), np.float32)
        stream = cupy.cuda.get_current_stream()

        def direct() -> None:
            ranks.allreduce(sums)

        def staged() -> None:
            sums.get(out=on_host)
            ranks.allreduce(on_host)
            sums.set(on_host)
            stream.synchronize()

        told = {"right": is_right, "nbytes": sums.nbytes, "direct": _seconds(ranks, direct)}
        told["staged"] = _seconds(ranks, staged)
        _tell(ranks, told)  # whatever becomes of NCCL
        with contextlib.suppress(Exception):  # no NCCL, or one GPU for both: of many types
            told["nccl"] = _seconds(ranks, _by_nccl(ranks, sums, stream))
    _tell(ranks, told)


def _tell(ranks: Ranks, told: dict[str, Any]) -> None:
    if ranks.rank == 0:
        print(f"\n{json.dumps(told)}", flush=True)


def _by_nccl(ranks: Ranks, sums: Any, stream: Any) -> Callable[[], None]:
    """Return a sum by NCCL of the two ranks."""
    from cupy.cuda import nccl

    mine, theirs = np.zeros(128, np.uint8), np.zeros(128, np.uint8)
    if ranks.rank == 0:
        mine[:] = [each & 0xFF for each in nccl.get_unique_id()]
    ranks.swap(mine, theirs)
    number = (mine if ranks.rank == 0 else theirs).tobytes()
    connected = nccl.NcclCommunicator(2, number, ranks.rank)

    def summed() -> None:
        connected.allReduce(sums.data.ptr, sums.data.ptr, sums.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
        stream.synchronize()

    summed()
    return summed


def _pattern(nbytes: int, rank: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.resize(np.arange(251, dtype=np.uint8), nbytes) + np.uint8(rank)


def _seconds(ranks: Ranks, work: Callable[[], None]) -> float:
    found = []
    for _ in range(_ROUNDS):
        ranks.barrier()
        before = time.perf_counter()
        work()
        found.append(ranks.slowest(time.perf_counter() - before))
    return min(found)


if __name__ == "__main__":
    main()
