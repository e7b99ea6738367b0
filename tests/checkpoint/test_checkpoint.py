"""Checkpoints on all ranks of the session: everything comes back, and what does not fit is refused by all ranks."""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Training, checkpoint_of, many_writers, shared_folder
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, all_raise, new_variable, outcomes, several

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint import restoring
from mpistrategy.checkpoint.saving import count_of_writers, places


def shards(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith("shard"))


# ------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("writers", [1, SIZE])
@pytest.mark.parametrize("wait", [True, False])
def test_everything_comes_back(strategy: ms.MirroredStrategy, folder: Path, wait: bool, writers: int) -> None:
    training = Training(strategy)
    for _ in range(3):
        training.step()
    with many_writers(writers > 1):
        saving = training.checkpoint.save(folder / "a b", wait=wait)
        training.checkpoint.wait()
    assert saving.is_committed
    assert saving.path == str(folder / "a b")
    assert shards(folder / "a b") == [f"shard-{number:05}.safetensors" for number in range(writers)]
    there = training.everything()
    training.step()
    again = Training(strategy)
    restored = again.checkpoint.restore(folder / "a b")
    assert restored.ranks == SIZE
    assert restored.notes == ()
    assert restored.layout == strategy.layout()
    assert again.everything() == there
    training.checkpoint.restore(folder / "a b")  # in place, into objects that have gone on
    assert training.everything() == there
    strategy.assert_mirrored()


def test_slots_of_a_variable_with_two_names(strategy: ms.MirroredStrategy, folder: Path) -> None:
    first, other, var = ms.optimizers.Adam(0.1), ms.optimizers.Adam(0.1), new_variable(strategy, np.ones(2))
    strategy.run(lambda: first.apply_gradients([(np.ones(2), var)]))
    ms.Checkpoint(model={"a": var, "b": var}, adam=first).save(folder / "c")
    ms.Checkpoint(model={"b": var, "a": var}, adam=other).restore(folder / "c")
    assert other.slots_of(var)["m"].numpy().all()
    ms.Checkpoint(adam=first).save(folder / "d")  # in which the slots have numbers
    all_raise(
        errors.CheckpointMismatchError,
        lambda: ms.Checkpoint(w=var, adam=other).restore(folder / "d", partial=True),
        words=["another name"],
    )


DTYPES = [
    "bool", "int8", "uint16", "int64", "float16", "float32", "float64", "longdouble", "complex64", "complex128",
    "clongdouble", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip
SHAPES = [(), (0, 3), (5,), (2, 3)]


@pytest.mark.parametrize("writers", [1, SIZE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(strategy: ms.MirroredStrategy, folder: Path, dtype: Any, writers: int) -> None:
    values = [np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2 + 1).astype(dtype) for shape in SHAPES]
    variables, arrays = [new_variable(strategy, value) for value in values], [value.copy() for value in values]
    own = [np.array(value + value * (RANK % 2)).astype(dtype) for value in values]
    fortran = [value.copy(order="F") for value in values]
    checkpoint = checkpoint_of(strategy, variables=variables, arrays=arrays, own=own, fortran=fortran)
    with many_writers(writers > 1):
        checkpoint.save(folder / "c")
    before = [array.tolist() for array in own]
    for number, var in enumerate(variables):
        var.assign(np.zeros(var.shape, dtype))
        arrays[number][...], own[number][...] = 0, 0
    checkpoint.restore(folder / "c")
    expected = [value.tolist() for value in values]
    for restored in (arrays, checkpoint.objects["fortran"], [var.numpy() for var in variables]):
        assert [array.tolist() for array in restored] == expected
    assert {var.dtype for var in variables} == {np.dtype(dtype)}
    assert [array.tolist() for array in own] == before


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
VALUES: dict[str, Any] = {
    "ints": [0, -1, 10**40], "floats": (0.1, -0.0, float("inf"), 5e-324), "nan": float("nan"), "none": None,
    "text": "grün/~0\0", "bytes": b"\0\xff", "complex": 1 - 2j, "flags": [True, False], 7: {"a/b": [(), {}]},
}  # fmt: skip


@settings(max_examples=30)
@given(PLAIN)
@example(VALUES)
def test_plain_values_keep_their_types_and_bits(strategy: ms.MirroredStrategy, value: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = shared_folder(Path(name))
        checkpoint = checkpoint_of(
            strategy, values=[value], number=np.float32(1.5), time=np.datetime64("2024-02-29", "D")
        )
        checkpoint.save(folder / "c")
        before = repr(value)
        checkpoint.objects["values"].clear()
        checkpoint.restore(folder / "c")
        strategy.barrier("read")
    assert repr(checkpoint.objects["values"]) == f"[{before}]"
    number = checkpoint.objects["number"]
    assert (type(number), number) == (np.float32, 1.5)
    assert checkpoint.objects["time"] == np.datetime64("2024-02-29", "D")


def test_lists_that_grow_and_shrink(strategy: ms.MirroredStrategy, folder: Path) -> None:
    history: list[Any] = [np.zeros(2), np.ones(3)]
    mixed: dict[str, Any] = {"w": new_variable(strategy, 1.0), "log": [1], "extra": np.zeros(1)}
    checkpoint = checkpoint_of(strategy, history=history, mixed=mixed)
    checkpoint.save(folder / "c")
    history[:] = [history[0]]
    mixed |= {"log": [1, 2, 3], "new": 5}
    del mixed["extra"]
    checkpoint.restore(folder / "c")
    assert [array.tolist() for array in history] == [[0, 0], [1, 1, 1]]
    assert sorted(mixed) == ["extra", "log", "w"]
    assert mixed["log"] == [1]


def test_one_object_at_two_places_and_lists_in_dicts(strategy: ms.MirroredStrategy, folder: Path) -> None:
    array, twice, inner = np.zeros(2), [0], [0]
    saved = {"m": np.ones(2), "v": np.full(2, 5.0), "first": [1], "then": [2], "in": {"list": [3]}}
    checkpoint_of(strategy, state=saved).save(folder / "c")
    live = {"m": array, "v": array, "first": twice, "then": twice, "in": {"list": inner}}
    checkpoint_of(strategy, state=live).restore(folder / "c")
    assert repr(live) == repr(saved)
    assert inner == [3]


class Model:
    """An object that tells its own state; a variable in it is restored by us."""

    def __init__(self, weights: ms.Variable) -> None:
        self.weights, self.loaded = weights, 0
        self.state: dict[str, Any] = {"mask": np.arange(3), "epochs": 2}

    def state_dict(self) -> dict[str, Any]:
        return {**self.state, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["epochs"] == 99:
            raise RuntimeError("too many epochs")
        self.loaded += 1
        self.state = {key: state[key] for key in ("mask", "epochs")}
        assert state["weights"] is self.weights


def test_objects_with_a_state_dict(strategy: ms.MirroredStrategy, folder: Path) -> None:
    model = Model(new_variable(strategy, [1.0, 2.0]))
    checkpoint = checkpoint_of(strategy, models=[model])
    checkpoint.save(folder / "c")
    model.weights.assign([0.0, 0.0])
    model.state = {"mask": np.zeros(7), "epochs": 3}
    checkpoint.restore(folder / "c")
    assert model.weights.numpy().tolist() == [1, 2]
    assert (model.loaded, model.state["mask"].tolist(), model.state["epochs"]) == (1, [0, 1, 2], 2)
    model.state["epochs"] = 99 if RANK == SIZE - 1 else 2  # not equal: each rank has its own
    checkpoint.save(folder / "d")
    found = outcomes(checkpoint.restore, folder / "d")
    assert all(outcome.error is not None for outcome in found)


KINDS = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM)


def test_generators_go_on(strategy: ms.MirroredStrategy, folder: Path) -> None:
    """Whatever they have drawn before: states that they do have are not refused."""
    generators: list[Any] = [np.random.Generator(kind(RANK + 1)) for kind in KINDS]
    generators += [np.random.RandomState(RANK), np.random.RandomState(np.random.PCG64(RANK))]
    checkpoint = checkpoint_of(strategy, generators=generators)

    def draw(count: int) -> list[Any]:
        return [[rng.random(count).tolist(), rng.standard_normal(1).tolist(), rng.bytes(3)] for rng in generators]

    for number in range(7):
        checkpoint.save(folder / "c", overwrite=True)
        open_files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        assert not any(path.startswith(os.path.realpath(folder)) for path in open_files)
        drawn = draw(number)
        checkpoint.restore(folder / "c")
        assert draw(number) == drawn


@pytest.mark.parametrize("momentum", [None, 0.5, 0.0])
def test_an_optimizer_of_another_step(strategy: ms.MirroredStrategy, folder: Path, momentum: float | None) -> None:
    """Saved before its first step, with a momentum, or after the momentum was turned off."""
    weights, counter = (
        new_variable(strategy, np.ones(2)),
        new_variable(strategy, np.int32(0), aggregation="ONLY_FIRST_REPLICA"),
    )
    sgd = ms.optimizers.SGD(0.5, momentum=0.5, aggregation="MEAN")
    sgd.iterations = counter  # of the program's own
    checkpoint = checkpoint_of(strategy, weights=weights, sgd=sgd)
    for value in () if momentum is None else (0.5, momentum):
        sgd.momentum = value
        strategy.run(lambda: sgd.apply_gradients([(np.ones(2), weights)]))
    checkpoint.save(folder / "c")
    before = weights.numpy().tolist(), int(counter)
    strategy.run(lambda: sgd.apply_gradients([(np.ones(2), weights)]))
    slots = sgd.slots_of(weights)
    checkpoint.restore(folder / "c")
    assert (weights.numpy().tolist(), int(counter)) == before
    if momentum is None:
        assert slots["momentum"].numpy().tolist() == [0, 0]


def test_variables_that_only_the_optimizer_knows(strategy: ms.MirroredStrategy, folder: Path) -> None:
    weights, adam = new_variable(strategy, np.ones(2)), ms.optimizers.Adam(0.5)
    with strategy.scope():
        adam.build([weights])
    checkpoint_of(strategy, adam=adam).save(folder / "c")
    other = ms.optimizers.Adam(0.5)
    text = all_raise(errors.CheckpointMismatchError, checkpoint_of(strategy, adam=other).restore, folder / "c")
    assert "build(variables)" in text
    with strategy.scope():
        other.build([weights])
    checkpoint_of(strategy, adam=other).restore(folder / "c")


def test_iterators_go_on(strategy: ms.MirroredStrategy, folder: Path) -> None:
    def batches() -> list[Any]:
        lists = [np.arange(5.0) + 10 * batch for batch in range(4)]
        own = strategy.distribute_datasets_from_function(lambda context: [np.full(2, context.input_pipeline_id)] * 3)
        return [
            iter(strategy.experimental_distribute_dataset(lists)),
            iter(strategy.experimental_distribute_dataset(array for array in lists)),
            strategy.make_dataset_iterator(lists),
            iter(own),
        ]

    first = batches()
    checkpoint = checkpoint_of(strategy, batches=first)
    for iterator in first:
        next(iterator)
    checkpoint.save(folder / "c")
    there = [[part.tolist() for part in iterator] for iterator in first]
    assert [len(parts) for parts in there] == [3, 3, 3, 2]
    fresh = batches()
    checkpoint_of(strategy, batches=fresh).restore(folder / "c")
    assert [[part.tolist() for part in iterator] for iterator in fresh] == there
    text = all_raise(errors.CheckpointMismatchError, checkpoint.restore, folder / "c")  # the generator cannot go back
    assert "batches/1" in text
    other = ms.Dataset.from_arrays(np.arange(20.0), global_batch_size=5)
    others = [iter(strategy.experimental_distribute_dataset(other)), *batches()[1:]]
    found = outcomes(checkpoint_of(strategy, batches=others).restore, folder / "c")
    assert "batches/0: a position in global batches" in found[0].text


def test_what_is_not_read_when_an_iterator_goes_on(strategy: ms.MirroredStrategy, folder: Path) -> None:
    class Rows:
        shape, dtype = (100,), np.dtype(np.float64)
        read: list[int] = []  # noqa: RUF012

        def __getitem__(self, rows: slice) -> Any:
            self.read.append(rows.start)
            return np.arange(100.0)[rows]

    data = ms.Dataset.from_arrays(Rows(), global_batch_size=10)
    batches = iter(strategy.experimental_distribute_dataset(data))
    checkpoint = checkpoint_of(strategy, batches=batches)
    for _ in range(7):
        next(batches)
    checkpoint.save(folder / "c")
    batches = checkpoint.objects["batches"] = iter(strategy.experimental_distribute_dataset(data))
    Rows.read.clear()
    checkpoint.restore(folder / "c")
    assert strategy.gather(next(batches), 0).tolist() == list(range(70, 80))
    assert min(Rows.read) >= 70


# ------------------------------------------------------------------------------------------------ what does not fit


def test_what_does_not_fit_is_listed_and_nothing_changes(strategy: ms.MirroredStrategy, folder: Path) -> None:
    kept = new_variable(strategy, np.ones(3))
    checkpoint_of(
        strategy, kept=kept, w=new_variable(strategy, np.ones(2)), dtype=new_variable(strategy, np.ones(2)), gone=1,
        array=np.zeros(3), adam=ms.optimizers.Adam(), rng=np.random.default_rng(0), seeded=strategy.rng(1), kind=1.0,
        total=new_variable(strategy, 1, synchronization="ON_READ", aggregation="SUM"),
    ).save(folder / "c")  # fmt: skip
    kept.assign(np.zeros(3))
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    other = checkpoint_of(
        strategy, kept=kept, w=new_variable(strategy, np.ones(3)), dtype=new_variable(strategy, np.ones(2, np.float32)),
        new=1, array=frozen, adam=ms.optimizers.SGD(), rng=np.random.Generator(np.random.MT19937(0)),
        seeded=strategy.rng(2), kind=kept, total=new_variable(strategy, 1, synchronization="ON_READ"),
    )  # fmt: skip
    text = all_raise(errors.CheckpointMismatchError, other.restore, folder / "c")
    for line in (
        "w: variable <f8[2] in the checkpoint, variable <f8[3] here",
        "dtype: variable <f8[2] in the checkpoint, variable <f4[2] here",
        "gone: plain in the checkpoint, nothing here", "new: a int here, nothing in the checkpoint",
        "array: ShapeError: here: found the array = ndarray; expected a writeable ndarray",
        "adam: Adam with slots ['m', 'v'] in the checkpoint, SGD [] here", "rng: ",
        "seeded: seed 1 in the checkpoint, 2 here", "total: variable <i8[] with aggregation SUM in the checkpoint, ",
        "kind: plain in the checkpoint, variable <f8[3] here",
    ):  # fmt: skip
        assert line in text
    assert kept.numpy().tolist() == [0, 0, 0]


@pytest.mark.mpi(min_size=2)
def test_what_does_not_fit_on_one_rank(strategy: ms.MirroredStrategy, folder: Path) -> None:
    kept = new_variable(strategy, np.ones(3))
    checkpoint_of(strategy, kept=kept, own=np.ones(RANK)).save(folder / "c")
    kept.assign(np.zeros(3))
    other = checkpoint_of(strategy, kept=kept, own=np.zeros(RANK + (RANK == SIZE - 1)))
    all_raise(errors.CheckpointMismatchError, other.restore, folder / "c")
    assert kept.local_copy().tolist() == [0, 0, 0]


def test_a_part_can_be_restored(strategy: ms.MirroredStrategy, folder: Path) -> None:
    a, b = new_variable(strategy, [1.0]), new_variable(strategy, [2.0])
    checkpoint_of(strategy, a=a, old=3, nest={"x": a}).save(folder / "c")
    a.assign([0.0])
    restored = checkpoint_of(strategy, a=a, b=b, nest={"x": a}).restore(folder / "c", partial=True)
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([1], [2])
    assert sorted(restored.left_out) == ["b", "old"]
    text = all_raise(
        errors.CheckpointMismatchError,
        lambda: checkpoint_of(strategy, nest={"x": a, "y": b}).restore(folder / "c", partial=True),
    )
    assert "nest/y: variable <f8[1] here, nothing in the checkpoint" in text


class Number(int):
    """Plain values are of Python's own classes."""


def endless() -> list[Any]:
    loop: list[Any] = [1]
    loop += [loop, loop]
    return loop


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "a function": (lambda: len, errors.OptionTypeError),
    "a generator": (lambda: (x for x in ()), errors.OptionTypeError),
    "objects": (lambda: np.array([None]), errors.DTypeError),
    "an object": (object, errors.OptionTypeError),
    "a masked array": (lambda: np.ma.masked_array([1.0], mask=[True]), errors.LeafError),
    "keys": (lambda: {1: np.zeros(1), "1": np.zeros(1)}, errors.OptionTypeError),
    "a key of plain values": (lambda: {1.5: 2}, errors.OptionTypeError),
    "a number of another class": (lambda: Number(1), errors.OptionTypeError),
    "a named thing": (lambda: np.float64, errors.OptionTypeError),
    "a list that contains itself": (endless, errors.OptionError),
    "more text than is read": (lambda: "x" * 2**26, errors.OptionError),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_objects_without_a_state(strategy: ms.MirroredStrategy, folder: Path, what: str, rank: int) -> None:
    make, error = REFUSED[what]
    checkpoint = checkpoint_of(strategy, ok=1, nest=[make() if rank == RANK else 1])
    all_raise(error, checkpoint.save, folder / "c")
    assert not (folder / "c").exists()


@pytest.mark.parametrize("name", ["", "_x", "a/b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(errors.OptionError):
        ms.Checkpoint(**{name: 1})


#: Paths of checkpoints.
WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "a number": (5, errors.OptionTypeError), "nothing": ("", errors.OptionError), "a NUL": ("a\0b", errors.OptionError),
    "the root": ("/", errors.OptionError), "bytes": (b"x", errors.OptionTypeError),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("method", ["save", "restore"])
def test_paths_that_are_none(strategy: ms.MirroredStrategy, folder: Path, what: str, method: str) -> None:
    path, error = WRONG[what]
    all_raise(error, getattr(checkpoint_of(strategy, x=1), method), path if RANK == SIZE - 1 else folder / "x")
    assert os.listdir(folder) == [] or RANK  # what a rank left would be seen by rank 0, whose folder it is


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_not_do_the_same(strategy: ms.MirroredStrategy, folder: Path) -> None:
    weights = new_variable(strategy, np.ones(2))
    checkpoint = checkpoint_of(strategy, w=weights)
    other = checkpoint_of(strategy, w=weights, more=1)
    differences: list[Callable[[], Any]] = [
        lambda: checkpoint.save(folder / ("a" if RANK else "b")),
        lambda: (checkpoint if RANK else other).save(folder / "a"),
        lambda: checkpoint.save(folder / "a", wait=bool(RANK)),
        lambda: checkpoint.save(folder / "a") if RANK else checkpoint.restore(folder / "a"),
    ]
    for call in differences:
        all_raise(errors.CollectiveMismatchError, call)
    strategy.barrier("all have left")
    assert os.listdir(folder) == [] or RANK
    checkpoint.save(folder / "a")


def test_not_in_a_step_and_not_after_close(folder: Path) -> None:
    with ms.MirroredStrategy() as strategy:
        checkpoint = checkpoint_of(strategy, x=1)
        for method in (checkpoint.save, checkpoint.restore):
            all_raise(errors.ContextError, strategy.run, method, (folder / "x",))
    all_raise(errors.ContextError, checkpoint.save, folder / "x")


@pytest.mark.mpi(min_size=2)  # variables of one replica belong to anybody
def test_a_checkpoint_of_two_strategies(strategy: ms.MirroredStrategy, folder: Path) -> None:
    with closing(ms.MirroredStrategy()) as other:
        checkpoint = checkpoint_of(strategy, a=new_variable(strategy, 1.0), b=new_variable(other, 1.0))
        all_raise(errors.OptionError, checkpoint.save, folder / "x")


@several
@pytest.mark.parametrize("make", [ms.Variable, lambda value: Model(ms.Variable(value))])
def test_a_name_stands_for_the_same_object_on_all_ranks(
    strategy: ms.MirroredStrategy, folder: Path, make: Callable[[Any], Any]
) -> None:
    """Or nothing is saved or restored: names alone do not tell."""
    with strategy.scope():
        one, two = make(1.0), make(1.0)
    checkpoint_of(strategy, one=one, two=two).save(folder / "c")
    if RANK == SIZE - 1:
        one, two = two, one
    wrong = checkpoint_of(strategy, one=one, two=two)
    for call in (wrong.save, wrong.restore):
        text = all_raise(errors.CollectiveMismatchError, call, folder / "c")
        assert f"rank {SIZE - 1}" in text
        assert re.search(r" is .* \(variable \d+\)", text), text


# ------------------------------------------------------------------------------------------------ writers

MIB = 2**20
#: Ranks, 8 on a node; bytes that are saved once; bytes of each rank; writers, and their nodes.
PLANS = {
    "nothing": (64, 0, 0, 1, 1), "little": (10_000, MIB, 0, 1, 1), "one for some nodes": (1024, 640 * MIB, 0, 10, 10),
    "one a node": (32, 256 * MIB, 0, 4, 4), "some a node": (32, 1000 * MIB, 0, 16, 4),
    "not more of one": (64, 2**40, 0, 64, 8), "nor of the job": (10_000, 2**40, 0, 1250, 1250),
    "states of generators": (10_000, MIB, 6900, 2, 2), "much of each": (32, MIB, 100 * MIB, 32, 4),
}  # fmt: skip


@pytest.mark.one_rank
@pytest.mark.parametrize("what", PLANS)
def test_the_bytes_say_how_many_write(what: str) -> None:
    ranks, once, own, count, nodes = PLANS[what]
    node_of = [rank // 8 for rank in range(ranks)]
    assert count_of_writers(node_of, once + own * ranks, own * ranks) == count
    writers, _ = places(node_of, count, ranks)
    assert (len({*writers}), len({rank // 8 for rank in writers})) == (count, nodes)


def test_large_arrays_are_split(strategy: ms.MirroredStrategy, folder: Path) -> None:
    with many_writers():
        checkpoint_of(strategy, large=np.arange(1000.0), odd=np.arange(7)).save(folder / "c")
    sizes = [(folder / "c" / name).stat().st_size for name in shards(folder / "c")]
    assert min(sizes) > 8 * (1000 // SIZE)


class NoMemory:
    def __array__(self, *_: object, **__: object) -> Any:
        raise MemoryError


@several
def test_a_rank_without_memory_for_what_the_ranks_had(
    strategy: ms.MirroredStrategy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of(strategy, own=np.full(2, RANK))
    checkpoint.save(folder / "c")
    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(restoring, "NOTHING", NoMemory())
        found = outcomes(checkpoint.restore, folder / "c")
    assert [outcome.error for outcome in found] == [errors.RemoteError] * (SIZE - 1) + [Exception]
    assert f"rank {SIZE - 1} could not make this call" in found[0].text
    checkpoint.restore(folder / "c")


# ------------------------------------------------------------------------------------------------ objects made anew


class AdamState(NamedTuple):
    """As optax has it."""

    count: Any
    mu: Any


def with_jax(number: float) -> Any:
    jax_numpy = pytest.importorskip("jax.numpy")
    return AdamState(jax_numpy.int32(number), {"w": jax_numpy.full(3, number, "float32")})


def a_tree(number: float) -> Any:
    jax_numpy = pytest.importorskip("jax.numpy")
    return importlib.import_module("mpistrategy.jax").Tree({"w": jax_numpy.full(3, number, "float32")})


#: What a loop makes anew, by a number.
MADE: dict[str, Callable[[float], Any]] = {
    "a nest": lambda number: {"epoch": number, "state": (None, AdamState(int(number), np.full(3, number)))},
    "JAX's arrays": with_jax,
    "a tree of JAX's": a_tree,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", MADE)
def test_a_new_object_that_a_checkpoint_does_not_know(strategy: ms.MirroredStrategy, folder: Path, what: str) -> None:
    """Is saved through a function; without one a warning says so, once."""
    x = MADE[what](1.0)
    checkpoint = checkpoint_of(strategy, x=x, weights=new_variable(strategy, 1.0), lasting=lambda: 5)
    through = checkpoint_of(strategy, x=lambda: x)
    for number in (1, 2, 3):
        x = MADE[what](float(number))
        is_told = number == 2 and RANK == 0
        with pytest.warns(errors.StaleStateWarning, match="lambda: x") if is_told else nullcontext():
            checkpoint.save(folder / f"{number}")
        through.save(folder / f"through {number}")
    last = repr(x)
    x = MADE[what](0.0)
    assert repr(through.restore(folder / "through 3").objects["x"]) == last
    assert callable(through.objects["x"])


@pytest.mark.filterwarnings("error")
def test_what_changes_in_place_is_nothing_to_warn_of(strategy: ms.MirroredStrategy, folder: Path) -> None:
    array, progress, rows = np.zeros(2), {"step": 0}, ms.Rows(np.zeros(RANK))
    with strategy.scope():
        checkpoint = ms.Checkpoint(
            weights=ms.Variable(np.ones(2)), optimizer=ms.optimizers.SGD(0.1), mean=ms.metrics.Mean(), array=array,
            progress=progress, rows=rows, streams=strategy.rng(1), generator=np.random.default_rng(1),
            empty=np.zeros(0), nothing=[],
        )  # fmt: skip
    for step in range(3):
        array += RANK == SIZE - 1
        rows.value = np.full(RANK + step, 1.0)
        progress["step"] = step
        checkpoint.save(folder / f"{step}")


def test_functions_that_fail(strategy: ms.MirroredStrategy, folder: Path) -> None:
    def failing() -> Any:
        return 1 if RANK < SIZE - 1 else {}["state"]

    for function in (failing, lambda: failing, lambda: object(), len):
        assert all(outcome.error for outcome in outcomes(checkpoint_of(strategy, x=function).save, folder / "c"))
    assert os.listdir(folder) == [] or RANK


# ------------------------------------------------------------------------------------------------ files


def test_what_is_there_stays(strategy: ms.MirroredStrategy, folder: Path) -> None:
    x, path = new_variable(strategy, 1.0), folder / "deep" / "er"
    checkpoint = checkpoint_of(strategy, x=x)
    checkpoint.save(path / "c")
    x.assign(2.0)
    all_raise(errors.CheckpointMissingError, checkpoint.restore, path / "none")
    if RANK == 0:
        (path / "file").touch()
        (path / "empty").mkdir()
        (path / "link").symlink_to(path / "c")
    strategy.barrier("made")
    for name in ("c", "file", "link"):
        all_raise(errors.CheckpointExistsError, lambda name=name: checkpoint.save(path / name, overwrite=name != "c"))
    assert float(ms.Checkpoint.arrays(path / "c")["x"]) == 1
    strategy.barrier("read")
    checkpoint.save(path / "c", overwrite=True)
    checkpoint.save(path / "empty")
    assert float(ms.Checkpoint.arrays(path / "c")["x"]) == 2
    assert sorted(os.listdir(path)) == ["c", "empty", "file", "link"]


def test_shards_are_files_of_safetensors(strategy: ms.MirroredStrategy, folder: Path) -> None:
    """Its library reads them (tried once, with all dtypes that both have)."""
    checkpoint_of(strategy, x=np.arange(3.0), y=np.ones((2, 2), np.int8)).save(folder / "c")
    data = (folder / "c" / shards(folder / "c")[0]).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:end])["x"]
    assert (entry["dtype"], entry["shape"]) == ("F64", [3])
    assert np.frombuffer(data[end:][slice(*entry["data_offsets"])]).tolist() == [0, 1, 2]
    with pytest.raises(errors.CheckpointDamagedError):
        ms.Checkpoint.arrays(folder / "c" / "manifest.json")


def test_the_order_of_gradient_buckets_is_kept(folder: Path) -> None:
    """Restored before buckets are cut it is no news; afterwards another order is."""
    orders: dict[int, Any] = {}
    for run, nbytes in enumerate((64, 64, 2**20)):
        with ms.MirroredStrategy() as strategy:
            variables = [new_variable(strategy, np.zeros(20, np.float32)) for _ in range(3)]
            optimizer = ms.optimizers.SGD(0.1)
            checkpoint = checkpoint_of(strategy, x=1)
            if run:
                assert checkpoint.restore(folder / "c").notes == ()
            optimizer.gradient_buckets(variables, bytes_per_bucket=nbytes)
            orders[run] = strategy.layout()["gradient_buckets"]
            if not run:
                checkpoint.save(folder / "c")
            notes = checkpoint.restore(folder / "c").notes
    assert orders[0] == orders[1] == [[[2], [1], [0]]]
    assert orders[2] == [[[2, 1, 0]]]
    assert notes == ("gradient_buckets: [[[2], [1], [0]]] when it was saved, [[[2, 1, 0]]] now",)
