"""Optimizers: each step is the formula, to the bit, and N replicas do what one device does with the whole batch."""

from __future__ import annotations

import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizing import FORMULAS, OPTIMIZERS, apply, gradients_for, model
from replicas import BFLOAT16, RANK, SIZE, bits, new_variable, part_of, same_everywhere

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.optimizers import SGD, Adam, Optimizer
from mpistrategy.training import kernels

pytestmark = pytest.mark.mpi
FLOATS = [np.dtype(name) for name in ("float16", "float32", "float64", "longdouble")]


@pytest.fixture(scope="module")
def alone() -> ms.Strategy:
    return ms.OneDeviceStrategy("CPU:0")


# ------------------------------------------------------------------------------------------------- the formulas


def drawn(random: np.random.Generator, shape: Any, dtype: Any) -> Array:
    """Return numbers of many magnitudes."""
    return np.asarray(random.standard_normal(shape) * 10.0 ** random.integers(-3, 3, shape)).astype(dtype)


@settings(max_examples=part_of(100))
@given(
    name=st.sampled_from(list(OPTIMIZERS)),
    dtype=st.sampled_from(FLOATS),
    shape=st.one_of(st.just(()), st.tuples(st.integers(0, 300)), st.tuples(st.integers(1, 40), st.integers(0, 40))),
    chunk=st.sampled_from([16, 64, 1000, 2**18]),
    rates=st.lists(st.floats(0.001, 0.5), min_size=3, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_the_bits_are_those_of_the_formula(
    alone: ms.Strategy, name: str, dtype: Any, shape: Any, chunk: int, rates: list[float], seed: int
) -> None:
    random = np.random.default_rng(seed)
    start, gradients = drawn(random, shape, dtype), [drawn(random, shape, dtype) for _ in range(3)]
    variable, optimizer = new_variable(alone, start), OPTIMIZERS[name](lambda step: rates[step])
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), np.errstate(all="ignore"):
        patch.setattr(kernels, "CHUNK_BYTES", chunk)
        for gradient, (right, slots) in zip(gradients, FORMULAS[name](start, gradients, rates), strict=True):
            before = bits(gradient)
            apply(alone, optimizer, [gradient], [variable])
            assert bits(variable) == bits(right)
            found = {key: bits(slot) for key, slot in optimizer.slots_of(variable).items()}
            assert found == {key: bits(slot) for key, slot in slots.items()}
            assert bits(gradient) == before


# -------------------------------------------------------------------------------------------- N replicas, one device


def train(strategy: ms.Strategy, optimizer: Optimizer, batches: list[Any], dtype: Any) -> list[Any]:
    """Linear regression with an embedding: dense, 0-d, sparse and float64 gradients; the weights after every step."""
    w, b = new_variable(strategy, np.zeros(3, dtype), name="w"), new_variable(strategy, np.zeros((), dtype), name="b")
    table = new_variable(strategy, np.linspace(-1, 1, 10).reshape(5, 2).astype(dtype), name="table")

    def step(x: Any, y: Any, ids: Any, size: int) -> None:
        rows = table[ids]
        error = (x @ w[...] + b[...] + rows.sum(axis=1) - y) * dtype(2 / size)
        rows_gradient = ms.IndexedSlices(np.repeat(error[:, None], 2, axis=1), ids, table.shape)
        optimizer.apply_gradients([(x.T @ error.astype("f8"), w), (np.asarray(error.sum()), b), (rows_gradient, table)])

    trajectory = []
    for x, y, ids, cuts in batches:
        part = slice(cuts[RANK], cuts[RANK + 1]) if strategy.num_replicas_in_sync > 1 else slice(None)
        strategy.run(step, args=(x[part].astype(dtype), y[part].astype(dtype), ids[part], len(x)))
        trajectory.append([v.read_value() for v in (w, b, table)])
    return trajectory


@settings(max_examples=25)
@given(
    name=st.sampled_from(list(OPTIMIZERS)),
    dtype=st.sampled_from([np.float64, np.float32]),
    cuts=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3).map(sorted), min_size=3, max_size=5),
    clipnorm=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 1000),
)
def test_replicas_do_what_one_device_does_with_the_whole_batch(
    strategy: ms.Strategy, name: str, dtype: Any, cuts: list[list[int]], clipnorm: float | None, seed: int
) -> None:
    """However the batch is split: parts of any size, and ranks without rows."""
    random = np.random.default_rng(seed)
    batches = [
        (random.standard_normal((7, 3)), random.standard_normal(7), random.integers(0, 5, 7), [0, *cut[: SIZE - 1], 7])
        for cut in cuts
    ]
    one, two = (OPTIMIZERS[name](0.05, global_clipnorm=clipnorm) for _ in range(2))
    together = train(strategy, one, batches, dtype)
    alone = train(ms.OneDeviceStrategy(), two, batches, dtype)
    assert same_everywhere(together)
    # Adam divides by the root of v: where a gradient is nearly 0, its rounding decides the step.
    exact = 1e-9 if dtype is np.float64 else 2e-3
    for mine, whole in zip(together, alone, strict=True):
        for a, b in zip(mine, whole, strict=True):
            assert a.dtype == b.dtype == dtype
            np.testing.assert_allclose(a, b, rtol=exact, atol=exact)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [*FLOATS, BFLOAT16, np.dtype(np.complex64)], ids=str)
def test_every_dtype_stays_what_it_is(strategy: ms.Strategy, name: str, dtype: Any) -> None:
    """Hyper-parameters are Python numbers: a float64 among them must not make the weights float64."""
    narrow, shapes = np.dtype(dtype), ((2, 2), ())
    variables = model(strategy, [(shape, dtype) for shape in shapes])
    wide = model(strategy, [(shape, "complex128" if narrow.kind == "c" else "float64") for shape in shapes])
    optimizer, other = (OPTIMIZERS[name](np.float64(0.5)) for _ in range(2))
    for number in range(2):
        for each, of in ((optimizer, variables), (other, wide)):
            apply(strategy, each, gradients_for(of, number), of)
    assert {v.dtype for v in (*variables, *optimizer.variables[1:])} == {narrow}
    assert same_everywhere([v.local_copy() for v in (*variables, *optimizer.variables)])
    for var, right in zip(variables, wide, strict=True):
        np.testing.assert_allclose(var.numpy().astype(right.dtype), right, rtol=0.05, atol=0.05)


# ------------------------------------------------------------------------------------------------- sparse gradients


def test_momentum_moves_only_the_rows_that_a_sparse_gradient_names(strategy: ms.Strategy) -> None:
    """TensorFlow's momentum does that; its Adam moves all rows that have ever been named."""
    mine, dense = new_variable(strategy, np.zeros((4, 2))), new_variable(strategy, np.zeros((4, 2)))
    momentum, adam = SGD(0.1, momentum=0.5), Adam(0.1)

    def step(*rows: int) -> None:
        slices = ms.IndexedSlices(np.ones((len(rows), 2)), np.array(rows, np.int32), (4, 2))
        apply(strategy, momentum, [slices], [mine])
        apply(strategy, adam, [slices], [dense])

    step(1, 1)  # repeated rows add up
    np.testing.assert_allclose(mine.read_value()[:, 0], [0, -0.2 * SIZE, 0, 0])
    step(*([0] if RANK == 0 else []))  # most ranks have none
    np.testing.assert_allclose(mine.read_value()[:, 0], [-0.1, -0.2 * SIZE, 0, 0])
    np.testing.assert_allclose(momentum.slots_of(mine)["momentum"][:, 0], [-0.1, -0.2 * SIZE, 0, 0])
    second = dense.read_value()[:, 0]
    assert second[1] < -0.1
    assert second[2] == second[3] == 0


# ------------------------------------------------------------------------------------------------- slots and memory


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_live_beside_their_variables_and_are_made_once(strategy: ms.Strategy, name: str) -> None:
    variables = model(strategy, [((2,), "float32"), ((3, 1), "float64")])
    early, lazy = OPTIMIZERS[name](), OPTIMIZERS[name]()
    with pytest.raises(ms.errors.ContextError, match="scope"):
        early.build(variables)
    with strategy.scope():
        early.build(variables)
        built = early.variables
        early.build(variables)
    assert (lazy.slots_of(variables[0]), lazy.iterations) == ({}, None)
    for optimizer in (early, lazy):
        apply(strategy, optimizer, gradients_for(variables, 0), variables)
        for v in variables:
            assert optimizer.slots_of(v).keys() == optimizer.slot_values.keys()
            for slot in optimizer.slots_of(v).values():
                assert (slot.shape, slot.dtype, slot.trainable, slot.strategy) == (v.shape, v.dtype, False, strategy)
    assert early.variables == built


def test_a_momentum_that_is_set_later_gets_its_slots(strategy: ms.Strategy) -> None:
    variables = [new_variable(strategy, np.zeros(3)), new_variable(strategy, np.zeros(4, np.float32))]
    optimizer = SGD(0.5, aggregation="MEAN")
    for momentum in (0.0, 0.5, 0.5, 0.0):
        optimizer.momentum = momentum
        apply(strategy, optimizer, [np.full(v.shape, 2.0, v.dtype) for v in variables], variables)
    # -1; v = -1, then v = 0.5 * -1 - 1; -1
    assert all((v.numpy() == -1 - 1 - 1.5 - 1).all() for v in variables)
    assert all((optimizer.slots_of(v)["momentum"].numpy() == -1.5).all() for v in variables)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_step_is_in_place_and_takes_no_memory_of_the_variables_size(alone: ms.Strategy, name: str) -> None:
    size = 2**21
    with alone.scope():
        variable, optimizer = ms.Variable(np.zeros(size, np.float32)), OPTIMIZERS[name]()
        optimizer.build([variable])
    gradient = np.ones(size, np.float32)
    views = [np.asarray(variable), *map(np.asarray, optimizer.slots_of(variable).values())]
    apply(alone, optimizer, [gradient], [variable])
    assert all((view != 0).all() for view in views)
    tracemalloc.start()
    apply(alone, optimizer, [gradient], [variable])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.25 * gradient.nbytes  # the reduction's result; the update itself adds next to nothing
