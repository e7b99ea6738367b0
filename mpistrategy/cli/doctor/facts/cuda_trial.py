"""Gives GPU memory to MPI and sees what comes back: on one node, and between two where the job has several.

It is the last thing that the doctor does, in its own ranks: an MPI that does not take GPU memory may end them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from mpistrategy.mpi.gpu import cuda_trials
from mpistrategy.mpi.gpu.cuda_aware import VARIABLE
from mpistrategy.mpi.gpu.cuda_trials import Outcome, Place

if TYPE_CHECKING:
    from mpistrategy.cli.doctor.facts.facts import Facts
    from mpistrategy.cli.doctor.facts.ranks import Ranks

#: MPI libraries send small and large messages by different protocols.
_SIZES = (8, 4096, 2**20, 2**23)
_ROUNDS = 3
_RIGHT, _WRONG, _UNTRIED = 0.0, 1.0, 2.0
_PLACES: tuple[Place, ...] = ("one node", "several nodes")
#: From the best on.
_ORDER = ("right", "unverified", "wrong")


def try_all(ranks: Ranks, everyone: Sequence[Facts]) -> Outcome | None:
    """Return what came of GPU memory in pairs of ranks, and keep it for strategies; None for no pair.  Collective.

    Args:
        ranks: all of them.
        everyone: the facts of all, on rank 0.
    """
    pairs = _pairs(everyone) if ranks.rank == 0 else {}
    if ranks.told(len(pairs)) and ranks.rank == 0:
        sys.stderr.write(f"mpistrategy doctor: gives GPU memory to MPI. If this ends here: export {VARIABLE}=0\n")
        sys.stderr.flush()
    found: dict[Place, Outcome] = {}
    for place in _PLACES:
        one, other = (ranks.told(rank) for rank in pairs.get(place, (-1, -1)))
        if one < 0:
            continue
        found[place] = outcome = _tried(ranks, one, other)
        if ranks.rank == 0 and outcome.outcome != "unverified":
            with suppress(OSError):  # strategies then go on as if nobody had tried
                cuda_trials.save(ranks.library, place, outcome)
    if len(found) < 2:
        return next(iter(found.values()), None)
    worst = max((outcome.outcome for outcome in found.values()), key=_ORDER.index)
    far = found["several nodes"]
    reason = "; ".join(f"{place}: {outcome.reason}" for place, outcome in found.items())
    return Outcome(worst, reason, far.direct, far.staged)


def _pairs(everyone: Sequence[Facts]) -> dict[Place, tuple[int, int]]:
    """Return two ranks of one node, and one each of two nodes, where MPI may take GPU memory."""
    if any(each.cuda_aware.startswith("no ") for each in everyone):
        return {}
    nodes: dict[int, list[int]] = {}
    for each in everyone:
        if each.cuda_aware:
            nodes.setdefault(each.leader, []).append(each.rank)
    pairs: dict[Place, tuple[int, int]] = {}
    together = next((members for members in nodes.values() if len(members) > 1), None)
    if together is not None:
        pairs["one node"] = (together[0], together[1])
    if len(nodes) > 1:
        first, second, *_ = nodes.values()
        pairs["several nodes"] = (first[0], second[0])
    return pairs


def _tried(ranks: Ranks, one: int, other: int) -> Outcome:
    """Return what came of it in these two ranks.  Collective."""
    pair = ranks.among(one, other)
    figures = [_RIGHT, 0.0, 0.0]
    if pair is not None:
        try:
            figures = _exchanged(pair)
        except Exception as error:  # of CuPy's many types, or MPI's
            sys.stderr.write(f"[rank {ranks.rank}] GPU memory was not tried: {type(error).__name__}: {error}\n")
            figures = [_UNTRIED, 0.0, 0.0]
    verdict, direct, staged = (ranks.slowest(figure) for figure in figures)
    if verdict == _UNTRIED:
        return Outcome("unverified", f"ranks {one} and {other} could not try it: see their messages")
    if verdict == _WRONG:
        return Outcome("wrong", "other numbers than were sent")
    speed, through_host = _SIZES[-1] / direct, _SIZES[-1] / staged
    shown = f"two ranks, {speed / 1e9:.1f} GB/s; {through_host / 1e9:.1f} GB/s staged through the host"
    return Outcome("right", shown, speed, through_host)


def _exchanged(pair: Ranks) -> list[float]:
    """Exchange and add up known numbers; return whether they are right, and the seconds from GPU to GPU and staged."""
    import cupy
    import cupyx

    with cupy.cuda.Device(pair.rank % cupy.cuda.runtime.getDeviceCount()):
        stream, is_right = cupy.cuda.get_current_stream(), True
        for nbytes in _SIZES:
            mine, theirs = cupy.asarray(_pattern(nbytes, pair.rank)), cupy.zeros(nbytes, dtype=np.uint8)
            sums = cupy.asarray(np.full(nbytes // 4, pair.rank + 1, np.float32))
            stream.synchronize()
            pair.swap(mine, theirs)
            pair.allreduce(sums)
            is_right = is_right and bool((cupy.asnumpy(theirs) == _pattern(nbytes, 1 - pair.rank)).all())
            is_right = is_right and bool((cupy.asnumpy(sums) == 3).all())
        on_host = cupyx.empty_pinned((_SIZES[-1] // 4,), np.float32)

        def direct() -> None:
            pair.allreduce(sums)

        def staged() -> None:
            sums.get(out=on_host)
            pair.allreduce(on_host)
            sums.set(on_host)
            stream.synchronize()

        return [_RIGHT if is_right else _WRONG, _seconds(pair, direct), _seconds(pair, staged)]


def _pattern(nbytes: int, rank: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.resize(np.arange(251, dtype=np.uint8), nbytes) + np.uint8(rank)


def _seconds(pair: Ranks, work: Callable[[], None]) -> float:
    found = []
    for _ in range(_ROUNDS):
        pair.barrier()
        before = time.perf_counter()
        work()
        found.append(pair.slowest(time.perf_counter() - before))
    return min(found)
