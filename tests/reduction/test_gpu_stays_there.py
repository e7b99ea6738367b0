"""What users call, with arrays in GPU memory: the results, and that none of their bytes go to the host.

The bytes are counted on tests/cuda_on_cpu; elsewhere the results are compared alone.  Reductions of 16-bit numbers
take one copy in 32 bits beside their results, by the bytes of CuPy's pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda_counts
import gpu_here
import numpy as np
import pytest
from replicas import ALL, RANK, RANKS, SIZE, in_step, rows

import mpistrategy as ms
from mpistrategy.options import GPU_PATH

pytestmark = pytest.mark.skipif(SIZE > 3 and not ALL, reason="three ranks show it")
SIZE_OF_ARRAY = 300
ALGORITHMS = {
    "MpiAllReduce": ms.MpiAllReduce,
    "NcclAllReduce": ms.NcclAllReduce,
    "HierarchicalCopyAllReduce": ms.HierarchicalCopyAllReduce,
    "ReductionToOneDevice": ms.ReductionToOneDevice,
}


@pytest.fixture(scope="module", params=gpu_here.PATHS)
def path(request: pytest.FixtureRequest, cupy: ModuleType) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPISTRATEGY_CUDA_AWARE", "1")
        patch.setenv(GPU_PATH, request.param)
        yield request.param


def value(rank: int, dtype: str = "float32", shape: tuple[int, ...] = (SIZE_OF_ARRAY,)) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).integers(-1000, 1000, shape).astype(dtype)


def expected(op: str, arrays: list[np.ndarray]) -> np.ndarray:
    found = {"SUM": sum, "MEAN": sum, "MIN": np.minimum.reduce, "MAX": np.maximum.reduce}[op](arrays)
    return found / SIZE if op == "MEAN" else found


def bytes_to_host(do: Callable[[], Any]) -> tuple[Any, int]:
    """Do it twice, since the ranks choose their path the first time; return the result, and what the second copied."""
    do()
    if not cuda_counts.IS_COUNTED:
        return do(), 0
    with cuda_counts.counted() as counts:
        result = do()
    return result, counts["bytes_to_host"]


def is_right(path: str, found: Any, right: Any, moved: int) -> bool:
    assert type(found).__module__.partition(".")[0] == "cupy"
    assert found.dtype == right.dtype or right.dtype == np.float64
    assert path == "staged" or moved == 0
    return np.array_equal(found.get(), np.asarray(right, found.dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "op"),
    rows(2, ALGORITHMS, ["float32", "float64", "float16", "int8", "int32", "int64"], ["SUM", "MEAN", "MIN", "MAX"]),
)
def test_reductions(cupy: Any, path: str, name: str, dtype: str, op: str) -> None:
    if name == "NcclAllReduce" and path != "nccl":
        pytest.skip("it asks for NCCL")
    everyone = [np.clip(value(rank, dtype), -20, 20).astype(dtype) for rank in RANKS]
    with gpu_here.strategy(path, cross_device_ops=ALGORITHMS[name]()) as strategy:
        mine = cupy.asarray(everyone[RANK])
        found, moved = bytes_to_host(lambda: in_step(strategy, lambda c: c.all_reduce(op, mine)))
        right = expected(op, everyone)
        assert is_right(path, found, np.asarray(right).astype(found.dtype), moved)
        extended = strategy.extended
        for destination in ("task:0", f"task:{SIZE - 1}"):
            reduced, moved = bytes_to_host(lambda to=destination: extended.reduce_to(op, ms.PerReplica((mine,)), to))
            if int(destination[-1]) == RANK:
                assert is_right(path, reduced.values[0], np.asarray(right).astype(found.dtype), moved)
            assert path == "staged" or moved == 0


def test_broadcasts_and_gathers(cupy: Any, path: str) -> None:
    with gpu_here.strategy(path) as strategy:
        mine = [cupy.asarray(value(RANK, dtype)) for dtype in ("float32", "int16")]
        found, moved = bytes_to_host(lambda: strategy.broadcast(mine, SIZE - 1))
        assert is_right(path, found[0], value(SIZE - 1), moved)
        assert is_right(path, found[1], value(SIZE - 1, "int16"), moved)
        sent, moved = bytes_to_host(lambda: strategy.extended.broadcast_to(mine[0], mine[0]))
        assert is_right(path, sent.values[0], value(0), moved)
        for axis in (0, 1):
            shapes = [(2, 3 + rank, 2) if axis else (2 + rank, 3, 2) for rank in RANKS]
            block = cupy.asarray(value(RANK, "float32", shapes[RANK]))
            found, moved = bytes_to_host(lambda a=axis, b=block: in_step(strategy, lambda c: c.all_gather(b, a)))
            right = np.concatenate([value(rank, "float32", shapes[rank]) for rank in RANKS], axis)
            assert is_right(path, found, right, moved)
        rows_of_all = cupy.asarray(value(0, "float32", (SIZE, 3)))
        found, moved = bytes_to_host(lambda: in_step(strategy, lambda c: c.reduce_scatter("SUM", rows_of_all)))
        assert is_right(path, found, SIZE * value(0, "float32", (SIZE, 3))[RANK : RANK + 1], moved)


def test_sparse_gradients(cupy: Any, path: str) -> None:
    def slices(rank: int) -> tuple[np.ndarray, np.ndarray]:
        return value(rank, "float32", (2 + rank, 3)), np.arange(2 + rank)

    with gpu_here.strategy(path) as strategy:
        mine = ms.IndexedSlices(*map(cupy.asarray, slices(RANK)), (9, 3))
        found, moved = bytes_to_host(lambda: in_step(strategy, lambda c: c.all_reduce("SUM", mine)))
        assert is_right(path, found.values, np.concatenate([slices(rank)[0] for rank in RANKS]), moved)
        assert is_right(path, found.indices, np.concatenate([slices(rank)[1] for rank in RANKS]), moved)


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX"])
@pytest.mark.parametrize("axis", [0, (0, 1)])
def test_reductions_along_axes(cupy: Any, path: str, op: str, axis: Any) -> None:
    shapes = [(2 * rank, 4, 2) for rank in RANKS] if SIZE > 1 else [(3, 4, 2)]
    everyone = [value(rank, "float32", shape) for rank, shape in zip(RANKS, shapes, strict=True)]
    together = np.concatenate(everyone)
    right = getattr(np, op.lower())(together, axis=axis)
    with gpu_here.strategy(path) as strategy:
        mine = ms.PerReplica((cupy.asarray(everyone[RANK]),))
        found, moved = bytes_to_host(lambda: strategy.reduce(op, mine, axis))
        assert type(found).__module__.partition(".")[0] == "cupy"
        assert np.allclose(found.get(), right, rtol=1e-6)
        assert path == "staged" or moved == 0 or op in ("MIN", "MAX")  # which the host orders


def test_variables(cupy: Any, path: str) -> None:
    """First values, assignments and aggregated writes."""
    with gpu_here.strategy(path) as strategy, strategy.scope():
        var = ms.Variable(value(RANK), aggregation="ONLY_FIRST_REPLICA")
        assert is_right(path, var.local_view, value(0), 0)
        new = cupy.asarray(value(RANK) + 1)
        _, moved = bytes_to_host(lambda: in_step(strategy, lambda c: var.assign(new)))
        assert is_right(path, var.local_view, value(0) + 1, moved)
        total = ms.Variable(value(0), aggregation="SUM")
        _, moved = bytes_to_host(lambda: in_step(strategy, lambda c: total.assign(new)))
        assert is_right(path, total.local_view, sum(value(rank) + 1 for rank in RANKS), moved)
        _, moved = bytes_to_host(lambda: ms.Variable(new, aggregation="SUM"))
        assert path == "staged" or moved == 0


def test_a_checkpoint_is_restored_without_reading_what_is_there(cupy: Any, path: str, tmp_path: Path) -> None:
    with gpu_here.strategy(path) as strategy, strategy.scope():
        var, large = ms.Variable(value(0)), ms.Variable(value(0, "float64", (300, 1000)))
        checkpoint = ms.Checkpoint(var=var, large=large)
        folder = strategy.extended.communicator.allgather_text(str(tmp_path))[0]
        checkpoint.save(f"{folder}/one")
        var.assign(cupy.asarray(value(1)))
        large.assign(cupy.asarray(value(1, "float64", (300, 1000))))
        _, moved = bytes_to_host(lambda: checkpoint.restore(f"{folder}/one"))
        assert is_right(path, var.local_view, value(0), 0)
        assert is_right(path, large.local_view, value(0, "float64", (300, 1000)), 0)
        assert path == "staged" or moved == 0


# ------------------------------------------------------------------------------------- the memory that it takes

COUNT, LENGTH = 20, 3 * 2**15
NBYTES = COUNT * LENGTH * 2
#: What tables, events and lists take.
SCRATCH = 2**18


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


def halves(cupy: Any, dtype: str) -> list[Any]:
    return [cupy.asarray(np.full(LENGTH, number, dtype)) for number in range(COUNT)]


@pytest.mark.parametrize(("op", "dtype"), [("SUM", "float16"), ("SUM", "int16"), ("MAX", "int16")])
def test_a_list_takes_its_results_and_a_copy(cupy: Any, path: str, op: str, dtype: str) -> None:
    arrays = halves(cupy, dtype)
    found: list[Any] = []

    def reduce() -> None:
        found.clear()
        found.extend(in_step(strategy, lambda c: c.all_reduce(op, arrays)))

    with gpu_here.strategy(path) as strategy:
        assert peak(cupy, reduce) <= 3 * NBYTES + SCRATCH
    for number, each in enumerate(found):
        assert set(each.get().tolist()) == {number * (SIZE if op == "SUM" else 1)}


def test_what_is_its_own_result_takes_a_copy(cupy: Any, path: str) -> None:
    arrays = halves(cupy, "float16")
    large = cupy.asarray(np.ones(COUNT * LENGTH, np.float16))
    with gpu_here.strategy(path) as strategy:
        taken = peak(cupy, lambda: in_step(strategy, lambda c: c.all_reduce("SUM", arrays, out=arrays)))
        assert taken <= 3 * NBYTES + SCRATCH  # small arrays are packed
        taken = peak(cupy, lambda: in_step(strategy, lambda c: c.all_reduce("SUM", large, out=large)))
        assert taken <= 2 * NBYTES + SCRATCH
        assert set(large.get().tolist()) == {SIZE**2}  # two calls
        arena = strategy.arena(halves(cupy, "float16"))
        assert peak(cupy, lambda: in_step(strategy, lambda c: c.all_reduce("SUM", arena))) <= 2 * NBYTES + SCRATCH


def test_two_streams_do_not_share_a_copy(cupy: Any, path: str) -> None:
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with gpu_here.strategy(path) as strategy:
        found = []
        for number in range(10):
            for stream, sign in ((first, 1), (second, -1)):
                with stream:
                    mine = cupy.asarray(np.ones(LENGTH, np.float16)) * (sign * number)
                    found.append((sign * number, in_step(strategy, lambda c, v=mine: c.all_reduce("SUM", v)), stream))
        for number, each, stream in found:
            assert set(each.get(stream=stream).tolist()) == {number * SIZE}
