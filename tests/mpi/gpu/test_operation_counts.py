"""What a call of 4 KiB asks of CUDA on every path, counted on tests/cuda_on_cpu, beside its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cuda_counts
import cupy_here
import numpy as np
import pytest
from replicas import SIZE, context, in_step

import mpistrategy as ms
from mpistrategy.options import GPU_PATH

#: By path and call: as the columns say, at most; on rank 0.
BUDGETS = {
    ("nccl", "all_reduce in place"): (0, 0, 0, 0, 1, 0, 0),
    ("nccl", "all_reduce MEAN in place"): (1, 0, 0, 0, 1, 0, 0),
    ("nccl", "all_reduce"): (0, 1, 0, 0, 1, 0, 0),
    ("nccl", "all_reduce MAX"): (2, 1, 0, 0, 1, 0, 0),
    ("nccl", "all_reduce of 3 arrays"): (1, 0, 0, 0, 1, 0, 0),
    ("nccl", "all_reduce_async in place"): (0, 0, 0, 0, 3, 2, 0),
    ("nccl", "reduce to rank 0"): (0, 1, 0, 0, 1, 0, 0),
    ("nccl", "broadcast"): (0, 1, 0, 0, 1, 0, 0),
    ("nccl", "all_gather"): (0, 1, 0, 0, 1, 0, 0),
    ("mpi", "all_reduce in place"): (0, 0, 0, 0, 1, 0, 1),
    ("mpi", "all_reduce MEAN in place"): (1, 0, 0, 0, 1, 0, 1),
    ("mpi", "all_reduce"): (0, 1, 0, 0, 1, 0, 1),
    ("mpi", "all_reduce MAX"): (2, 1, 0, 0, 1, 0, 1),
    ("mpi", "all_reduce of 3 arrays"): (1, 0, 0, 0, 1, 0, 1),
    ("mpi", "all_reduce_async in place"): (0, 0, 0, 0, 3, 2, 1),
    ("mpi", "reduce to rank 0"): (0, 1, 0, 0, 1, 0, 1),
    ("mpi", "broadcast"): (0, 1, 0, 0, 1, 0, 1),
    ("mpi", "all_gather"): (0, 1, 0, 0, 1, 0, 1),
    ("staged", "all_reduce in place"): (0, 0, 1, 1, 2, 1, 1),
    ("staged", "all_reduce MEAN in place"): (1, 0, 1, 1, 2, 1, 1),
    ("staged", "all_reduce"): (0, 1, 1, 1, 2, 1, 1),
    ("staged", "all_reduce MAX"): (0, 1, 1, 1, 2, 1, 1),
    ("staged", "all_reduce of 3 arrays"): (1, 0, 1, 1, 2, 1, 1),
    ("staged", "all_reduce_async in place"): (0, 0, 1, 1, 4, 3, 1),
    ("staged", "reduce to rank 0"): (0, 1, 1, 1, 2, 1, 1),
    ("staged", "broadcast"): (0, 1, 1, 0, 2, 1, 1),
    ("staged", "all_gather"): (0, 1, 1, 2, 2, 1, 1),
}


@pytest.fixture(params=cupy_here.PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(GPU_PATH, request.param)
    with cupy_here.installed():
        yield request.param


def calls(cupy: Any, strategy: ms.MirroredStrategy) -> dict[str, Callable[[], object]]:
    one = cupy.asarray(np.ones(1024, np.float32))
    several = [cupy.asarray(np.ones(size, np.float32)) for size in (10, 1000, 14)]
    return {
        "all_reduce in place": lambda: in_step(strategy, lambda c: c.all_reduce("SUM", one, out=one)),
        "all_reduce MEAN in place": lambda: in_step(strategy, lambda c: c.all_reduce("MEAN", one, out=one)),
        "all_reduce": lambda: in_step(strategy, lambda c: c.all_reduce("SUM", one)),
        "all_reduce MAX": lambda: in_step(strategy, lambda c: c.all_reduce("MAX", one)),
        "all_reduce of 3 arrays": lambda: in_step(strategy, lambda c: c.all_reduce("SUM", several)),
        "all_reduce_async in place": lambda: strategy.run(
            lambda: context().all_reduce_async("SUM", one, out=one).wait()
        ),
        "reduce to rank 0": lambda: strategy.extended.reduce_to("SUM", ms.PerReplica((one,)), "task:0"),
        "broadcast": lambda: strategy.broadcast(one),
        "all_gather": lambda: in_step(strategy, lambda c: c.all_gather(one, 0)),
    }


@pytest.mark.skipif(SIZE != 2, reason="the table is of two ranks")
@pytest.mark.skipif(not cuda_counts.IS_COUNTED, reason="only tests/cuda_on_cpu counts")
def test_no_call_asks_for_more_than_the_table_says(path: str) -> None:
    import cupy

    with ms.MirroredStrategy("gpu" if path == "nccl" else "shared") as strategy:
        over = []
        for name, call in calls(cupy, strategy).items():
            counts = cuda_counts.count_repeated(call)
            if strategy.extended.communicator.rank == 0 and (found := cuda_counts.over(counts, BUDGETS[path, name])):
                over.append(f"{name}: {found}")
            assert counts["bytes_to_host"] == 0 or path == "staged"
        assert not over
