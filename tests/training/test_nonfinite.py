"""Gradients that are not finite: all ranks do the same about them, whichever rank brought them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from optimizing import OPTIMIZERS, model
from replicas import (
    BFLOAT16,
    RANK,
    RANKS,
    SIZE,
    all_raise,
    bits,
    gather_texts,
    new_variable,
    outcomes,
    same_everywhere,
    several,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.objects.shown import ranks_in_words
from mpistrategy.optimizers import SGD

pytestmark = pytest.mark.mpi

SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((4, 5), "float32"),
    ((), "float64"),
    ((70,), "float64"),
    ((0, 2), "float32"),
]


class Training:
    """A model, an optimizer and a way to bring gradients; one of them can be spoilt."""

    def __init__(self, place: tuple[ms.Strategy, str], name: str = "Adam", **options: Any) -> None:
        self.strategy, path = place
        self.variables, self.optimizer = model(self.strategy, SHAPES), OPTIMIZERS[name](0.1, **options)
        with self.strategy.scope():
            self.optimizer.build(self.variables)
        self.buckets = None if path == "plain" else self.optimizer.gradient_buckets(self.variables)

    def step(self, rank: int = -1, value: float = np.nan, which: int = 0, place: int = 0) -> None:
        gradients = [np.full(v.shape, RANK + 1.0, v.dtype) for v in self.variables]
        if rank == RANK:
            gradients[which].reshape(-1)[place] = value
        pairs: Any = self.buckets or zip(gradients, self.variables, strict=True)
        for target, gradient in zip(self.buckets.values if self.buckets else gradients, gradients, strict=True):
            target[...] = gradient
        self.strategy.run(lambda: self.optimizer.apply_gradients(pairs))

    def state(self) -> list[bytes]:
        return [bits(v.local_copy()) for v in (*self.variables, *self.optimizer.variables)]


@pytest.fixture(params=["plain", "buckets", "buckets of two nodes"])
def place(request: pytest.FixtureRequest, strategy: ms.Strategy, two_nodes: ms.Strategy) -> tuple[ms.Strategy, str]:
    kind: str = request.param
    return (two_nodes if "nodes" in kind else strategy), kind.partition(" ")[0]


@pytest.mark.parametrize("clipnorm", [None, 1.0])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_raise_changes_nothing_and_names_the_variable(
    place: tuple[ms.Strategy, str], name: str, clipnorm: float | None
) -> None:
    training = Training(place, name, nonfinite="raise", global_clipnorm=clipnorm)
    training.step()
    before = training.state()
    for rank, (which, at), value in ((0, (0, 7), np.nan), (SIZE - 1, (1, 0), np.inf), (SIZE // 2, (2, 69), -np.inf)):
        ended = outcomes(lambda rank=rank, value=value, w=which, p=at: training.step(rank, value, w, p))  # type: ignore[misc]
        assert {one.error for one in ended} == {errors.NonFiniteError}, ended
        assert len({one.text for one in ended}) == 1
        assert f"a reduced gradient of {training.variables[which]._key} that is not finite" in ended[0].text
        early = place[1] == "buckets" and SIZE > 1 and max(place[0].extended.communicator.node_of) > 0
        brought = f"(of rank {rank})"
        assert (brought in ended[0].text) is not early, "what the buckets summed in place is gone"
        assert training.state() == before
    training.step()
    assert training.state() != before
    assert same_everywhere([v.local_copy() for v in training.variables])
    assert training.optimizer.skipped_steps == 0


def test_skip_is_as_if_the_step_had_not_been(place: tuple[ms.Strategy, str]) -> None:
    one, two = Training(place, nonfinite="skip"), Training(place)
    for number, value in enumerate([None, np.nan, None, -np.inf, np.inf, None]):
        if value is None:
            one.step()
            two.step()
            assert one.optimizer.latest_path in ("plain", "buckets")
        else:
            before = one.state()
            one.step(number % SIZE, value, number % 3)
            assert one.state() == before
            assert one.optimizer.latest_path == "skipped"
        assert one.state() == two.state()
    assert (one.optimizer.skipped_steps, one.optimizer.next_step(), two.optimizer.skipped_steps) == (3, 4, 0)


def test_warn_makes_the_step_and_says_so_once_on_rank_0(place: tuple[ms.Strategy, str]) -> None:
    one, two = Training(place, nonfinite="warn"), Training(place)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            rank = number % SIZE if number in (1, 3) else -1
            one.step(rank, np.nan, 2, 3)
            two.step(rank, np.nan, 2, 3)
    assert one.state() == two.state()
    mine = [warning for warning in caught if issubclass(warning.category, errors.NonFiniteWarning)]
    assert len(mine) == (2 if RANK == 0 else 0)
    for warning, number in zip(mine, (2, 4), strict=False):
        assert one.variables[2]._key in str(warning.message)
        assert f"(step {number})" in str(warning.message)
        assert warning.filename == __file__
    assert issubclass(errors.NonFiniteWarning, RuntimeWarning)


@several
def test_a_warning_that_is_made_an_error_leaves_the_replicas_equal(strategy: ms.Strategy) -> None:
    training = Training((strategy, "plain"), nonfinite="warn", mirrored_check_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.NonFiniteWarning)
        ended = outcomes(lambda: training.step(SIZE - 1))
    assert [one.error is None for one in ended] == [False] + [True] * (SIZE - 1)
    strategy.assert_mirrored([*training.variables, training.optimizer])


most: Any = np.finfo(np.float32).max


SPARSE = ms.IndexedSlices(np.array([np.nan if RANK == SIZE - 1 else 1.0]), np.array([1]), (3,))


@pytest.mark.parametrize(
    ("gradient", "options", "told"),
    [
        pytest.param(np.full(3, most), {}, "no rank had such numbers", marks=several),  # the sum overflows
        (np.full(3, np.inf if RANK % 2 else -np.inf), {}, f"(of {ranks_in_words(RANKS)})"),  # not a fine number
        (np.full(3, 1e200), {"global_clipnorm": 1.0}, "global norm"),
        (SPARSE, {}, f"(of rank {SIZE - 1})"),
    ],
)
def test_what_is_not_finite_for_all_together_is_found(
    strategy: ms.Strategy, gradient: Any, options: Any, told: str
) -> None:
    var = new_variable(strategy, np.zeros(3, np.float32 if told.startswith("no rank") else np.float64))
    optimizer = SGD(0.1, nonfinite="raise", **options)
    with np.errstate(over="ignore", invalid="ignore"):
        text = all_raise(errors.NonFiniteError, strategy.run, lambda: optimizer.apply_gradients([(gradient, var)]))
    assert told in text
    assert var.numpy().tolist() == [0, 0, 0]


def test_large_finite_gradients_pass(strategy: ms.Strategy) -> None:
    """Their sum over the elements overflows: that is nobody's business."""
    var, optimizer = new_variable(strategy, np.zeros(1000, np.float32)), SGD(0.1, nonfinite="raise")
    strategy.run(lambda: optimizer.apply_gradients([(np.full(1000, most / (2 * SIZE)), var)]))
    assert optimizer.latest_path == "plain"


@several
def test_mirrored_gradients_that_are_not_what_they_say(strategy: ms.Strategy) -> None:
    """Nothing is sent of them, so that ranks see different ones; they decide alike nevertheless."""
    var = new_variable(strategy, np.zeros(3))
    optimizer = SGD(0.1, aggregation="MEAN", nonfinite="skip", mirrored_check_steps=1)
    for bad in RANKS:
        gradient = ms.Mirrored((np.full(3, np.nan if bad == RANK else 1.0),))
        strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, var)]))  # type: ignore[misc]
    assert gather_texts(str(optimizer.skipped_steps)) == [str(SIZE)] * SIZE
    assert var.numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32", "float64", "longdouble", "complex64", "complex128"])
def test_every_dtype(strategy: ms.Strategy, dtype: Any) -> None:
    var, optimizer = new_variable(strategy, np.zeros((3, 40), dtype)), SGD(0.1, nonfinite="skip")
    good = np.full((3, 40), 100.0, dtype)
    bad = good.copy()
    bad[2, 17] = np.nan
    for gradient in (good, bad, np.asfortranarray(good), np.asfortranarray(bad)):
        brought = gradient if RANK == SIZE - 1 else good
        strategy.run(lambda brought=brought: optimizer.apply_gradients([(brought, var)]))  # type: ignore[misc]
    assert optimizer.skipped_steps == 2
    assert optimizer.next_step() == 3
