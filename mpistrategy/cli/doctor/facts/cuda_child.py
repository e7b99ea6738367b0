"""The program of two ranks that passes GPU memory to MPI, in processes of its own because it may crash.

``python -m mpistrategy.cli.doctor.facts.cuda_child``; rank 0 prints one JSON object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpistrategy.cli.doctor.facts.ranks import Ranks

#: MPI libraries send small and large messages by different protocols.
_SIZES = (8, 4096, 2**20, 2**23)
_ROUNDS = 3


def main() -> None:
    """Exchange and add up known numbers, from GPU to GPU and through the host."""
    import cupy

    from mpistrategy.cli.doctor.facts.ranks import Ranks  # starts MPI

    ranks = Ranks()
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
        on_host = np.empty(_SIZES[-1], np.uint8)

        def direct() -> None:
            ranks.swap(mine, theirs)

        def staged() -> None:
            ranks.swap(cupy.asnumpy(mine), on_host)
            theirs.set(on_host)
            cupy.cuda.get_current_stream().synchronize()

        told = {"right": is_right, "nbytes": _SIZES[-1], "direct": _seconds(ranks, direct)}
        told["staged"] = _seconds(ranks, staged)
    if ranks.rank == 0:
        print(json.dumps(told), flush=True)


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
