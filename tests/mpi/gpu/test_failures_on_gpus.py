"""Failures around arrays in GPU memory: no rank is left waiting, and no memory is written by what was under way."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gpu_here
import numpy as np
import pytest
from replicas import RANK, SIZE, in_step, outcomes, several

import mpistrategy as ms
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.gpu.transports import nccl
from mpistrategy.mpi.gpu.transports.by_mpi import StagedPath
from mpistrategy.options import GPU_PATH
from mpistrategy.reduction import gpu

cupy = gpu_here.cupy_or_skip()


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ms.MirroredStrategy]:
    monkeypatch.setenv(GPU_PATH, "staged")
    with closing(gpu_here.strategy()) as made:
        yield made


def out_of_memory(*args: Any, **options: Any) -> Any:
    raise MemoryError("there is none left")


class Failing:
    """Ranks of which one goes in the middle."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.guard = Guard()

    def allreduce(self, buffer: np.ndarray, op: str, wire: None) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("a peer is gone")


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_memory_of_a_reduction_that_failed_can_be_used_again(after: int) -> None:
    path = StagedPath(16)
    buffer = cupy.asarray(np.arange(16.0)) + 1
    with pytest.raises(RuntimeError, match="a peer"):
        path.reduce(Failing(after), buffer, "SUM")
    buffer[...] = -1.0
    path.free()
    cupy.cuda.runtime.deviceSynchronize()
    assert buffer.get().tolist() == [-1.0] * 16


class Late(Failing):
    """Ranks whose results the GPU is late to take back."""

    def allreduce(self, buffer: np.ndarray, op: str, wire: None) -> None:
        cupy.cuda.get_current_stream().launch_host_func(time.sleep, 0.3)


def test_what_one_stream_still_copies_is_not_written_over_for_another() -> None:
    path, streams = StagedPath(16), [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    buffers = []
    for number, stream in enumerate(streams):
        with stream:
            buffers.append(cupy.full(2, float(number)))
            path.reduce(Late(0), buffers[-1], "SUM")
    path.free()
    assert [buffer.get(stream=stream).tolist() for buffer, stream in zip(buffers, streams, strict=True)] == [
        [0.0, 0.0],
        [1.0, 1.0],
    ]


@pytest.mark.skipif(gpu_here.IS_HERE and cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs")
def test_arrays_of_several_devices_are_staged(strategy: Any) -> None:
    path = StagedPath(16)
    for number in (0, 1, 0):
        with cupy.cuda.Device(number):
            buffer = cupy.asarray(np.ones(3)) * 2
            path.reduce(strategy.extended.communicator, buffer, "SUM")
            assert buffer.get().tolist() == [2.0 * SIZE] * 3


@several
def test_a_warning_that_is_an_error_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_PATH, "nccl")
    monkeypatch.setattr(nccl, "version", lambda: 0)

    def reduce() -> Any:
        with gpu_here.strategy() as strategy, warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            return in_step(strategy, lambda c: c.all_reduce("SUM", cupy.asarray(np.ones(3)))).get()

    for one in outcomes(reduce):
        assert one.error is not None
        assert "not nccl (" in one.text


@several
@pytest.mark.parametrize("what", ["pinned memory", "an arena", "an arena with a shared result"])
def test_a_rank_without_memory_is_heard_of(monkeypatch: pytest.MonkeyPatch, strategy: Any, what: str) -> None:
    import cupyx

    ones = cupy.asarray(np.full(3, 2.0, np.float16))
    with strategy.scope():
        arena = strategy.arena([ones], shared_result="shared" in what) if "arena" in what else None
    if arena is not None:
        arena.values[0][...] = 2.0

    def reduce() -> Any:
        return in_step(strategy, lambda c: c.all_reduce("MEAN", arena or [ones]))[0].get().tolist()

    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(*((gpu, "communication_memory") if arena else (cupyx, "empty_pinned")), out_of_memory)
        for one in outcomes(reduce):
            assert "there is none left" in one.text
    assert all(one.text.endswith("[2.0, 2.0, 2.0]") for one in outcomes(reduce))


@several
def test_a_rank_without_memory_for_its_results_has_sent_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have their results; they hear of it in their next call."""
    monkeypatch.setenv(GPU_PATH, "staged")
    strategy = gpu_here.strategy(on_error="raise")

    def reduce() -> Any:
        arrays = [cupy.asarray(np.ones(3, dtype)) for dtype in (np.int16, np.int32, np.int64)]
        return [total.get().tolist() for total in in_step(strategy, lambda c: c.all_reduce("MEAN", arrays))]

    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(gpu.GpuRoute, "unpacked", out_of_memory)
        first, *others = outcomes(reduce)
        assert "there is none left" in first.text
        assert [one.error for one in others] == [None] * (SIZE - 1)
    assert all("rank 0 failed in " in one.text and one.error for one in outcomes(reduce))
    strategy.close()
