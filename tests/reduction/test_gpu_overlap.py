"""Who waits for whom on the streams of a GPU: right results of what slow kernels write, and while the GPU computes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cuda_counts
import gpu_here
import numpy as np
import pytest
from delayed_writes import delayed_fill
from gpu_here import Spoken
from replicas import ALL, RANK, SIZE, context, in_step, new_variable, outcomes, several

import mpistrategy as ms
from mpistrategy.options import GPU_PATH

pytestmark = pytest.mark.skipif(SIZE > 2 and not ALL, reason="two ranks show it")
RANKS_ADDED = SIZE * (SIZE + 1) / 2


@pytest.fixture(params=gpu_here.PATHS)
def path(request: pytest.FixtureRequest, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MPISTRATEGY_CUDA_AWARE", "1")
    monkeypatch.setenv(GPU_PATH, request.param)
    return str(request.param)


def start(strategy: ms.MirroredStrategy, value: Any, op: str = "SUM", **options: Any) -> ms.AllReduceHandle:
    return strategy.run(lambda: context().all_reduce_async(op, value, **options))


#: How often what slow kernels write is reduced at once; they take a millisecond.
STEPS = 1000 if gpu_here.IS_GPU else 100


@pytest.mark.parametrize(("op", "steps"), [("SUM", 12), ("MEAN", 12), ("SUM", STEPS)])
def test_of_what_slow_kernels_write(cupy: Any, path: str, op: str, steps: int) -> None:
    """Behind the work before the call; what comes after `wait` finds the result, and may use the memory again."""
    divisor = SIZE if op == "MEAN" else 1
    with gpu_here.strategy(path) as strategy, cupy.cuda.Stream(non_blocking=True) as stream:
        gradients = [cupy.asarray(np.full(size, -1.0)) for size in (3, 1000, 70_000)]
        wrong = cupy.asarray(np.zeros(1))
        for number in (step % 97 for step in range(steps)):
            for at, gradient in enumerate(gradients):
                delayed_fill(cupy, gradient, (RANK + 1) * (number + at + 1), 1e-3 if at == 0 else 0)
            if steps == STEPS:
                results: Any = iter(in_step(strategy, lambda c: c.all_reduce("SUM", gradients)))
            else:
                handles = [start(strategy, {"x": gradient, "none": None}, op, name="each") for gradient in gradients]
                results = (handle.wait()["x"] for handle in handles)
            for at, total in enumerate(results):
                gradients[at][...] = -1.0  # nobody may read it any more
                wrong[...] += (total * divisor != RANKS_ADDED * (number + at + 1)).any()
        assert wrong.get(stream=stream)[0] == 0


def test_in_place_nothing_is_packed_or_copied_back(cupy: Any, path: str) -> None:
    with gpu_here.strategy(path) as strategy:
        mine = cupy.asarray(np.ones(1000))

        def reduce() -> Any:
            return in_step(strategy, lambda c: c.all_reduce("SUM", mine, out=mine))

        assert reduce() is mine
        start(strategy, mine, out=mine).wait()
        with cuda_counts.counted() if cuda_counts.IS_COUNTED else warnings.catch_warnings() as counts:
            reduce()
            handle = start(strategy, mine, out=mine)
            assert handle.wait() is mine
            assert handle.wait() is mine
        assert mine.get().tolist() == [float(SIZE**4)] * 1000
        if cuda_counts.IS_COUNTED:
            assert counts["copies_on_device"] == 0
            assert counts["launches"] == 0
            assert (counts["bytes_to_host"] == 0) == (path != "staged" or SIZE == 1)


@several
def test_the_host_waits_for_no_kernel(cupy: Any, path: str) -> None:
    with gpu_here.strategy(path) as strategy, cupy.cuda.Stream(non_blocking=True):
        mine, out = cupy.asarray(np.ones(1000)), cupy.asarray(np.zeros(1000))
        buckets = [cupy.asarray(np.ones(50_000)) for _ in range(4)]
        start(strategy, mine).wait()
        in_step(strategy, lambda c: c.all_reduce("SUM", mine))
        strategy.reduce("SUM", 1.0)
        for _ in range(5):
            cupy.cuda.get_current_stream().synchronize()
            delayed_fill(cupy, mine, RANK + 1.0, 0)
            cupy.cuda.get_current_stream().launch_host_func(time.sleep, 0.1)
            handles = [start(strategy, mine, out=out), *[start(strategy, each, out=each) for each in buckets]]
            under_way = [not handle.done() for handle in handles]
            for handle in handles:
                handle.wait()
            assert all(under_way)
            assert out.get().tolist() == [RANKS_ADDED] * 1000


@several
def test_without_an_mpi_for_threads_the_start_does_it(cupy: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_here.strategy(path) as strategy:
        monkeypatch.setattr(strategy.extended.communicator, "may_use_threads", False)
        mine = [cupy.asarray(np.full(10, RANK + 1.0)) for _ in range(3)]
        start(strategy, mine[0]).wait()
        handles = [start(strategy, each, out=each) for each in mine]
        assert handles[2].wait() is mine[2]
        assert all(handle.wait().get().tolist() == [RANKS_ADDED] * 10 for handle in handles)


@several
def test_a_mistake_of_one_rank_is_heard_of(cupy: Any, path: str) -> None:
    with gpu_here.strategy(path) as strategy:
        good = cupy.asarray(np.ones(10))
        start(strategy, good).wait()

        def wrong() -> Any:
            value = cupy.asarray(np.ones(10, bool)) if RANK == 1 else good
            return start(strategy, value).wait()

        for one in outcomes(wrong):
            assert "bool" in one.text
        found = outcomes(lambda: start(strategy, cupy.asarray(np.ones(10 + RANK))).wait())
        assert all("10" in one.text and "11" in one.text for one in found)
        assert start(strategy, good).wait().get().tolist() == [float(SIZE)] * 10


LENGTH = 3000


def assigned(strategy: ms.Strategy, x: Any) -> Any:
    var = new_variable(strategy, np.zeros(LENGTH), aggregation="ONLY_FIRST_REPLICA")
    strategy.run(lambda: var.assign(x))
    return var.local_view


EVERYONES = np.repeat(np.arange(SIZE) + 1.0, LENGTH)
#: What is called with an array of this rank's number + 1, and what comes of it.
CALLS: dict[str, tuple[Callable[[ms.Strategy, Any], Any], Any]] = {
    "all_reduce": (lambda s, x: in_step(s, lambda c: c.all_reduce("SUM", x)), RANKS_ADDED),
    "async": (lambda s, x: in_step(s, lambda c: c.all_reduce_async("SUM", x).wait()), RANKS_ADDED),
    "weighted": (lambda s, x: in_step(s, lambda c: c.all_reduce("MEAN", x, weight=1)), RANKS_ADDED / SIZE),
    "broadcast": (lambda s, x: s.broadcast(x, SIZE - 1), float(SIZE)),
    "gather": (lambda s, x: s.gather(x, axis=0), EVERYONES),
    "along an axis": (lambda s, x: s.reduce("MAX", x, axis=0), float(SIZE)),
    "assign": (assigned, 1.0),
    "sparse": (
        lambda s, x: (
            in_step(s, lambda c: c.all_reduce("SUM", ms.IndexedSlices(x, np.arange(LENGTH), (LENGTH,)))).values
        ),
        EVERYONES,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_of_another_library_is_read_before_a_call_returns(cupy: Any, path: str, name: str) -> None:
    """The library has a stream of its own, which writes the memory as soon as the call has returned."""
    call, right = CALLS[name]
    with gpu_here.strategy(path) as strategy, cupy.cuda.Stream(non_blocking=True) as stream:
        theirs = cupy.cuda.Stream(non_blocking=True)
        busy, memory = cupy.asarray(np.zeros(8)), cupy.asarray(np.zeros(LENGTH))
        call(strategy, Spoken(memory))
        wrong = 0
        for _ in range(4):
            memory[...] = RANK + 1.0
            stream.synchronize()
            delayed_fill(cupy, busy, 1.0, 5e-3)
            found = call(strategy, Spoken(memory))
            with theirs:
                memory[...] = -1.0
            theirs.synchronize()
            result = found.array if isinstance(found, Spoken) else found
            wrong += not (result.get(stream=stream) == right).all()
        assert wrong == 0
