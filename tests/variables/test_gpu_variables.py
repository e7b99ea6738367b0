"""Strategies of GPUs, real ones or doubles: variables and optimizers in GPU memory do what they do on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import cupy_double
import cupy_here
import numpy as np
import pages
import pytest
from cuda_counts import IS_COUNTED, counted
from cupy_here import double_only, ndarray
from gpu_doubles import pretended
from replicas import RANK, SIZE

import mpistrategy as ms
from mpistrategy.optimizers import SGD, Adam, AdamW, Optimizer

ON_READ = {"synchronization": "ON_READ"}


@pytest.fixture
def gpus() -> Iterator[ms.MirroredStrategy]:
    with cupy_here.gpus() as strategy:
        yield strategy


@pytest.fixture
def cpus() -> Iterator[ms.MirroredStrategy]:
    with closing(ms.MirroredStrategy("cpu")) as strategy:
        yield strategy


def on_gpu(array: Any) -> Any:
    return cupy_here.asarray(array)


def test_a_variable_is_on_the_gpu_of_its_rank(gpus: ms.MirroredStrategy) -> None:
    with gpus.scope():
        v = ms.Variable(np.arange(4.0) + RANK)
        w = ms.Variable(lambda: on_gpu(np.ones((2, 3), np.float32) * (RANK + 1)))
        count = ms.Variable(0)
    assert type(v.read_value()) is ndarray
    assert v.read_value().device.id == cupy_here.number(gpus)
    assert v.numpy().tolist() == [0, 1, 2, 3]  # replica 0's
    assert isinstance(v.numpy(), np.ndarray)
    assert np.asarray(w).tolist() == [[1, 1, 1]] * 2
    assert isinstance(count.read_value(), np.int64)  # Python looks at it all the time; CuPy takes scalars
    assert type(v * count.read_value()) is ndarray
    assert "[0., 1., 2., 3.]" in repr(v)
    assert (v.shape, v.dtype, v.T.shape, len(v)) == ((4,), np.float64, (4,), 4)


def test_the_methods_of_arrays_are_cupys(gpus: ms.MirroredStrategy) -> None:
    with gpus.scope():
        v = ms.Variable(np.arange(6.0).reshape(2, 3))
        w = ms.Variable(np.ones(3))
    for found, right in [
        (v.sum(axis=0), [3, 5, 7]),
        (v.mean(), 2.5),
        (v.transpose(), [[0, 3], [1, 4], [2, 5]]),
        (v.reshape(3, 2), [[0, 1], [2, 3], [4, 5]]),
        (v.astype("float32"), [[0, 1, 2], [3, 4, 5]]),
        (v.dot(w), [3, 12]),
        (ms.Mirrored((v.copy(),)).max(axis=1), [2, 5]),
        (np.sum(v, axis=1), [3, 12]),
    ]:
        assert type(found) is ndarray
        assert found.get().tolist() == right
    assert v.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ms.errors.UnsupportedError, match=r"v.assign\(np.sort\(v\)\)"):
        v.sort()


def test_arithmetic_stays_on_the_gpu(gpus: ms.MirroredStrategy) -> None:
    with gpus.scope():
        v, rate = ms.Variable(np.arange(3.0)), ms.Variable(0.5)
    x = on_gpu(np.eye(3))
    assert (x @ v).get().tolist() == (v @ x).get().tolist() == [0, 1, 2]
    assert (x[0] + v).get().tolist() == [1, 1, 2]
    assert (x[1] * rate).get().tolist() == [0, 0.5, 0]
    assert float(np.sum(v)) == 3
    for result, expected in [(v * 2, [0, 2, 4]), (v + v, [0, 2, 4]), (rate * v, [0, 0.5, 1]), (np.sqrt(v), None)]:
        assert type(result) is ndarray
        assert expected is None or result.get().tolist() == expected
    assert type(v[1:]) is ndarray
    assert float(v[2]) == 2


@pytest.mark.parametrize("place", [np.asarray, on_gpu])
def test_what_is_assigned_may_come_from_either(gpus: ms.MirroredStrategy, place: Callable[[Any], Any]) -> None:
    with gpus.scope():
        v = ms.Variable(np.zeros(3), aggregation="MEAN")
        first = ms.Variable(np.zeros(3), aggregation="ONLY_FIRST_REPLICA")
        v.assign(place(np.full(3, 5.0)))
        v.assign_add(place(np.ones(3)))
    assert v.numpy().tolist() == [6, 6, 6]
    gpus.run(lambda: v.assign_sub(place(np.full(3, RANK + 1.0))))
    assert v.numpy().tolist() == [6 - (SIZE + 1) / 2] * 3
    gpus.run(lambda: first.assign(place(np.full(3, RANK + 7.0))))
    assert first.numpy().tolist() == [7, 7, 7]
    for wrong in (place(np.zeros(4)), place(np.zeros(3, np.float32))):
        with gpus.scope(), pytest.raises(ms.errors.MpiStrategyError):
            v.assign(wrong)
    gpus.assert_mirrored()


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_copies_that_differ_are_combined_when_they_are_read(gpus: ms.MirroredStrategy, aggregation: str) -> None:
    with gpus.scope():
        v = ms.Variable(np.zeros(5), synchronization="ON_READ", aggregation=aggregation)
    gpus.run(lambda: v.assign(on_gpu(np.full(5, RANK + 1.0))))
    expected = {"SUM": SIZE * (SIZE + 1) / 2, "MEAN": (SIZE + 1) / 2, "ONLY_FIRST_REPLICA": 1}[aggregation]
    with gpus.scope():
        assert type(v.read_value()) is ndarray
        assert np.allclose(v.numpy(), expected)
        v.assign(np.arange(5.0))
        assert np.allclose(v.numpy(), np.arange(5.0))


def test_rows_are_scattered(gpus: ms.MirroredStrategy) -> None:
    with gpus.scope():
        v = ms.Variable(np.zeros((4, 2)), aggregation="SUM")
        u = ms.Variable(np.zeros((4, 2)))
        u.scatter_update(ms.IndexedSlices(on_gpu(np.array([[1.0, 1], [2, 2]])), on_gpu(np.array([3, 3]))))
    gpus.run(lambda: v.scatter_add(ms.IndexedSlices(on_gpu(np.ones((1, 2))), np.array([1]))))
    assert v.numpy()[1].tolist() == [SIZE, SIZE]
    assert u.numpy().tolist() == [[0, 0], [0, 0], [0, 0], [2, 2]]


def test_a_row_that_comes_very_often_has_numpys_bits(gpus: ms.MirroredStrategy) -> None:
    values = np.random.default_rng(0).standard_normal((100, 3)).astype(np.float32)
    indices = np.repeat([1, 0, 2], [70, 20, 10])
    with gpus.scope():
        v = ms.Variable(np.ones((3, 3), np.float32))
        v.scatter_sub(ms.IndexedSlices(on_gpu(values), on_gpu(indices)))
        v.scatter_add(ms.IndexedSlices(on_gpu(values[:0]), on_gpu(indices[:0])))
    expected = np.ones((3, 3), np.float32)
    np.subtract.at(expected, indices, values)
    assert v.numpy().tobytes() == expected.tobytes()


def train(strategy: ms.Strategy, optimizer: Optimizer, place: Callable[[Any], Any], dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(RANK)
    with strategy.scope():
        variables = [ms.Variable(np.linspace(-1, 1, 12).reshape(3, 4).astype(dtype)), ms.Variable(np.ones(4, dtype))]

    def step() -> None:
        gradients = [place(rng.standard_normal(v.shape).astype(dtype)) + 0 * v for v in variables]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for _ in range(3):
        strategy.run(step)
    return [v.numpy() for v in variables]


def test_one_launch_updates_many_variables_in_the_bits_of_the_host(
    gpus: ms.MirroredStrategy, cpus: ms.MirroredStrategy
) -> None:
    """Of several dtypes, clipped, with a gradient that shares memory with its variable's slot and an empty one."""

    def steps(strategy: ms.Strategy, place: Callable[[Any], Any]) -> list[np.ndarray]:
        random = np.random.default_rng(3)
        shapes = [((3, 5), "float32"), ((0,), "float32"), ((), "float64"), ((7,), "float16"), ((4100,), "float32")]
        with strategy.scope():
            variables = [ms.Variable(random.standard_normal(shape).astype(dtype)) for shape, dtype in shapes]
            optimizer = AdamW(0.01, global_clipnorm=0.5, nonfinite="warn")
        for _ in range(3):
            gradients = [place((random.integers(-9, 9, v.shape) / 8).astype(v.dtype)) for v in variables]
            pairs = list(zip(gradients, variables, strict=True))
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        slots = [slot for v in variables for slot in optimizer.slots_of(v).values()]
        return [v.numpy() for v in (*variables, *slots)]

    for found, right in zip(steps(gpus, on_gpu), steps(cpus, np.asarray), strict=True):
        assert np.array_equal(found, right)
    gpus.assert_mirrored()


@pytest.mark.skipif(not IS_COUNTED, reason="counts what the stand-in for CUDA is asked")
@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: SGD(0.1), 3),
        (lambda: SGD(0.1, momentum=0.9, nesterov=True), 4),
        (lambda: Adam(0.1, aggregation="MEAN"), 4),
        (lambda: Adam(0.1, aggregation="MEAN", global_clipnorm=1.0, nonfinite="raise"), 10),
    ],
)
def test_161_variables_take_few_launches(gpus: ms.MirroredStrategy, make: Callable[[], Optimizer], most: int) -> None:
    with gpus.scope():
        variables, optimizer = [ms.Variable(np.ones(number % 7 + 2, np.float32)) for number in range(161)], make()
    pairs = [(on_gpu(np.ones(v.shape, np.float32)), v) for v in variables]
    gpus.run(lambda: optimizer.apply_gradients(pairs))
    with counted() as counts:
        gpus.run(lambda: optimizer.apply_gradients(pairs))
    assert counts["launches"] <= most
    assert counts["allocations"] == 0


OPTIMIZERS = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: Adam(0.1),
    "adamw": lambda: AdamW(0.1),
    "clipped": lambda: SGD(0.1, global_clipnorm=0.5, mirrored_check_steps=2, nonfinite="raise"),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_the_host(
    name: str, dtype: str, gpus: ms.MirroredStrategy, cpus: ms.MirroredStrategy
) -> None:
    optimizer = OPTIMIZERS[name]()
    found = train(gpus, optimizer, on_gpu, dtype)
    assert optimizer.latest_path == "plain"
    expected = train(cpus, OPTIMIZERS[name](), np.asarray, dtype)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert np.allclose(one, other, rtol=1e-5 if dtype == "float32" else 1e-12)
    gpus.assert_mirrored()


@double_only
def test_a_step_waits_for_the_gpu_only_in_the_reduction(gpus: ms.MirroredStrategy) -> None:
    with gpus.scope():
        v = ms.Variable(np.ones(1000))
    optimizer = SGD(0.1, momentum=0.9)
    step = lambda: optimizer.apply_gradients([(v * 2, v)])  # noqa: E731
    gpus.run(step)
    before = dict(cupy_double.counts)
    gpus.run(step)
    assert cupy_double.counts["synchronize"] == before["synchronize"]
    assert cupy_double.counts["device"] == before["device"]
    assert cupy_double.counts["event"] - before["event"] == (SIZE > 1)
    assert cupy_double.pending(v.local_view)


def test_sparse_gradients_change_their_rows(gpus: ms.MirroredStrategy, cpus: ms.MirroredStrategy) -> None:
    def run(strategy: ms.Strategy, place: Callable[[Any], Any], optimizer: Optimizer) -> np.ndarray:
        with strategy.scope():
            v = ms.Variable(np.arange(12.0).reshape(6, 2))
        slices = ms.IndexedSlices(place(np.ones((2, 2)) * (RANK + 1)), place(np.array([RANK, 5])))
        strategy.run(lambda: optimizer.apply_gradients([(slices, v)]))
        return v.numpy()

    for make in (lambda: SGD(0.5, momentum=0.5), lambda: Adam(0.5)):
        assert np.allclose(run(gpus, on_gpu, make()), run(cpus, np.asarray, make()))


def test_a_nan_is_found_before_anything_changes(gpus: ms.MirroredStrategy) -> None:
    with gpus.scope():
        v = ms.Variable(np.ones(3))
    optimizer = SGD(0.1, nonfinite="raise")
    bad = np.array([1.0, np.nan if RANK == SIZE - 1 else 1.0, 1.0])
    with pytest.raises(ms.errors.NonFiniteError, match=rf"\(of rank {SIZE - 1}\)"):
        gpus.run(lambda: optimizer.apply_gradients([(on_gpu(bad), v)]))
    assert v.numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("places", [(on_gpu, on_gpu), (np.asarray, np.asarray), (np.asarray, on_gpu)])
def test_a_gradient_on_the_host_is_taken_to_the_gpu(gpus: ms.MirroredStrategy, places: Any) -> None:
    optimizer = SGD(1.0)
    with gpus.scope():
        v, bias = ms.Variable(np.zeros(3)), ms.Variable(0.0)
    for steps, (first, second) in enumerate([(on_gpu, on_gpu), places, (on_gpu, on_gpu)], start=1):
        pairs = [(first(np.ones(3)), v), (second(np.ones(())), bias)]
        gpus.run(partial(optimizer.apply_gradients, pairs))
        assert v.numpy().tolist() == [-SIZE * steps] * 3
        assert float(bias) == -SIZE * steps


def test_a_checkpoint_goes_from_gpus_to_cpus_and_back(
    gpus: ms.MirroredStrategy, cpus: ms.MirroredStrategy, tmp_path: Path
) -> None:
    folder = gpus.extended.communicator.allgather_text(str(tmp_path))[0]

    def objects(strategy: ms.Strategy, fill: float) -> dict[str, Any]:
        with strategy.scope():
            v = ms.Variable(np.full(4, fill), name="v")
            optimizer = Adam(0.1)
            optimizer.build([v])
        place = on_gpu if strategy is gpus else np.asarray
        sums = ms.gradients.GradientAccumulator(3)
        sums.add([place(np.full(2, fill))])
        return {"v": v, "optimizer": optimizer, "extra": place(np.full(3, fill)), "sums": sums}

    first = objects(gpus, 3.0)
    gpus.run(lambda: first["optimizer"].apply_gradients([(on_gpu(np.ones(4)), first["v"])]))
    with gpus.scope():
        ms.Checkpoint(**first).save(f"{folder}/a")
    second = objects(cpus, 0.0)
    with cpus.scope():
        ms.Checkpoint(**second).restore(f"{folder}/a")
    assert np.array_equal(second["v"].numpy(), first["v"].numpy())
    assert np.array_equal(second["optimizer"].slots_of(second["v"])["m"], first["optimizer"].slots_of(first["v"])["m"])
    second["sums"].add([np.ones(2)])
    assert second["sums"].add([np.ones(2)])[0].tolist() == [5, 5]
    third = objects(gpus, 1.0)
    with gpus.scope():
        ms.Checkpoint(**third).restore(f"{folder}/a")
    assert type(third["v"].read_value()) is ndarray
    assert np.array_equal(third["v"].numpy(), first["v"].numpy())
    assert third["extra"].get().tolist() == [3, 3, 3]
    third["sums"].add([on_gpu(np.ones(2))])
    assert third["sums"].add([on_gpu(np.ones(2))])[0].get().tolist() == [5, 5]


def test_gathers_and_broadcasts_return_what_they_were_given(gpus: ms.MirroredStrategy) -> None:
    mine = on_gpu(np.full((RANK + 1, 2), float(RANK)))
    found = gpus.run(lambda: ms.get_replica_context().all_gather(mine, axis=0))
    assert type(found) is ndarray
    assert found.get().shape == (SIZE * (SIZE + 1) // 2, 2)
    with gpus.scope():
        sent = gpus.extended.broadcast_to(on_gpu(np.full(3, RANK + 1.0)), found)
        total = gpus.reduce("SUM", on_gpu(np.ones((2, 2))), axis=0)
    assert type(sent.values[0]) is ndarray
    assert sent.values[0].get().tolist() == [1, 1, 1]
    assert total.get().tolist() == [2 * SIZE] * 2


@double_only
def test_one_device_may_be_a_gpu() -> None:
    with pretended("GPU-a", "GPU-b"):
        strategy = ms.OneDeviceStrategy("GPU:1")
        with strategy.scope():
            v = ms.Variable(np.ones(2))
        assert v.read_value().device.id == 1
        assert strategy.run(lambda: ms.get_replica_context().devices)[0].endswith("GPU:1")
        with pytest.raises(ms.errors.DeviceError, match=r"GPU:0 \(GPU-a\), GPU:1"):
            ms.OneDeviceStrategy("GPU:2")


@double_only
def test_arrays_on_another_gpu_than_the_ranks_are_refused(gpus: ms.MirroredStrategy) -> None:
    with cupy_double.cupy.cuda.Device(7):
        elsewhere = on_gpu(np.ones(2))
    with pytest.raises(ms.errors.DeviceError, match=f"arrays on GPU:{RANK}, which this rank drives"):
        gpus.run(lambda: ms.get_replica_context().all_reduce("SUM", elsewhere))


@double_only
def test_the_example_of_the_guide(gpus: ms.MirroredStrategy) -> None:
    source = next(block.source for block in pages.BLOCKS if block.page == "gpus" and block.kind == "python")
    with pretended(*(f"GPU-{rank}" for rank in range(SIZE))):
        names: dict[str, Any] = {"ms": ms}
        exec(compile(source, "gpus.md", "exec"), names)
        x = on_gpu(np.eye(3))
        names["strategy"].run(names["step"], args=(x, on_gpu(np.arange(3.0))))
        assert np.allclose(names["weights"].numpy(), 0.006 * SIZE * np.arange(3))
        names["strategy"].close()


@double_only
def test_a_thread_with_another_device_updates_the_gpu_of_its_rank(gpus: ms.MirroredStrategy) -> None:
    with gpus.scope():
        v = ms.Variable(np.ones(4))
    optimizer = SGD(1.0, momentum=0.5)
    seen: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(cupy_double.cupy.cuda.runtime.getDevice())
        return of_all(*args, **kwargs)

    gpus.run(lambda: optimizer.apply_gradients([(on_gpu(np.ones(4)), v)]))
    of_all = cupy_double._later
    try:
        cupy_double._later = watched
        with cupy_double.cupy.cuda.Device(5):
            gpus.extended.update(v, lambda copy: copy.assign_sub(np.ones(4)))
    finally:
        cupy_double._later = of_all
    assert set(seen) == {RANK}
    assert v.numpy().tolist() == [-SIZE] * 4
