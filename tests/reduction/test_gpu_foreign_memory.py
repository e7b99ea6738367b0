"""Arrays of a library with a stream of its own, which writes their memory as soon as a call has returned."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import gpu_here
import numpy as np
import pytest
from delayed_writes import delayed_fill
from gpu_here import Spoken
from replicas import ALL, RANK, RANKS, SIZE, context

import mpistrategy as ms
from mpistrategy.options import GPU_PATH

pytestmark = pytest.mark.skipif(SIZE > 2 and not ALL, reason="two ranks show it")
SIZE_OF_ARRAY = 3000
STEPS = 4


@pytest.fixture(params=gpu_here.PATHS)
def path(request: pytest.FixtureRequest, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MPISTRATEGY_CUDA_AWARE", "1")
    monkeypatch.setenv(GPU_PATH, request.param)
    return str(request.param)


def array_of(found: Any) -> Any:
    return found.array if isinstance(found, Spoken) else found


TOTAL = SIZE * (SIZE + 1) / 2
#: What is called with an array of this rank's number + 1, and what comes of it.
CALLS: dict[str, tuple[Callable[[ms.Strategy, Any], Any], Any]] = {
    "all_reduce": (lambda s, x: s.run(lambda: context().all_reduce("SUM", x)), TOTAL),
    "async": (lambda s, x: s.run(lambda: context().all_reduce_async("SUM", x).wait()), TOTAL),
    "weighted": (lambda s, x: s.run(lambda: context().all_reduce("MEAN", x, weight=1)), TOTAL / SIZE),
    "broadcast": (lambda s, x: s.broadcast(x, SIZE - 1), float(SIZE)),
    "gather": (lambda s, x: s.gather(x, axis=0), np.repeat(np.arange(SIZE) + 1.0, SIZE_OF_ARRAY)),
    "along an axis": (lambda s, x: s.reduce("MAX", x, axis=0), float(SIZE)),
    "assign": (lambda s, x: assigned(s, x), 1.0),
    "sparse": (lambda s, x: s.run(lambda: context().all_reduce("SUM", slices(x))).values, None),
}


def assigned(strategy: ms.Strategy, x: Any) -> Any:
    with strategy.scope():
        var = ms.Variable(np.zeros(SIZE_OF_ARRAY), aggregation="ONLY_FIRST_REPLICA")
    strategy.run(lambda: var.assign(x))
    return var.local_view


def slices(x: Any) -> ms.IndexedSlices:
    return ms.IndexedSlices(x, np.arange(SIZE_OF_ARRAY), (SIZE_OF_ARRAY,))


def wrong_steps(cupy: Any, path: str, call: Callable[[ms.Strategy, Any], Any], right: Any) -> int:
    """Return how often the result was wrong where the library writes the memory again on its own stream."""
    if right is None:
        right = np.repeat(np.array(RANKS) + 1.0, SIZE_OF_ARRAY)
    with (
        ms.MirroredStrategy("gpu" if path == "nccl" else "shared") as strategy,
        cupy.cuda.Stream(non_blocking=True) as stream,
    ):
        theirs = cupy.cuda.Stream(non_blocking=True)
        busy, memory = cupy.asarray(np.zeros(8)), cupy.asarray(np.zeros(SIZE_OF_ARRAY))
        call(strategy, Spoken(memory))
        wrong = 0
        for _ in range(STEPS):
            memory[...] = RANK + 1.0
            stream.synchronize()
            delayed_fill(cupy, busy, 1.0, 5e-3)
            result = array_of(call(strategy, Spoken(memory)))
            with theirs:
                memory[...] = -1.0
            theirs.synchronize()
            wrong += not (result.get(stream=stream) == right).all()
        return wrong


@pytest.mark.parametrize("name", CALLS)
def test_memory_is_read_before_a_call_returns(cupy: Any, path: str, name: str) -> None:
    assert wrong_steps(cupy, path, *CALLS[name]) == 0
