"""How much GPU memory reductions of 16-bit numbers take beside their results: one copy in 32 bits.

The bytes are those of CuPy's pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import gpu_here
import numpy as np
import pytest
from replicas import SIZE, in_step

import mpistrategy as ms
from mpistrategy.options import GPU_PATH

COUNT, LENGTH = 20, 3 * 2**15
NBYTES = COUNT * LENGTH * 2
#: What tables, events and lists take.
SCRATCH = 2**18


@pytest.fixture(params=gpu_here.PATHS)
def strategy(
    request: pytest.FixtureRequest, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ms.MirroredStrategy]:
    monkeypatch.setenv("MPISTRATEGY_CUDA_AWARE", "1")
    monkeypatch.setenv(GPU_PATH, request.param)
    with ms.MirroredStrategy("gpu" if request.param == "nccl" else "shared") as made:
        yield made


def peak(cupy: Any, do: Callable[[], Any]) -> int:
    """Return the most bytes that were taken at a time meanwhile, above those before."""
    do()
    pool = cupy.get_default_memory_pool()
    cupy.cuda.runtime.deviceSynchronize()
    before, found = pool.used_bytes(), [0]

    class Hook(cupy.cuda.MemoryHook):
        name = "peak"

        def malloc_postprocess(self, **told: Any) -> None:
            found[0] = max(found[0], pool.used_bytes() - before)

    with Hook():
        do()
    return found[0]


def given(cupy: Any, dtype: str) -> list[Any]:
    return [cupy.asarray(np.full(LENGTH, number, dtype)) for number in range(COUNT)]


@pytest.mark.parametrize(("op", "dtype"), [("SUM", "float16"), ("SUM", "int16"), ("MAX", "int16")])
def test_a_list_takes_its_results_and_a_copy(cupy: Any, strategy: Any, op: str, dtype: str) -> None:
    arrays = given(cupy, dtype)
    found: list[Any] = []

    def reduce() -> None:
        found.clear()
        found.extend(in_step(strategy, lambda c: c.all_reduce(op, arrays)))

    assert peak(cupy, reduce) <= 3 * NBYTES + SCRATCH
    for number, each in enumerate(found):
        assert set(each.get().tolist()) == {number * (SIZE if op == "SUM" else 1)}


def test_what_is_its_own_result_takes_a_copy(cupy: Any, strategy: Any) -> None:
    arrays = given(cupy, "float16")
    taken = peak(cupy, lambda: in_step(strategy, lambda c: c.all_reduce("SUM", arrays, out=arrays)))
    assert taken <= 3 * NBYTES + SCRATCH  # small arrays are packed
    (large,) = [cupy.asarray(np.ones(COUNT * LENGTH, np.float16))]
    taken = peak(cupy, lambda: in_step(strategy, lambda c: c.all_reduce("SUM", large, out=large)))
    assert taken <= 2 * NBYTES + SCRATCH
    assert set(large.get().tolist()) == {SIZE**2}  # two calls
    with strategy.scope():
        arena = strategy.arena(given(cupy, "float16"))
    assert peak(cupy, lambda: in_step(strategy, lambda c: c.all_reduce("SUM", arena))) <= 2 * NBYTES + SCRATCH


def test_two_streams_do_not_share_a_copy(cupy: Any, strategy: Any) -> None:
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    found = []
    for number in range(10):
        for stream, sign in ((first, 1), (second, -1)):
            with stream:
                value = cupy.asarray(np.ones(LENGTH, np.float16)) * (sign * number)
                found.append((sign * number, in_step(strategy, lambda c, v=value: c.all_reduce("SUM", v)), stream))
    for number, each, stream in found:
        assert set(each.get(stream=stream).tolist()) == {number * SIZE}
