"""Failures around arrays in GPU memory: no rank is left waiting, and no memory is written by what was under way."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import cupy_double
import numpy as np
import pytest
from replicas import RANK, SIZE, in_step, outcomes

import mpistrategy as ms
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.gpu.transports.by_mpi import StagedPath
from mpistrategy.mpi.interface.gpu_transport import communication_memory
from mpistrategy.options import GPU_PATH
from mpistrategy.reduction.routes import gpu

several = pytest.mark.skipif(SIZE == 1, reason="one rank leaves nobody waiting")


@pytest.fixture(autouse=True)
def cupy() -> Iterator[ModuleType]:
    with cupy_double.installed() as module:
        yield module


@pytest.fixture
def strategy() -> Iterator[ms.MirroredStrategy]:
    with closing(ms.MirroredStrategy()) as made:
        yield made


def out_of_memory(*args: Any, **options: Any) -> Any:
    raise MemoryError("there is none left")


class Failing:
    """Ranks of which one goes in the middle."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.guard = Guard()

    def allreduce(self, buffer: np.ndarray, op: str, source: np.ndarray | None = None) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("a peer is gone")


@pytest.mark.parametrize("after", [1, 2, 3])
def test_memory_of_a_reduction_that_failed_can_be_used_again(cupy: Any, after: int) -> None:
    path = StagedPath(16)
    buffer = cupy.asarray(np.arange(16.0)) + 1
    with pytest.raises(RuntimeError, match="a peer"):
        path.reduce(Failing(after), buffer, "SUM")
    buffer[...] = -1.0
    cupy.cuda.get_current_stream().synchronize()
    cupy_double.device_synchronize()
    assert buffer.get().tolist() == [-1.0] * 16


def test_pinned_memory_is_kept_until_nothing_is_copied_into_it(cupy: Any) -> None:
    path = StagedPath(16)
    with pytest.raises(RuntimeError, match="a peer"):
        path.reduce(Failing(0), cupy.asarray(np.arange(16.0)) + 1, "SUM")
    pinned = path._slots
    assert any(map(cupy_double.pending, pinned))
    path.free()
    assert not any(map(cupy_double.pending, pinned))


def test_arrays_of_several_devices_are_staged(cupy: Any, strategy: Any) -> None:
    for number in (0, 1, 0):
        with cupy.cuda.Device(number):
            array = cupy.asarray(np.ones(3)) * 2
        path = StagedPath(16)
        for device in (array.device, cupy.cuda.Device(1 - number)):
            with device:
                buffer = cupy.asarray(np.ones(3)) * 2
                path.reduce(strategy.extended.communicator, buffer, "SUM")
                assert buffer.get().tolist() == [2.0 * SIZE] * 3


@several
def test_a_warning_that_is_an_error_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_PATH, "nccl")

    def reduce() -> Any:
        with ms.MirroredStrategy() as strategy, warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            return in_step(strategy, lambda c: c.all_reduce("SUM", cupy_double.asarray(np.ones(3)) * 1)).get()

    for one in outcomes(reduce):
        assert one.error is not None
        assert "nccl cannot be" in one.text


@several
def test_a_rank_without_pinned_memory_is_heard_of(monkeypatch: pytest.MonkeyPatch, strategy: Any) -> None:
    def reduce() -> Any:
        return in_step(strategy, lambda c: c.all_reduce("SUM", cupy_double.asarray(np.ones(3)) * 1)).get()

    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(cupy_double.cupyx, "empty_pinned", out_of_memory)
        for one in outcomes(reduce):
            assert "there is none left" in one.text
    assert [one.error for one in outcomes(reduce)] == [None] * SIZE


@several
@pytest.mark.parametrize("shared_result", [False, True])
def test_a_rank_without_memory_for_an_arena_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, shared_result: bool
) -> None:
    with strategy.scope():
        arena = strategy.arena([cupy_double.asarray(np.ones(3, np.float16))], shared_result=shared_result)
    arena.values[0][...] = 2.0

    def reduce() -> Any:
        return in_step(strategy, lambda c: c.all_reduce("MEAN", arena))[0].get().tolist()

    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(gpu, "communication_memory", out_of_memory)
        for one in outcomes(reduce):
            assert "there is none left" in one.text
    assert all(one.text.endswith("[2.0, 2.0, 2.0]") for one in outcomes(reduce))


@several
def test_a_rank_without_memory_for_its_results_has_sent_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have their results; they hear of it in their next call."""
    strategy = ms.MirroredStrategy(on_error="raise")

    def reduce() -> Any:
        arrays = [cupy_double.asarray(np.ones(3, dtype)) * 1 for dtype in (np.int16, np.int32, np.int64)]
        return [total.get().tolist() for total in in_step(strategy, lambda c: c.all_reduce("MEAN", arrays))]

    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(gpu, "_views", out_of_memory)
        first, *others = outcomes(reduce)
        assert "there is none left" in first.text
        assert [one.error for one in others] == [None] * (SIZE - 1)
    assert all("rank 0 failed in " in one.text and one.error for one in outcomes(reduce))
    strategy.close()


def test_what_travels_is_in_the_pool_that_the_program_can_empty(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Default(cupy_double.MemoryPool):
        def malloc(self, nbytes: int) -> Any:
            asked.append(nbytes)
            return super().malloc(nbytes)

    pool = Default()
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool)
    assert communication_memory(cupy, 3, np.dtype(np.float32)).shape == (3,)
    assert asked == [12]
