"""Variables and optimizers in GPU memory do what they do on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import cuda_counts
import gpu_here
import numpy as np
import optimizing
import pages
import pytest
from gpu_here import Spoken
from replicas import RANK, SIZE, in_step, new_variable

import mpistrategy as ms
from mpistrategy.optimizers import SGD, Adam, AdamW, Optimizer

cupy = gpu_here.cupy_or_skip()
on_gpu, ndarray = cupy.asarray, cupy.ndarray


@pytest.fixture
def gpus() -> Iterator[ms.MirroredStrategy]:
    with closing(gpu_here.strategy()) as made:
        yield made


@pytest.fixture
def cpus() -> Iterator[ms.MirroredStrategy]:
    with closing(ms.MirroredStrategy("cpu")) as made:
        yield made


def test_a_variable_is_an_array_on_the_gpu_of_its_rank(gpus: ms.MirroredStrategy) -> None:
    v, rate = new_variable(gpus, np.arange(6.0).reshape(2, 3) + RANK), new_variable(gpus, 0.5)
    w = new_variable(gpus, lambda: on_gpu(np.ones(3, np.float32) * (RANK + 1)))
    count = new_variable(gpus, 0)
    x = on_gpu(np.eye(2))
    for found, right in [
        (v.read_value(), [[0, 1, 2], [3, 4, 5]]),  # replica 0's
        (v.sum(axis=0), [3, 5, 7]),
        (v.mean(), 2.5),
        (v.clip(v, v), [[0, 1, 2], [3, 4, 5]]),
        (v.reshape(3, 2), [[0, 1], [2, 3], [4, 5]]),
        (v.astype("float32"), [[0, 1, 2], [3, 4, 5]]),
        (ms.Mirrored((v.copy(),)).max(axis=1), [2, 5]),
        (np.sum(v, axis=1), [3, 12]),
        (x @ v, [[0, 1, 2], [3, 4, 5]]),
        (v.T[1] * rate, [0.5, 2]),
        (v * count.read_value(), [[0, 0, 0], [0, 0, 0]]),
        (np.sqrt(v * v), [[0, 1, 2], [3, 4, 5]]),
        (v[1:], [[3, 4, 5]]),
    ]:
        assert type(found) is ndarray
        assert found.device.id == gpu_here.number(gpus)
        assert found.get().tolist() == right
    assert type(v.numpy()) is np.ndarray
    assert np.asarray(w).tolist() == [1, 1, 1]
    assert isinstance(count.read_value(), np.int64)  # Python looks at it all the time; CuPy takes scalars
    assert "[0., 1., 2.]" in repr(v)
    assert (v.shape, v.dtype, len(v), v.tolist()[1]) == ((2, 3), np.float64, 2, [3, 4, 5])
    with pytest.raises(ms.errors.UnsupportedError, match=r"v.assign\(x\)"):
        v.sort()


@pytest.mark.parametrize("place", [np.asarray, on_gpu])
def test_what_is_assigned_may_come_from_either(gpus: ms.MirroredStrategy, place: Callable[[Any], Any]) -> None:
    with gpus.scope():
        v = ms.Variable(np.zeros(3), aggregation="MEAN")
        first = ms.Variable(np.zeros(3), aggregation="ONLY_FIRST_REPLICA")
        v.assign(place(np.full(3, 5.0)))
        v.assign_add(place(np.ones(3)))
    gpus.run(lambda: v.assign_sub(place(np.full(3, RANK + 1.0))))
    assert v.numpy().tolist() == [6 - (SIZE + 1) / 2] * 3
    gpus.run(lambda: first.assign(place(np.full(3, RANK + 7.0))))
    assert first.numpy().tolist() == [7, 7, 7]
    for wrong in (place(np.zeros(4)), place(np.zeros(3, np.float32))):
        with gpus.scope(), pytest.raises(ms.errors.MpiStrategyError):
            v.assign(wrong)
    gpus.assert_mirrored()


@pytest.mark.parametrize(
    ("aggregation", "right"), [("SUM", SIZE * (SIZE + 1) / 2), ("MEAN", (SIZE + 1) / 2), ("ONLY_FIRST_REPLICA", 1)]
)
def test_copies_that_differ_are_combined_when_they_are_read(
    gpus: ms.MirroredStrategy, aggregation: str, right: float
) -> None:
    v = new_variable(gpus, np.zeros(5), synchronization="ON_READ", aggregation=aggregation)
    gpus.run(lambda: v.assign(on_gpu(np.full(5, RANK + 1.0))))
    with gpus.scope():
        assert type(v.read_value()) is ndarray
        assert np.allclose(v.numpy(), right)
        v.assign(np.arange(5.0))
        assert np.allclose(v.numpy(), np.arange(5.0))


def test_rows_are_scattered_with_numpys_bits(gpus: ms.MirroredStrategy) -> None:
    values = np.random.default_rng(0).standard_normal((100, 3)).astype(np.float32)
    indices, right = np.repeat([1, 0, 2], [70, 20, 10]), np.ones((3, 3), np.float32)
    with gpus.scope():
        v, total = ms.Variable(right), ms.Variable(np.zeros((4, 2)), aggregation="SUM")
        v.scatter_sub(ms.IndexedSlices(on_gpu(values), on_gpu(indices)))
        v.scatter_add(ms.IndexedSlices(on_gpu(values[:0]), on_gpu(indices[:0])))
        np.subtract.at(right, indices, values)
        assert v.numpy().tobytes() == right.tobytes()
        v.scatter_update(ms.IndexedSlices(on_gpu(values[:2]), np.array([2, 2])))
        assert np.array_equal(v.numpy()[2], values[1])
    gpus.run(lambda: total.scatter_add(ms.IndexedSlices(on_gpu(np.ones((1, 2))), np.array([1]))))
    assert total.numpy()[:, 0].tolist() == [0, SIZE, 0, 0]


# ------------------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9, nesterov=True, mirrored_check_steps=2),
    "adam": lambda: Adam(0.1, aggregation="MEAN"),
    "adamw": lambda: AdamW(0.01, global_clipnorm=0.5, nonfinite="warn"),
    **{f"{name}, plainly": partial(make, 0.1) for name, make in optimizing.OPTIMIZERS.items()},
}
SIZES = (1, 0, 3, 4, 5, 31, 4096, 4097, 10_001, 64)
SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((3, 5), "float32"), ((), "float64"), ((7,), "float16"),
    *(((size,), dtype) for size in SIZES for dtype in ("float32", "float64")),
]  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_has_the_bits_of_the_host(gpus: ms.MirroredStrategy, cpus: ms.MirroredStrategy, name: str) -> None:
    """Variables of several dtypes and sizes, empty ones, gradients from the host among them, and sparse ones."""

    def steps(strategy: ms.Strategy, place: Callable[[Any], Any]) -> list[np.ndarray]:
        random, optimizer = np.random.default_rng(3), OPTIMIZERS[name]()
        variables = [new_variable(strategy, random.standard_normal(shape).astype(dtype)) for shape, dtype in SHAPES]
        for number in range(3):
            gradients = [(random.integers(-9, 9, v.shape) / 8).astype(v.dtype) for v in variables]
            placed = [gradient if number == 2 else place(gradient) for gradient in gradients]
            strategy.run(lambda p=placed: optimizer.apply_gradients(zip(p, variables, strict=True)))
        slots = [slot for v in variables for slot in optimizer.slots_of(v).values()]
        return [v.numpy() for v in (*variables, *slots)]

    for found, right in zip(steps(gpus, on_gpu), steps(cpus, np.asarray), strict=True):
        assert found.tobytes() == right.tobytes()
    gpus.assert_mirrored()


@pytest.mark.parametrize("make", [lambda: SGD(0.5, momentum=0.5), lambda: Adam(0.5)])
def test_sparse_gradients_change_their_rows(
    gpus: ms.MirroredStrategy, cpus: ms.MirroredStrategy, make: Callable[[], Optimizer]
) -> None:
    ends = []
    for strategy, place in ((gpus, on_gpu), (cpus, np.asarray)):
        v = new_variable(strategy, np.arange(12.0).reshape(6, 2))
        slices = ms.IndexedSlices(place(np.ones((2, 2)) * (RANK + 1)), place(np.array([RANK, 5])))
        optimizer = make()
        strategy.run(lambda o=optimizer, s=slices, v=v: o.apply_gradients([(s, v)]))
        ends.append(v.numpy())
    assert np.allclose(*ends)


@pytest.mark.skipif(not cuda_counts.IS_COUNTED, reason="counts what the stand-in for CUDA is asked")
@pytest.mark.parametrize(("name", "most"), [("sgd", 3), ("momentum", 4), ("adam", 4), ("adamw", 10)])
def test_161_variables_take_few_launches(gpus: ms.MirroredStrategy, name: str, most: int) -> None:
    optimizer = OPTIMIZERS[name]()
    variables = [new_variable(gpus, np.ones(number % 7 + 2, np.float32)) for number in range(161)]
    pairs = [(on_gpu(np.ones(v.shape, np.float32)), v) for v in variables]
    for _ in range(1 if name != "momentum" else 2):  # its second step checks
        gpus.run(lambda: optimizer.apply_gradients(pairs))
    with cuda_counts.counted() as counts:
        gpus.run(lambda: optimizer.apply_gradients(pairs))
    assert counts["launches"] <= most
    assert counts["allocations"] == 0


def test_a_nan_is_found_before_anything_changes(gpus: ms.MirroredStrategy) -> None:
    v, bias = new_variable(gpus, np.ones(3)), new_variable(gpus, 0.0)
    bad = np.array([1.0, np.nan if RANK == SIZE - 1 else 1.0, 1.0])
    with pytest.raises(ms.errors.NonFiniteError, match=rf"\(of rank {SIZE - 1}\)"):
        gpus.run(lambda: SGD(0.1, nonfinite="raise").apply_gradients([(on_gpu(bad), v)]))
    assert v.numpy().tolist() == [1, 1, 1]
    # Of another library, and on the host.
    gpus.run(lambda: SGD(1.0).apply_gradients([(Spoken(on_gpu(np.ones(3))), v), (np.ones(()), bias)]))
    assert v.numpy().tolist() == [1 - SIZE] * 3
    assert float(bias) == -SIZE


def test_a_checkpoint_goes_from_gpus_to_cpus_and_back(
    gpus: ms.MirroredStrategy, cpus: ms.MirroredStrategy, tmp_path: Path
) -> None:
    file = f"{gpus.extended.communicator.allgather_text(str(tmp_path))[0]}/a"

    def objects(strategy: ms.Strategy, fill: float) -> dict[str, Any]:
        place = on_gpu if strategy is gpus else np.asarray
        with strategy.scope():
            v, optimizer, sums = ms.Variable(np.full(4, fill)), Adam(0.1), ms.gradients.GradientAccumulator(3)
            optimizer.build([v])
        sums.add([place(np.full(2, fill))])
        return {"v": v, "optimizer": optimizer, "extra": place(np.full(3, fill)), "sums": sums}

    first = objects(gpus, 3.0)
    gpus.run(lambda: first["optimizer"].apply_gradients([(on_gpu(np.ones(4)), first["v"])]))
    with gpus.scope():
        ms.Checkpoint(**first).save(file)
    for strategy, place in ((cpus, np.asarray), (gpus, on_gpu)):
        other = objects(strategy, 1.0)
        with strategy.scope():
            ms.Checkpoint(**other).restore(file)
        assert type(other["v"].read_value()) is type(other["extra"]) is type(place(0.0))
        assert np.array_equal(other["v"].numpy(), first["v"].numpy())
        slots = other["optimizer"].slots_of(other["v"])["m"], first["optimizer"].slots_of(first["v"])["m"]
        assert np.array_equal(slots[0].numpy(), slots[1].numpy())
        assert other["extra"].tolist() == [3, 3, 3]
        other["sums"].add([place(np.ones(2))])
        assert other["sums"].add([place(np.ones(2))])[0].tolist() == [5, 5]


# ------------------------------------------------------------------------------------- places


@pytest.mark.skipif(cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs")
def test_another_gpu_than_that_of_the_rank(gpus: ms.MirroredStrategy) -> None:
    v = new_variable(gpus, np.ones(4))
    mine = gpu_here.number(gpus)
    with cupy.cuda.Device(1 - mine):
        elsewhere = on_gpu(np.ones(2))
        gpus.extended.update(v, lambda each: each.assign_sub(np.ones(4)))
    assert v.local_view.device.id == mine
    assert v.numpy().tolist() == [0] * 4
    with pytest.raises(ms.errors.DeviceError, match=f"arrays on GPU:{mine}, which this rank drives"):
        in_step(gpus, lambda ctx: ctx.all_reduce("SUM", elsewhere))
    with ms.OneDeviceStrategy("GPU:1") as alone:
        assert ms.Variable(np.ones(2)).read_value().device.id == 1
        assert in_step(alone, lambda ctx: ctx.devices)[0].endswith("GPU:1")
    with pytest.raises(ms.errors.DeviceError, match=r"GPU:0 \(.*\), GPU:1"):
        ms.OneDeviceStrategy("GPU:7")


@pytest.mark.skipif(cupy.cuda.runtime.getDeviceCount() < SIZE, reason="needs a GPU for each rank")
def test_the_example_of_the_guide() -> None:
    source = next(block.source for block in pages.BLOCKS if block.page == "gpus" and block.kind == "python")
    names: dict[str, Any] = {"ms": ms}
    exec(compile(source, "gpus.md", "exec"), names)
    names["strategy"].run(names["step"], args=(on_gpu(np.eye(3)), on_gpu(np.arange(3.0))))
    assert np.allclose(names["weights"].numpy(), 0.006 * SIZE * np.arange(3))
    names["strategy"].close()
