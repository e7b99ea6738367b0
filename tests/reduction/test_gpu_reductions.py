"""Arrays in GPU memory in reductions: results as on the host, made on the GPU of the rank, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import gpu_here
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, RANKS, SIZE, all_raise, in_step
from replicas import numbers_of as values

import mpistrategy as ms
from mpistrategy.gradients import GradientAccumulator, clip_by_global_norm
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.gpu.transports.by_mpi import StagedPath
from mpistrategy.mpi.interface.gpu_transport import chosen_path
from mpistrategy.options import GPU_PATH
from mpistrategy.reduction import gpu

DTYPES = ("float64", "float32", "float16", "complex64", "int64", "int32", "int16", "uint8")
SHAPES = [(3,), (), (2, 5), (0,), (70,), (2, 3, 4)]
TOTAL = SIZE * (SIZE + 1) / 2


@pytest.fixture(params=gpu_here.PATHS)
def strategy(request: Any, monkeypatch: pytest.MonkeyPatch, cupy: ModuleType) -> Iterator[ms.MirroredStrategy]:
    monkeypatch.setenv(GPU_PATH, request.param)
    with closing(gpu_here.strategy()) as made:
        yield made


def placed(cupy: Any, array: np.ndarray, number: int) -> Any:
    """Return an array in GPU memory: as it is, transposed, or off the addresses that 16 divides."""
    if number % 3 == 1:
        return cupy.asarray(array.T.copy()).T
    memory = cupy.zeros(array.size + number, array.dtype)
    memory[number:] = cupy.asarray(array.ravel())
    return memory[number:].reshape(array.shape)


# ------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_are_reduced_as_on_the_host(strategy: Any, cupy: Any, dtype: str) -> None:
    """Twice at a place; into other memory of any kind, and in place."""
    ops = ("SUM", "MEAN", "PROD", *(() if dtype.startswith("complex") else ("MIN", "MAX")))
    for op, times in (("SUM", 30 if dtype == "float32" else 2), *((op, 1) for op in ops)):
        host = [values(shape, dtype) for shape in SHAPES * times]
        right = in_step(strategy, lambda ctx: ctx.all_reduce(op, host))  # noqa: B023
        arrays = [placed(cupy, array, number % 7) for number, array in enumerate(host)]
        out = [placed(cupy, np.zeros(each.shape, each.dtype), number % 5) for number, each in enumerate(right)]
        may_be_in_place = op != "MEAN" or np.dtype(dtype).kind not in "iu"
        for target in (None, None, out, arrays if may_be_in_place else None):
            found = in_step(strategy, lambda ctx, t=target: ctx.all_reduce(op, arrays, out=t))  # noqa: B023
            assert target is None or all(one is other for one, other in zip(found, target, strict=True))
            for array, expected in zip(found, right, strict=True):
                assert type(array) is cupy.ndarray
                assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
                assert np.array_equal(array.get(), expected), op


def test_arrays_that_are_too_long_for_the_kernel_are_copied(
    strategy: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers have 32 bits."""
    monkeypatch.setattr(gpu, "LONGEST", 1000)
    host = [values((count,), "float32") for count in (3, 251, 250, 4000, 0)]
    right = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", host))
    found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", [placed(cupy, array, 3) for array in host]))
    assert all(np.array_equal(one.get(), other) for one, other in zip(found, right, strict=True))


def test_calls_from_one_line_have_the_dtype_and_shape_of_their_arrays(strategy: Any, cupy: Any) -> None:
    kinds = [((4,), "float32"), ((2, 2), "float32"), ((4,), "int32"), ((4,), "float32"), ((), "float64")]

    def step(ctx: Any) -> None:
        for make in (cupy.asarray, np.asarray, cupy.asarray):
            for shape, dtype in kinds * 2:
                right = sum(values(shape, dtype, rank) for rank in RANKS)
                mixed = [make(values(shape, dtype)), make(values((3,), "int8"))]
                for found in (ctx.all_reduce("SUM", mixed[0]), ctx.all_reduce("SUM", mixed)[0]):
                    assert type(found) is (np.ndarray if make is np.asarray else cupy.ndarray)
                    assert (found.dtype, found.shape) == (dtype, shape)
                    assert np.array_equal(found if make is np.asarray else found.get(), right)

    in_step(strategy, step)


def test_what_two_arrays_have_in_common_is_summed_once(strategy: Any, cupy: Any) -> None:
    memory = cupy.asarray(np.ones(2_200_000))
    arrays = [memory[:1_200_000], memory[1_000_000:]]  # large ones are summed where they are
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", arrays, out=arrays))
    assert np.array_equal(memory.get(), np.full(2_200_000, SIZE))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(chunk=st.sampled_from([16, 48, 64, 4096]), size=st.integers(0, 70), calls=st.integers(1, 3))
def test_the_staged_path_is_right_for_all_boundaries_of_chunks(chunk: int, size: int, calls: int) -> None:
    cupy = gpu_here.cupy_or_skip()
    with closing(gpu_here.strategy()) as strategy:
        path = StagedPath(chunk)
        for call in range(calls):
            buffer = cupy.asarray(values((size,), "float64") + call) * 1.0
            path.reduce(strategy.extended.communicator, buffer, "SUM")
            right = sum(values((size,), "float64", rank) + call for rank in RANKS)
            assert np.array_equal(buffer.get(), right)


@pytest.mark.parametrize(
    "algorithm", [ms.MpiAllReduce, ms.ReductionToOneDevice, ms.HierarchicalCopyAllReduce, ms.OrderedAllReduce]
)
def test_host_and_device_may_be_mixed_in_every_algorithm(cupy: Any, algorithm: Any) -> None:
    """The first call also chooses the path of the GPUs, between the check and the sums."""
    ranks = np.arange(1, SIZE + 1)
    with gpu_here.strategy(cross_device_ops=algorithm()) as strategy:
        for factor in (1.0, 10.0):
            mine = factor * (RANK + 1)
            value = {"loss": mine, "host": np.full(3, mine), "device": cupy.asarray(np.full(2, mine))}
            for found in (
                in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value)),  # noqa: B023
                in_step(strategy, lambda ctx: ctx.all_reduce_async("SUM", value).wait()),  # noqa: B023
            ):
                assert (type(found["loss"]), found["loss"]) == (np.float64, factor * TOTAL)
                assert found["host"].tolist() == [factor * TOTAL] * 3
                assert type(found["device"]) is cupy.ndarray
                assert found["device"].get().tolist() == [factor * TOTAL] * 2
        mean = in_step(strategy, lambda ctx: ctx.all_reduce("MEAN", value["device"], weight=RANK + 1))
        assert np.allclose(mean.get(), 10 * (ranks * ranks).sum() / ranks.sum())
        result = strategy.extended.reduce_to("SUM", value["device"], "task:0")
        assert [each.get().tolist() for each in result.values] == [[10 * TOTAL] * 2] * (RANK == 0)


def test_only_the_destination_gets_the_sum(strategy: Any, cupy: Any) -> None:
    """Its path is asked for Reduce, in which fewer bytes travel than in Allreduce."""
    last, array = SIZE - 1, cupy.asarray(values((5,), "int16"))
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", array))  # chooses the path
    path: Any = chosen_path(strategy.extended.communicator)
    with mock.patch.object(path, "reduce", wraps=path.reduce) as reduce:
        found = strategy.extended.reduce_to("SUM", array, f"task:{last}")
    assert [call.args[3] for call in reduce.call_args_list] == [None if SIZE == 1 else last]
    right = sum(values((5,), "int16", rank) for rank in RANKS)
    assert [each.get().tolist() for each in found.values] == [right.tolist()] * (last == RANK)


@pytest.mark.parametrize("shared_result", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int16"])
def test_an_arena_is_reduced_where_it_is(strategy: Any, cupy: Any, dtype: str, shared_result: bool) -> None:
    like = {"w": cupy.asarray(values((3, 2), dtype)), "b": cupy.asarray(values((1,), dtype)), "n": 0.0}
    with strategy.scope():
        arena = strategy.arena(like, shared_result=shared_result)
    for _ in range(2):
        arena.values["w"][...] = like["w"] * 1
        arena.values["n"][...] = RANK
        found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", arena))
        assert np.array_equal(found["w"].get(), sum(values((3, 2), dtype, rank) for rank in RANKS))
        assert float(found["n"]) == SIZE * (SIZE - 1) / 2
    if shared_result:
        assert np.array_equal(arena.values["w"].get(), values((3, 2), dtype))
    else:
        assert found["w"].data.ptr == arena.values["w"].data.ptr
    with strategy.scope():
        strategy.extended.broadcast_to(arena, arena)
    assert float(arena.values["n"]) == (0 if shared_result else float(found["n"]))
    arena.close()


def test_explain_tells_the_path(strategy: Any, cupy: Any) -> None:
    value = {"w": cupy.asarray(np.ones((2, 3))), "loss": 1.0}
    text = strategy.explain(value)
    assert "1 array in 1 buffer, float64, 48 B: in GPU memory, on a path that the ranks choose" in text
    assert "    copies: all into a bucket\n" in text
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value))
    path = "alone: one rank" if SIZE == 1 else chosen_path(strategy.extended.communicator).name
    assert f"({path}" in strategy.explain(value)
    arena = strategy.arena(value)
    assert "2 arrays in 1 buffer, float64, 112 B: in GPU memory, " in strategy.explain(arena)
    assert "\n    copies: none\n" in strategy.explain(arena)
    with gpu_here.strategy(cross_device_ops=ms.OrderedAllReduce()) as other:
        assert "1 on a GPU: copied to the host, reduced as others are, and copied back" in other.explain(value)


# ------------------------------------------------------------------------------------- places


def test_all_is_made_on_the_gpu_of_the_rank_in_any_thread(strategy: ms.MirroredStrategy, cupy: Any) -> None:
    def made_there() -> dict[str, Any]:
        cupy.cuda.Device(0).use()  # as CUDA lets a new thread begin
        with strategy.scope():
            v = ms.Variable(np.arange(4.0), name="v")
            made = {"read_value": v.read_value(), "local_copy": v.local_copy()}
        mine = made["a step's own"] = strategy.run(lambda: cupy.asarray(np.ones(3)))
        made["clipped"] = clip_by_global_norm([mine], 1.0)[0][0]
        made["accumulated"] = GradientAccumulator(1).add([mine])[0]  # type: ignore[index]
        made["weighted"] = in_step(strategy, lambda ctx: ctx.all_reduce("MEAN", mine, weight=2))
        made["an arena's"] = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", strategy.arena([mine])))[0]
        return made

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(made_there).result()
    wanted = gpu_here.number(strategy)
    assert {name: array.device.id for name, array in made.items()} == dict.fromkeys(made, wanted)
    assert made["read_value"].get().tolist() == [0, 1, 2, 3]
    assert np.allclose(made["weighted"].get(), 1)
    assert np.allclose(made["clipped"].get(), 3**-0.5)


def test_parts_of_batches_are_copies_in_each_epoch_and_padded(strategy: ms.MirroredStrategy, cupy: Any) -> None:
    source = cupy.asarray(np.arange(2.0 * SIZE) + 1)
    dataset = strategy.experimental_distribute_dataset([source])
    for _ in range(2):
        for part in dataset:
            assert part.get().tolist() == [2 * RANK + 1, 2 * RANK + 2]
            part *= 10
    assert source.get().tolist() == list(range(1, 2 * SIZE + 1))
    (part,) = strategy.experimental_distribute_dataset([source[: 2 * SIZE - 1]], pad=True)
    assert type(part) is cupy.ndarray
    assert part.get().tolist() == ([2 * RANK + 1, 2 * RANK + 2 if RANK < SIZE - 1 else 0] if SIZE > 1 else [1])
    with pytest.raises(ms.errors.OptionTypeError, match="batches, or rows"):
        strategy.experimental_distribute_dataset(source)


# ------------------------------------------------------------------------------------- refused


class Silent:
    """An array that does not say where it is."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("it is gone")


def test_what_is_refused(strategy: Any, cupy: Any) -> None:
    device, host, last = cupy.asarray(np.ones(3)), np.ones(3), RANK == SIZE - 1
    integers = cupy.asarray(np.ones(3, np.int32))
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"value": device, "out": host}, ms.errors.ShapeError, "an array on the host"),
        ({"value": host, "out": device}, ms.errors.ShapeError, "an array in GPU memory"),
        ({"value": device, "out": device.astype("float32")}, ms.errors.ShapeError, "float32"),
        ({"value": integers, "out": integers, "reduce_op": "MEAN"}, ms.errors.ShapeError, "int32"),
        ({"value": cupy.asarray(np.zeros(3, bool))}, ms.errors.DTypeError, "dtype bool"),
        ({"value": Silent() if last else device}, ms.errors.LeafError, "Silent"),
    ]
    if SIZE > 1:
        refused += [({"value": device if last else host}, ms.errors.CollectiveMismatchError, "float64 on a GPU")]
    for arguments, error, words in refused:
        all_raise(
            error,
            in_step,
            strategy,
            lambda ctx, a=arguments: ctx.all_reduce(**{"reduce_op": "SUM", **a}),
            words=[words],
        )
        found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", device))
        assert found.get().tolist() == [SIZE] * 3
    assert integers.get().tolist() == [1, 1, 1]


def test_no_collective_becomes_part_of_a_cuda_graph(
    strategy: ms.MirroredStrategy, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gradient = cupy.asarray(np.ones(2))
        arena = strategy.arena([np.ones(3)])

    def step(value: Any) -> Any:
        with stream:
            return ms.get_replica_context().all_reduce("SUM", value)

    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(cupy.cuda.Stream, "is_capturing", lambda self: True, raising=False)
        for value in (gradient, arena):
            with pytest.raises(ms.errors.MpiStrategyError, match="captured into a CUDA graph"):
                strategy.run(step, args=(value,))
    assert strategy.run(step, args=(gradient,)).get(stream=stream).tolist() == [SIZE] * 2


@pytest.mark.one_rank
def test_a_gpu_that_does_not_answer_leaves_no_call_behind() -> None:
    @contextmanager
    def broken() -> Iterator[None]:
        raise RuntimeError("an illegal address")
        yield

    guard = Guard()
    guard.on_gpu = broken
    with pytest.raises(ms.errors.DeviceError, match=r"does not answer \(an illegal address\)"), Call(guard, "two"):
        pass
    assert guard.current is None
