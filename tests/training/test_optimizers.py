"""Optimizers: N replicas do what one device does with the whole batch, and both do what the papers' formulas say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from replicas import BFLOAT16, RANK, RANKS, SIZE, outcomes, same_everywhere

import mpistrategy as ms
from mpistrategy import errors, optimizers
from mpistrategy.arrays.dtypes import Array

pytestmark = pytest.mark.mpi


def apply(strategy: ms.Strategy, optimizer: optimizers.Optimizer, *pairs: tuple[Any, ms.Variable]) -> None:
    strategy.run(optimizer.apply_gradients, args=(list(pairs),))


# ------------------------------------------------------------------------------------------------- the formulas
# Each takes the gradients of all steps and yields the variable (which begins at 0) after each step, in float64.


# They are those of keras.optimizers, with a learning rate that changes: with one that does not, other formulas of
# momentum (torch's, say) come to the same.

RATE = ms.schedules.PiecewiseConstantDecay([0, 2], [0.1, 0.01, 0.3])


def sgd(gradients: list[Array], momentum: float = 0.0, nesterov: bool = False) -> Iterator[Array]:
    w, v = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    for t, g in enumerate(gradients):
        rate = RATE(t)
        v = momentum * v - rate * g
        w = w + (momentum * v - rate * g if nesterov else v)
        yield w


def adam(gradients: list[Array], b1: float, b2: float, eps: float, decay: float = 0.0) -> Iterator[Array]:
    w, m, v = (np.zeros_like(gradients[0]) for _ in range(3))
    for t, g in enumerate(gradients, start=1):
        rate = RATE(t - 1)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        w = w - rate * decay * w
        w = w - rate * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)
        yield w


CASES: dict[str, tuple[Callable[[str], optimizers.Optimizer], Callable[[list[Array]], Iterator[Array]]]] = {
    "SGD": (lambda a: optimizers.SGD(RATE, aggregation=a), lambda g: sgd(g)),
    "momentum": (lambda a: optimizers.SGD(RATE, momentum=0.9, aggregation=a), lambda g: sgd(g, 0.9)),
    "nesterov": (
        lambda a: optimizers.SGD(RATE, momentum=0.9, nesterov=True, aggregation=a),
        lambda g: sgd(g, 0.9, nesterov=True),
    ),
    "Adam": (
        lambda a: optimizers.Adam(RATE, 0.8, 0.99, 1e-5, aggregation=a),
        lambda g: adam(g, 0.8, 0.99, 1e-5),
    ),
    "AdamW": (
        lambda a: optimizers.AdamW(RATE, 0.05, 0.8, 0.99, 1e-5, aggregation=a),
        lambda g: adam(g, 0.8, 0.99, 1e-5, decay=0.05),
    ),
}


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("name", CASES)
def test_each_step_is_the_formula_of_the_reduced_gradient(strategy: ms.Strategy, name: str, aggregation: str) -> None:
    make, formula = CASES[name]
    of_ranks = [[np.random.default_rng([step, rank]).normal(size=(2, 3)) for rank in RANKS] for step in range(6)]
    reduced = [np.sum(parts, axis=0) / (SIZE if aggregation == "MEAN" else 1) for parts in of_ranks]
    with strategy.scope():
        variable = ms.Variable(np.zeros((2, 3)))
        optimizer = make(aggregation)
    for parts, right in zip(of_ranks, formula(reduced), strict=True):
        apply(strategy, optimizer, (parts[RANK], variable))
        np.testing.assert_allclose(variable, right, rtol=1e-12, atol=1e-13)
        assert same_everywhere(variable.local_copy())
    assert optimizer.iterations is not None
    assert int(optimizer.iterations) == 6


# ------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_a_sparse_gradient_is_the_dense_one_it_stands_for(strategy: ms.Strategy, aggregation: str) -> None:
    """Every rank names other rows, as many as its number; a row named twice counts twice."""
    indices = np.array([0, 0, *range(RANK)])
    slices = ms.IndexedSlices(np.full((len(indices), 2), RANK + 1.0), indices, (SIZE + 1, 2))
    with strategy.scope():
        sparse, dense = (ms.Variable(np.zeros((SIZE + 1, 2))) for _ in range(2))
        one, two = (optimizers.SGD(0.5, aggregation=aggregation) for _ in range(2))
    for _ in range(2):
        apply(strategy, one, (slices, sparse))
        apply(strategy, two, (slices.to_dense(), dense))
    np.testing.assert_allclose(sparse, dense, rtol=1e-15)
    assert float(dense[0, 0]) != 0


def test_a_variable_without_a_gradient_is_left_alone(strategy: ms.Strategy) -> None:
    with strategy.scope():
        one, two = ms.Variable(1.0), ms.Variable(2.0)
        adam = optimizers.Adam()
    apply(strategy, adam, (None, one), (1.0, two))
    assert float(one) == 1
    assert float(two) < 2
    assert adam.slots_of(one) == {}


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32"], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_converted_to_the_variables_dtype(strategy: ms.Strategy, name: str, dtype: Any) -> None:
    make, formula = CASES[name]
    with strategy.scope():
        variable = ms.Variable(np.zeros(2, dtype))
        optimizer = make("MEAN")
    right = list(formula([np.array([1.0, -0.5])] * 3))
    for _ in range(3):
        apply(strategy, optimizer, (np.array([1.0, -0.5]), variable))
    assert variable.dtype == np.dtype(dtype)
    np.testing.assert_allclose(variable.numpy().astype(float), right[-1], rtol=1e-5 if dtype == "float32" else 0.05)


def test_clipping_limits_the_norm_of_all_reduced_gradients(strategy: ms.Strategy) -> None:
    with strategy.scope():
        w, b = ms.Variable(np.zeros(2)), ms.Variable(0.0)
        clipped = optimizers.SGD(1.0, global_clipnorm=1.0)
    apply(strategy, clipped, (np.array([3.0, 0.0]), w), (4.0, b))
    np.testing.assert_allclose(w, [-0.6, 0])
    np.testing.assert_allclose(b, -0.8)


def test_a_momentum_that_is_set_later_gets_its_slots(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variables = [ms.Variable(np.zeros(3)), ms.Variable(np.zeros(4, np.float32))]
    optimizer, gradient = optimizers.SGD(0.5, aggregation="MEAN"), 2.0

    def step() -> None:
        strategy.run(lambda: optimizer.apply_gradients([(np.full(v.shape, gradient, v.dtype), v) for v in variables]))

    step()
    optimizer.momentum = 0.5
    for _ in range(2):
        step()
    optimizer.momentum = 0.0
    step()
    # -1; v = -1, then v = 0.5 * -1 - 1; -1
    assert all((v.numpy() == -1 - 1 - 1.5 - 1).all() for v in variables)
    assert all((optimizer.slots_of(v)["momentum"].numpy() == -1.5).all() for v in variables)


def test_the_update_is_in_place(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable(np.zeros(2))
        optimizer = optimizers.Adam(0.1)
        optimizer.build([variable])
    view = np.asarray(variable)
    slots = {name: np.asarray(slot) for name, slot in optimizer.slots_of(variable).items()}
    apply(strategy, optimizer, (np.ones(2), variable))
    assert (view != 0).all()
    assert set(slots) == {"m", "v"}
    assert all((slot != 0).all() for slot in slots.values())


# ------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.mpi(min_size=2)
def test_gradients_of_equal_shape_in_another_order_are_not_mixed_up(strategy: ms.Strategy) -> None:
    with strategy.scope():
        v, w = ms.Variable(np.zeros(2)), ms.Variable(np.zeros(2))
        sgd = optimizers.SGD(0.1)
    pairs = [(np.ones(2), v), (np.full(2, 100.0), w)]
    ends = outcomes(strategy.run, sgd.apply_gradients, (pairs if RANK else pairs[::-1],))
    assert all(end.error is errors.CollectiveMismatchError for end in ends)
    np.testing.assert_array_equal(v.local_copy(), [0, 0])
