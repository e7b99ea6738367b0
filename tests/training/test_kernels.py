"""Updates in place: the bits of the formulas on whole arrays, without a temporary of the variable's size."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicas import BFLOAT16, RANK, SIZE, bits

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.optimizers import SGD, Adam, AdamW, Optimizer
from mpistrategy.training import kernels

pytestmark = pytest.mark.mpi

# ------------------------------------------------------------------------------------------------- the formulas
# In the variable's dtype, operation by operation: what the kernels must give to the bit.


def stored(value: Any, dtype: Any) -> Array:
    return np.asarray(value).astype(dtype)


def sgd(p: Array, gradients: list[Array], rate: float, momentum: float = 0.0, nesterov: bool = False) -> Iterator[Any]:
    v = np.zeros_like(p)
    for g in gradients:
        if momentum:
            v = stored(momentum * v - rate * g, p.dtype)
            p = p - stored(rate * g - momentum * v if nesterov else -v, p.dtype)
            yield p, {"momentum": v}
        else:
            p = p - stored(rate * g, p.dtype)
            yield p, {}


def adam(
    p: Array, gradients: list[Array], rate: float, b1: float, b2: float, epsilon: float, decay: float = 0.0
) -> Iterator[Any]:
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, start=1):
        if decay:
            p = p - stored(rate * decay * p, p.dtype)
        m = stored(b1 * m + (1 - b1) * g, p.dtype)
        v = stored(b2 * v + (1 - b2) * g * g, p.dtype)
        size = rate * float(np.sqrt(1 - b2**t)) / (1 - b1**t)
        p = p - stored(size * m / (np.sqrt(v) + epsilon), p.dtype)
        yield p, {"m": m, "v": v}


FORMULAS: dict[str, tuple[Callable[[], Optimizer], Callable[[Array, list[Array]], Iterator[Any]]]] = {
    "SGD": (lambda: SGD(0.1), lambda p, g: sgd(p, g, 0.1)),
    "momentum": (lambda: SGD(0.03, momentum=0.9), lambda p, g: sgd(p, g, 0.03, 0.9)),
    "nesterov": (lambda: SGD(0.03, momentum=0.9, nesterov=True), lambda p, g: sgd(p, g, 0.03, 0.9, True)),
    "Adam": (lambda: Adam(0.01, 0.8, 0.99, 1e-5), lambda p, g: adam(p, g, 0.01, 0.8, 0.99, 1e-5)),
    "AdamW": (lambda: AdamW(0.01, 0.05, 0.8, 0.99, 1e-5), lambda p, g: adam(p, g, 0.01, 0.8, 0.99, 1e-5, 0.05)),
}
FLOATS = [np.dtype(name) for name in ("float16", "float32", "float64", "longdouble")]
DTYPES = [*FLOATS, np.dtype(np.complex64), BFLOAT16]


def drawn(random: np.random.Generator, shape: Any, dtype: Any) -> Array:
    """Return numbers of many magnitudes."""
    return np.asarray(random.standard_normal(shape) * 10.0 ** random.integers(-3, 3, shape)).astype(dtype)


@pytest.fixture(scope="module")
def alone() -> ms.Strategy:
    return ms.OneDeviceStrategy("CPU:0")


@given(
    name=st.sampled_from(list(FORMULAS)),
    dtype=st.sampled_from(FLOATS),
    shape=st.one_of(st.just(()), st.tuples(st.integers(0, 300)), st.tuples(st.integers(1, 40), st.integers(0, 40))),
    chunk=st.sampled_from([16, 64, 1000, 2**18]),
    seed=st.integers(0, 10**6),
)
def test_the_bits_are_those_of_the_formula(
    alone: ms.Strategy, name: str, dtype: Any, shape: Any, chunk: int, seed: int
) -> None:
    make, formula = FORMULAS[name]
    random = np.random.default_rng(seed)
    start, gradients = drawn(random, shape, dtype), [drawn(random, shape, dtype) for _ in range(3)]
    with alone.scope():
        variable, optimizer = ms.Variable(start), make()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), np.errstate(all="ignore"):
        patch.setattr(kernels, "CHUNK_BYTES", chunk)
        for gradient, (right, slots) in zip(gradients, formula(start, gradients), strict=True):
            before = bits(gradient)
            alone.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, variable)]))
            assert bits(variable) == bits(right)
            assert {key: bits(slot) for key, slot in optimizer.slots_of(variable).items()} == {
                key: bits(slot) for key, slot in slots.items()
            }
            assert bits(gradient) == before


def overridden(optimizer: Optimizer, what: str) -> Optimizer:
    """Return the optimizer as one of a class that overrides `change` or `update`, to do the same."""
    kind: Any = type(optimizer)
    calls: list[Any] = []

    def change(self: Any, gradient: Any, slots: Any) -> Any:
        calls.append(gradient)
        return kind.change(self, gradient, slots)

    def update(self: Any, var: Any, gradient: Any, slots: Any, rows: Any) -> None:
        calls.append(gradient)
        kind.update(self, var, gradient, slots, rows)

    optimizer.__class__ = type(f"My{kind.__name__}", (kind,), {what: {"change": change, "update": update}[what]})
    optimizer.calls = calls  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ["change", "update"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_subclass_is_asked_and_the_bits_are_the_same(strategy: ms.Strategy, name: str, what: str, dtype: Any) -> None:
    random = np.random.default_rng(7)  # sums of eighths, which are exact in any order
    gradients = [(random.integers(-20, 20, (SIZE, 5, 7)) / 8).astype(dtype) for _ in range(3)]
    with strategy.scope():
        ours, theirs = (ms.Variable(np.linspace(-1, 1, 35).reshape(5, 7).astype(dtype)) for _ in range(2))
        one, two = FORMULAS[name][0](), overridden(FORMULAS[name][0](), what)
    for given_ in gradients:
        strategy.run(lambda g=given_[RANK]: one.apply_gradients([(g, ours)]))
        strategy.run(lambda g=given_[RANK]: two.apply_gradients([(g, theirs)]))
        assert bits(ours) == bits(theirs)
    assert len(two.calls) == 3  # type: ignore[attr-defined]
    for key, slot in one.slots_of(ours).items():
        assert bits(slot) == bits(two.slots_of(theirs)[key])


def test_a_function_put_onto_the_instance_is_asked(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable, optimizer = ms.Variable(np.zeros(2)), SGD(0.1)
    optimizer.change = lambda gradient, slots: np.ones(2)  # type: ignore[method-assign]
    strategy.run(lambda: optimizer.apply_gradients([(np.zeros(2), variable)]))
    np.testing.assert_array_equal(variable, [-1, -1])


@pytest.mark.parametrize("name", FORMULAS)
def test_a_step_takes_no_memory_of_the_variables_size(alone: ms.Strategy, name: str) -> None:
    size = 2**21
    with alone.scope():
        variable, optimizer = ms.Variable(np.zeros(size, np.float32)), FORMULAS[name][0]()
        optimizer.build([variable])
    gradient = np.ones(size, np.float32)

    def step() -> None:
        alone.run(lambda: optimizer.apply_gradients([(gradient, variable)]))

    step()
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.25 * gradient.nbytes  # the reduction's result; the update itself adds next to nothing


def test_a_gradient_that_is_the_variable_or_its_slot(alone: ms.Strategy) -> None:
    with alone.scope():
        variable, optimizer = ms.Variable(np.ones(3)), SGD(0.5, momentum=0.5)
        optimizer.build([variable])
    velocity = optimizer.slots_of(variable)["momentum"]
    alone.run(lambda: optimizer.apply_gradients([(variable.local_view, variable)]))
    np.testing.assert_array_equal(variable, [0.5] * 3)
    alone.run(lambda: optimizer.apply_gradients([(velocity.local_view, variable)]))
    np.testing.assert_array_equal(velocity, [0.0] * 3)  # 0.5 * -0.5 - 0.5 * -0.5
    np.testing.assert_array_equal(variable, [0.5] * 3)
