"""Where arrays in GPU memory are made, whatever CuPy's current device is, and what comes back on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import cupy_here
import numpy as np
import pytest
from cupy_here import Spoken, asarray, double_only, ndarray
from replicas import RANK, SIZE

import mpistrategy as ms
from mpistrategy.gradients import GradientAccumulator, clip_by_global_norm
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.optimizers import SGD


@pytest.fixture
def gpus() -> Iterator[ms.MirroredStrategy]:
    with cupy_here.gpus() as strategy:
        yield strategy


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Return what a new thread gets, which CUDA lets begin on GPU:0."""
    found: list[Any] = []

    def work() -> None:
        import cupy

        cupy.cuda.Device(0).use()
        found.append(function())

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert found, "the thread has failed"
    return found[0]


def made_there(strategy: ms.MirroredStrategy) -> dict[str, Any]:
    """Return arrays that the library makes in all ways."""
    with strategy.scope():
        v = ms.Variable(np.arange(4.0), name="v")
        made = {"read_value": v.read_value(), "local_copy": v.local_copy()}
    made["a step's own"] = strategy.run(lambda: asarray(np.ones(3)))
    mine = made["a step's own"]
    made["clipped"] = clip_by_global_norm([mine], 1.0)[0][0]
    made["accumulated"] = GradientAccumulator(1).add([mine])[0]  # type: ignore[index]
    made["weighted"] = strategy.run(lambda: ms.get_replica_context().all_reduce("MEAN", mine, weight=2))
    made["an arena's"] = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", strategy.arena([mine])))[0]
    return made


def test_all_is_made_on_the_gpu_of_the_rank_in_any_thread(gpus: ms.MirroredStrategy) -> None:
    wanted = cupy_here.number(gpus)
    made = in_a_thread(lambda: made_there(gpus))
    assert {name: array.device.id for name, array in made.items()} == dict.fromkeys(made, wanted)
    assert made["read_value"].get().tolist() == [0, 1, 2, 3]
    assert np.allclose(made["weighted"].get(), 1)
    assert np.allclose(made["clipped"].get(), 3**-0.5)


def test_parts_of_batches_are_copies_in_each_epoch(gpus: ms.MirroredStrategy) -> None:
    source = asarray(np.arange(2.0 * SIZE))
    dataset = gpus.experimental_distribute_dataset([source])
    for _ in range(2):
        for part in dataset:
            assert part.get().tolist() == [2 * RANK, 2 * RANK + 1]
            part *= 10
    assert source.get().tolist() == list(range(2 * SIZE))


def test_a_short_part_is_padded_on_the_gpu(gpus: ms.MirroredStrategy) -> None:
    (part,) = gpus.experimental_distribute_dataset([asarray(np.arange(2.0 * SIZE) + 1)[: 2 * SIZE - 1]], pad=True)
    assert type(part) is ndarray
    whole = [2 * RANK + 1, 2 * RANK + 2 if RANK < SIZE - 1 else 0]
    assert part.get().tolist() == (whole if SIZE > 1 else [1])


def test_an_array_is_no_dataset(gpus: ms.MirroredStrategy) -> None:
    with pytest.raises(ms.errors.OptionTypeError, match="batches, or rows"):
        gpus.experimental_distribute_dataset(asarray(np.ones((4, 2))))


class Kept:
    """An object of the user's with an array in GPU memory."""

    def __init__(self) -> None:
        self.weights = asarray(np.arange(3.0))
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "on the host": np.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_the_state_of_an_object_comes_back_where_it_was(gpus: ms.MirroredStrategy, tmp_path: Path) -> None:
    folder = gpus.extended.communicator.allgather_text(str(tmp_path))[0]
    kept = Kept()
    with gpus.scope():
        ms.Checkpoint(kept=kept).save(f"{folder}/a")
        ms.Checkpoint(kept=kept).restore(f"{folder}/a")
    assert type(kept.loaded["weights"]) is ndarray
    assert kept.loaded["weights"].get().tolist() == [0, 1, 2]
    assert type(kept.loaded["on the host"]) is np.ndarray


def test_optimizers_take_gradients_of_other_libraries(gpus: ms.MirroredStrategy) -> None:
    with gpus.scope():
        v = ms.Variable(np.zeros(3))
    gpus.run(lambda: SGD(1.0).apply_gradients([(Spoken(asarray(np.ones(3))), v)]))
    assert v.numpy().tolist() == [-SIZE] * 3


class Silent:
    """An array that does not say where it is."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("it is gone")


def test_what_does_not_say_where_it_is_is_refused(gpus: ms.MirroredStrategy) -> None:
    given = Silent() if RANK == SIZE - 1 else asarray(np.ones(2))
    with pytest.raises(ms.errors.LeafError, match="Silent"):
        gpus.run(lambda: ms.get_replica_context().all_reduce("SUM", given))
    assert (
        gpus.run(lambda: ms.get_replica_context().all_reduce("SUM", asarray(np.ones(2)))).get().tolist() == [SIZE] * 2
    )


def test_no_collective_becomes_part_of_a_cuda_graph(gpus: ms.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gradient = asarray(np.ones(2))
        arena = gpus.arena([np.ones(3)])

    def step(value: Any) -> Any:
        with stream:
            return ms.get_replica_context().all_reduce("SUM", value)

    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(cupy.cuda.Stream, "is_capturing", lambda self: True)
        for value in (gradient, arena):
            with pytest.raises(ms.errors.MpiStrategyError, match="captured into a CUDA graph"):
                gpus.run(step, args=(value,))
    total = gpus.run(step, args=(gradient,))
    assert total.get(stream=stream).tolist() == [SIZE] * 2


@double_only
def test_a_path_whose_warning_is_an_error_is_not_made_again(
    gpus: ms.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests' filters make errors of warnings."""
    if SIZE == 1:
        pytest.skip("one rank has no path to choose")
    monkeypatch.setenv("MPISTRATEGY_GPU_PATH", "nccl")  # the double has none
    paths = []
    for _ in range(2):
        with pytest.raises((ms.errors.MpiStrategyError, ms.errors.FallbackWarning), match="nccl cannot be"):
            gpus.run(lambda: ms.get_replica_context().all_reduce("SUM", asarray(np.ones(2))))
        paths.append(dict(device_paths(gpus.extended.communicator).by_name))
    assert paths[0] == paths[1]
    assert len(paths[0]) == 1


@pytest.mark.one_rank
def test_nobody_waits_for_the_others_while_its_own_gpu_is_at_work() -> None:
    guard = Guard()
    with Call(guard, "one"):
        guard.since = 5.0
        with guard.own_gpu():
            assert guard.own_gpu_since < float("inf")
            assert guard.since == float("inf")
        assert guard.own_gpu_since == float("inf")
        assert guard.since < float("inf")


@pytest.mark.one_rank
def test_a_gpu_that_does_not_answer_leaves_no_call_behind() -> None:
    guard, events = Guard(), []

    class Broken:
        def __enter__(self) -> None:
            events.append("enter")
            if len(events) > 2:
                raise RuntimeError("an illegal address")

        def __exit__(self, *error: object) -> None:
            events.append("exit")
            raise RuntimeError("an illegal address")

    guard.on_gpu = Broken
    with Call(guard, "one"):
        pass
    assert guard.current is None
    with pytest.raises(ms.errors.DeviceError, match=r"does not answer \(an illegal address\)"), Call(guard, "two"):
        pass
    assert guard.current is None
    assert events == ["enter", "exit", "enter"]
