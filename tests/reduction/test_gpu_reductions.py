"""Arrays in GPU memory in reductions, with a CuPy double whose streams do nothing until somebody waits for them.

With MPISTRATEGY_TEST_GPU=1 the same on a real GPU, which all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import cupy_double
import cupy_here
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, in_step
from replicas import numbers_of as values

import mpistrategy as ms
from mpistrategy.mpi.gpu.transports import by_mpi as staged
from mpistrategy.mpi.gpu.transports.by_mpi import StagedPath
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.options import GPU_PATH as VARIABLE

DTYPES = ("float64", "float32", "float16", "complex64", "int64", "int32", "int16", "uint8")


@pytest.fixture
def cupy() -> Iterator[ModuleType]:
    with cupy_here.installed() as module:
        yield module


@pytest.fixture(params=cupy_here.PATHS)
def strategy(request: Any, monkeypatch: pytest.MonkeyPatch, cupy: ModuleType) -> Iterator[ms.MirroredStrategy]:
    monkeypatch.setenv(VARIABLE, request.param)
    if not cupy_here.IS_REAL:
        monkeypatch.setenv("MPISTRATEGY_CUDA_AWARE", "1")  # the double's memory is the host's
    with closing(cupy_here.strategy()) as made:
        yield made


def total(shape: Any, dtype: str, op: str = "SUM") -> np.ndarray:
    every = np.stack([values(shape, dtype, rank).astype(np.complex128) for rank in range(SIZE)])
    if op == "PROD":
        return every.prod(0)
    return {"SUM": every.sum, "MEAN": every.mean, "MIN": every.real.min, "MAX": every.real.max}[op](0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_is_reduced_as_on_the_host(strategy: Any, cupy: Any, dtype: str) -> None:
    shapes = [(3,), (), (2, 5), (0,), (70,)]
    arrays = [cupy.asarray(values(shape, dtype)) for shape in shapes]
    for op in ("SUM", "MEAN", "PROD", *(() if dtype.startswith("complex") else ("MIN", "MAX"))):
        found = in_step(strategy, lambda ctx, op=op: ctx.all_reduce(op, arrays))
        on_host = in_step(strategy, lambda ctx, op=op: ctx.all_reduce(op, [values(shape, dtype) for shape in shapes]))
        for array, expected in zip(found, on_host, strict=True):
            assert type(array) is cupy.ndarray
            assert array.dtype == expected.dtype
            assert np.array_equal(array.get(), expected), op
        if not (op == "PROD" and dtype == "uint8"):  # which wraps around
            assert np.allclose(found[2].get(), total((2, 5), dtype, op), rtol=1e-2), op


def test_calls_from_one_line_have_the_dtype_and_shape_of_their_arrays(strategy: Any, cupy: Any) -> None:
    kinds = [((4,), "float32"), ((2, 2), "float32"), ((4,), "int32"), ((4,), "float32")]

    def step(ctx: Any) -> None:
        for make in (cupy.asarray, np.asarray, cupy.asarray):
            for shape, dtype in kinds * 2:
                found = ctx.all_reduce("SUM", make(values(shape, dtype)))
                assert type(found) is (np.ndarray if make is np.asarray else cupy.ndarray)
                assert (found.dtype, found.shape) == (dtype, shape)
                assert np.array_equal(found.get() if make is cupy.asarray else found, total(shape, dtype))

    in_step(strategy, step)


def test_repeated_lists_of_several_dtypes_keep_their_order(strategy: Any, cupy: Any) -> None:
    kinds = [((3,), "float32"), ((2,), "int32"), ((), "float32"), ((2, 5), "float64"), ((4,), "int32")]

    def step(ctx: Any) -> None:
        for out in (None, None, None, "in place", "in place"):
            arrays = [cupy.asarray(values(shape, dtype)) for shape, dtype in kinds]
            found = ctx.all_reduce("SUM", arrays, out=out and arrays)
            for array, (shape, dtype) in zip(found, kinds, strict=True):
                assert (array.dtype, array.shape) == (dtype, shape)
                assert np.allclose(array.get(), total(shape, dtype))

    in_step(strategy, step)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_a_mean_of_integers_is_not_written_over_them(strategy: Any, cupy: Any, dtype: str) -> None:
    arrays = [cupy.asarray(values((4,), dtype))]

    def mean(out: Any) -> Any:
        return in_step(strategy, lambda ctx: ctx.all_reduce("MEAN", arrays, out=out))

    for _ in range(2):
        assert np.allclose(mean(None)[0].get(), total((4,), dtype, "MEAN"))
        with pytest.raises(ms.errors.ShapeError):
            mean(arrays)
        assert np.array_equal(arrays[0].get(), values((4,), dtype))


def test_what_two_arrays_have_in_common_is_summed_once(strategy: Any, cupy: Any) -> None:
    memory = cupy.asarray(np.ones(2_200_000))
    arrays = [memory[:1_200_000], memory[1_000_000:]]  # large ones are summed where they are
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", arrays, out=arrays))
    assert np.array_equal(memory.get(), np.full(2_200_000, SIZE))


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_parts_of_a_reduction_stay_in_gpu_memory(strategy: Any, cupy: Any, op: str) -> None:
    host = [values((7, 3), "float32"), values((2, 5), "int32")]
    arrays = [cupy.asarray(array) for array in host]
    for axis in (0, 1):
        found = in_step(strategy, lambda ctx, axis=axis: ctx.reduce_scatter(op, arrays, axis))
        on_host = in_step(strategy, lambda ctx, axis=axis: ctx.reduce_scatter(op, host, axis))
        for array, expected in zip(found, on_host, strict=True):
            assert type(array) is cupy.ndarray
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert np.array_equal(array.get(), expected)


def test_values_that_are_still_being_computed_are_waited_for(strategy: Any, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gradients = [cupy.asarray(np.full(1000, RANK + 1.0)) * 2 for _ in range(3)]
        assert cupy_here.IS_REAL or all(map(cupy_double.pending, gradients))
        sums = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", gradients))
        doubled = [each * 2 for each in sums]
    expected = 4.0 * sum(range(1, SIZE + 1))
    assert all((each.get(stream=stream) == expected).all() for each in doubled)


@cupy_here.double_only
def test_the_device_as_a_whole_is_never_waited_for(strategy: Any, cupy: Any) -> None:
    idle = cupy.cuda.Stream(non_blocking=True)
    with idle:
        elsewhere = cupy.asarray(np.ones(4)) + 1
    before = cupy_double.counts["device"]
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.ones(10))))
    assert cupy_double.counts["device"] == before
    assert cupy_double.pending(elsewhere)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(chunk=st.sampled_from([16, 48, 64, 4096]), size=st.integers(0, 70), calls=st.integers(1, 3))
def test_the_staged_path_is_right_for_all_boundaries_of_chunks(chunk: int, size: int, calls: int) -> None:
    with cupy_here.installed() as cupy, cupy_here.strategy() as strategy:
        communicator, path = strategy.extended.communicator, StagedPath(chunk)
        buffers = []
        for call in range(calls):
            buffer = cupy.asarray(values((size,), "float64") + call) * 1.0
            path.reduce(communicator, buffer, "SUM")
            buffers.append(buffer * 1.0)
        for call, buffer in enumerate(buffers):
            assert np.array_equal(buffer.get(), total((size,), "float64").real + SIZE * call)


def test_arrays_on_the_host_and_on_the_device_may_be_mixed(strategy: Any, cupy: Any) -> None:
    """The first call also chooses the path of the GPUs, between the check and the sums."""
    for factor in (1.0, 10.0):
        mine = factor * (RANK + 1)
        value = {"loss": mine, "host": np.full(3, mine), "device": cupy.asarray(np.full(2, mine))}
        found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value))  # noqa: B023
        every = factor * SIZE * (SIZE + 1) / 2
        assert isinstance(found["loss"], np.float64)
        assert found["loss"] == every
        assert isinstance(found["host"], np.ndarray)
        assert found["host"].tolist() == [every] * 3
        assert type(found["device"]) is cupy.ndarray
        assert found["device"].get().tolist() == [every] * 2


@pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
def test_a_rank_with_another_kind_of_array_is_named(strategy: Any, cupy: Any) -> None:
    value = np.ones(3) if RANK == 0 else cupy.asarray(np.ones(3))
    with pytest.raises(ms.errors.CollectiveMismatchError, match="float64 on a GPU"):
        in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value))


def test_what_cannot_be_summed_is_refused_by_name(strategy: Any, cupy: Any) -> None:
    with pytest.raises(ms.errors.DTypeError, match="dtype bool"):
        in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.zeros(3, bool))))


@cupy_here.double_only
def test_arrays_on_two_devices_are_refused(strategy: Any, cupy: Any) -> None:
    with cupy.cuda.Device(1):
        other = cupy.asarray(np.ones(2))
    with pytest.raises(ms.errors.DeviceError, match="GPU:0 and GPU:1"):
        in_step(strategy, lambda ctx: ctx.all_reduce("SUM", [cupy.asarray(np.ones(2)), other]))


@pytest.mark.parametrize("algorithm", [ms.ReductionToOneDevice, ms.HierarchicalCopyAllReduce, ms.OrderedAllReduce])
def test_every_algorithm_takes_them_by_way_of_the_host(cupy: Any, algorithm: Any) -> None:
    with ms.MirroredStrategy("shared", cross_device_ops=algorithm()) as strategy:
        found = in_step(strategy, lambda ctx: ctx.all_reduce("MEAN", {"w": cupy.asarray(values((4,), "float32"))}))
        assert type(found["w"]) is cupy.ndarray
        assert np.allclose(found["w"].get(), total((4,), "float32", "MEAN"))


def test_a_result_for_one_rank_is_on_its_device(strategy: Any, cupy: Any) -> None:
    with strategy.scope():
        result = strategy.extended.reduce_to("SUM", cupy.asarray(values((3,), "float64")), "task:0")
    if RANK == 0:
        assert np.array_equal(result.values[0].get(), total((3,), "float64").real)
    else:
        assert result.values == ()


def test_slices_come_back_in_kind(strategy: Any, cupy: Any) -> None:
    rows = ms.IndexedSlices(cupy.asarray(np.full((1, 2), RANK + 1.0)), cupy.asarray(np.array([RANK])), (SIZE, 2))
    found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", rows))
    assert type(found.values) is cupy.ndarray
    assert found.indices.get().tolist() == list(range(SIZE))


@cupy_here.double_only
@pytest.mark.skipif(SIZE == 1, reason="one rank reduces nothing")
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7])
def test_without_the_event_of_a_copy_the_numbers_are_wrong(
    cupy: Any, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The double finds a missing order: the tests above mean something."""
    monkeypatch.setattr(cupy_double.Event, "synchronize", lambda self: None)
    with ms.MirroredStrategy() as strategy:
        path = StagedPath(64)
        buffer = cupy.asarray(np.arange(8.0 * chunks)) + 1
        path.reduce(strategy.extended.communicator, buffer, "SUM")
        assert not np.array_equal(buffer.get(), (np.arange(8.0 * chunks) + 1) * SIZE)
    assert staged.CHUNK_BYTES >= 2**20


@pytest.mark.parametrize("shared_result", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int16"])
def test_an_arena_is_reduced_where_it_is(strategy: Any, cupy: Any, dtype: str, shared_result: bool) -> None:
    like = {"w": cupy.asarray(values((3, 2), dtype)), "b": cupy.asarray(values((1,), dtype)), "n": 0.0}
    with strategy.scope():
        arena = strategy.arena(like, shared_result=shared_result)
    assert arena._on_device
    for _ in range(2):
        arena.values["w"][...] = cupy.asarray(values((3, 2), dtype)) * 1
        arena.values["n"][...] = RANK
        found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", arena))
        assert found["w"].get().tolist() == total((3, 2), dtype).real.tolist()
        assert float(found["n"]) == SIZE * (SIZE - 1) / 2
    if shared_result:
        assert arena.values["w"].get().tolist() == values((3, 2), dtype).tolist()
    else:
        assert found["w"].data.ptr == arena.values["w"].data.ptr
    with strategy.scope():
        strategy.extended.broadcast_to(arena, arena)
    assert float(arena.values["n"]) == (0 if shared_result else float(found["n"]))
    arena.close()


def test_an_all_reduce_that_was_started_is_one_of_this_stream(strategy: Any, cupy: Any) -> None:
    def step(ctx: Any) -> Any:
        handle = ctx.all_reduce_async("SUM", [cupy.asarray(np.ones(5)) * 2, np.ones(2)])
        return handle.wait()

    found = in_step(strategy, step)
    assert found[0].get().tolist() == [2.0 * SIZE] * 5
    assert found[1].tolist() == [SIZE] * 2


def test_a_weighted_mean(strategy: Any, cupy: Any) -> None:
    found = in_step(strategy, lambda ctx: ctx.all_reduce("MEAN", cupy.asarray(np.full(3, RANK + 1.0)), weight=RANK + 1))
    ranks = np.arange(1, SIZE + 1)
    assert type(found) is cupy.ndarray
    assert np.allclose(found.get(), (ranks * ranks).sum() / ranks.sum())


def test_explain_tells_the_path(strategy: Any, cupy: Any) -> None:
    value = {"w": cupy.asarray(np.ones((2, 3))), "loss": 1.0}
    text = strategy.explain(value)
    assert "1 array in 1 buffer, float64, 48 B: in GPU memory, on a path that the ranks choose" in text
    assert "    copies: all into a bucket\n" in text
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value))
    text = strategy.explain(value)
    expected = (
        f"({'alone: one rank' if SIZE == 1 else device_paths(strategy.extended.communicator).by_name.popitem()[0]}"
    )
    assert expected in text
    with strategy.scope():
        arena = strategy.arena(value)
    assert "2 arrays in 1 buffer, float64, 112 B: in GPU memory, " in strategy.explain(arena)
    assert "\n    copies: none\n" in strategy.explain(arena)
    with strategy.scope():
        halves = strategy.arena(cupy.asarray(np.ones(3, np.float16)), shared_result=True)
    assert "copies: into float32 and back\n" in strategy.explain(halves)
    with ms.MirroredStrategy(cross_device_ops=ms.OrderedAllReduce()) as other:
        text = other.explain(value)
        assert "1 on a GPU: copied to the host, reduced as others are, and copied back" in text
        assert "1 array in 1 buffer, float64, 48 B: " in text or "2 arrays in 1 buffer, float64, 56 B: " in text


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int16"])
def test_results_are_written_where_out_says_by_one_kernel(strategy: Any, cupy: Any, op: str, dtype: str) -> None:
    shapes = [(3,), (), (2, 5), (0,), (70,)]
    arrays = {str(shape): cupy.asarray(values(shape, dtype)) for shape in shapes}
    host = in_step(strategy, lambda ctx: ctx.all_reduce(op, [values(shape, dtype) for shape in shapes]))
    out = {name: cupy.empty(array.shape, expected.dtype) for (name, array), expected in zip(arrays.items(), host)}  # noqa: B905
    found = in_step(strategy, lambda ctx: ctx.all_reduce(op, arrays, out=out))
    assert all(found[name] is out[name] for name in out)
    assert all(np.array_equal(out[name].get(), expected) for name, expected in zip(out, host, strict=True))
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", arrays, out=arrays))
    expected = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", [values(shape, dtype) for shape in shapes]))
    assert all(np.array_equal(a.get(), b) for a, b in zip(arrays.values(), expected, strict=True))


def test_out_on_the_other_side_is_refused(strategy: Any, cupy: Any) -> None:
    device, host = cupy.asarray(np.ones(3)), np.ones(3)
    with pytest.raises(ms.errors.ShapeError, match=r"an array on the host.*in GPU memory, as the value"):
        in_step(strategy, lambda ctx: ctx.all_reduce("SUM", device, out=host))
    with pytest.raises(ms.errors.ShapeError, match=r"an array in GPU memory.*on the host, as the value"):
        in_step(strategy, lambda ctx: ctx.all_reduce("SUM", host, out=device))
    with pytest.raises(ms.errors.ShapeError, match="float32"):
        in_step(strategy, lambda ctx: ctx.all_reduce("SUM", device, out=cupy.asarray(np.ones(3, np.float32))))
    if not cupy_here.IS_REAL:
        with cupy.cuda.Device(1):
            elsewhere = cupy.asarray(np.ones(3))
        with pytest.raises(ms.errors.DeviceError, match="GPU:0 and GPU:1"):
            in_step(strategy, lambda ctx: ctx.all_reduce("SUM", device, out=elsewhere))


def test_a_result_is_written_later_too(strategy: Any, cupy: Any) -> None:
    gradients = [cupy.asarray(values((5,), "float32")) for _ in range(3)]

    def step(ctx: Any) -> Any:
        return ctx.all_reduce_async("SUM", gradients, out=gradients).wait()

    assert in_step(strategy, step)[0] is gradients[0]
    assert np.array_equal(gradients[2].get(), total((5,), "float32").real)
