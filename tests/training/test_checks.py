"""A step that an optimizer refuses raises on every rank and changes nothing on any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, outcomes, same_everywhere

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.optimizers import SGD, Adam, Optimizer

pytestmark = pytest.mark.mpi


@dataclass
class Training:
    """Two variables and an optimizer that has made a step."""

    strategy: ms.Strategy
    first: ms.Variable
    second: ms.Variable
    integer: ms.Variable
    foreign: ms.Variable
    optimizer: Optimizer

    @property
    def steps(self) -> int:
        return int(self.counter.local_copy())

    @property
    def counter(self) -> ms.Variable:
        assert self.optimizer.iterations is not None
        return self.optimizer.iterations

    def state(self) -> list[Any]:
        variables = [self.first, self.second, self.integer, self.foreign, self.counter]
        slots = [slot for v in variables[:2] for slot in self.optimizer.slots_of(v).values()]
        return [v.local_copy() for v in (*variables, *slots)]

    def step(self, pairs: Any) -> None:
        self.strategy.run(lambda: self.optimizer.apply_gradients(pairs))

    def right(self) -> list[Any]:
        return [(np.full(3, RANK + 1.0), self.first), (np.ones((4, 2)), self.second)]


@pytest.fixture(scope="module")
def strategies() -> Iterator[tuple[ms.Strategy, ms.Strategy]]:
    with closing(ms.MirroredStrategy()) as strategy, closing(ms.MirroredStrategy()) as other:
        yield strategy, other


@pytest.fixture(params=["momentum", "Adam"])
def training(strategies: tuple[ms.Strategy, ms.Strategy], request: pytest.FixtureRequest) -> Training:
    strategy, other = strategies
    with other.scope():
        foreign = ms.Variable(np.ones(3))
    with strategy.scope():
        first, second = ms.Variable(np.zeros(3)), ms.Variable(np.zeros((4, 2)))
        integer = ms.Variable(np.zeros(3, np.int64))
        optimizer = {"momentum": SGD(0.1, momentum=0.9), "Adam": Adam(0.1)}[request.param]
    made = Training(strategy, first, second, integer, foreign, optimizer)
    made.step(made.right())
    return made


def sparse(values: Any, indices: Any) -> ms.IndexedSlices:
    return ms.IndexedSlices(values, indices, (4, 2))


#: What is wrong: the pairs, given the training; and what is raised where they are given.
BAD: dict[str, tuple[Any, type[Exception]]] = {
    "second shape": (lambda t: [t.right()[0], (np.ones((2, 4)), t.second)], errors.ShapeError),
    "would broadcast": (lambda t: [t.right()[0], (np.ones((1, 2)), t.second)], errors.ShapeError),
    "None for a variable": (lambda t: [t.right()[0], (np.ones(3), None)], errors.OptionError),
    "a scalar": (lambda t: [t.right()[0], (1.0, t.second)], errors.ShapeError),
    "complex": (lambda t: [t.right()[0], (np.ones((4, 2), complex), t.second)], errors.DTypeError),
    "text": (lambda t: [t.right()[0], (np.full((4, 2), "x"), t.second)], errors.DTypeError),
    "bool": (lambda t: [t.right()[0], (np.ones((4, 2), bool), t.second)], errors.DTypeError),
    "not a variable": (lambda t: [t.right()[0], (np.ones(3), np.ones(3))], errors.OptionError),
    "the wrong way round": (lambda t: [t.right()[0], (t.first, np.ones(3))], errors.OptionError),
    "an integer variable": (lambda t: [t.right()[0], (np.ones(3), t.integer)], errors.OptionError),
    "another strategy's": (lambda t: [t.right()[0], (np.ones(3), t.foreign)], errors.OptionError),
    "no pairs": (lambda t: [], errors.EmptyBatchError),
    "only None": (lambda t: [(None, t.first), (None, t.second)], errors.EmptyBatchError),
    "no pair": (lambda t: [t.right()[0], t.second], errors.OptionTypeError),
    "three of them": (lambda t: [(*t.right()[0], 1)], errors.OptionTypeError),
    "no iterable": (lambda t: 5, errors.OptionTypeError),
    "sparse: outside": (lambda t: [t.right()[0], (sparse(np.ones((1, 2)), [4]), t.second)], errors.ShapeError),
    "sparse: negative": (lambda t: [t.right()[0], (sparse(np.ones((1, 2)), [-1]), t.second)], errors.ShapeError),
    "sparse: rows": (lambda t: [t.right()[0], (sparse(np.ones((1, 3)), [0]), t.second)], errors.ShapeError),
    "sparse: counts": (lambda t: [t.right()[0], (sparse(np.ones((1, 2)), [0, 1]), t.second)], errors.ShapeError),
    "sparse: float": (lambda t: [t.right()[0], (sparse(np.ones((1, 2)), [0.5]), t.second)], errors.ShapeError),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("where", ["everywhere", "on the last rank"])
def test_a_refused_step_changes_nothing_anywhere(training: Training, what: str, where: str) -> None:
    pairs, kind = BAD[what]
    before = training.state()
    mine = pairs(training) if where == "everywhere" or RANK == SIZE - 1 else training.right()
    ended = outcomes(training.step, mine)
    assert ended[SIZE - 1].error is kind, ended
    assert all(one.error is kind for one in ended), ended
    for old, new in zip(before, training.state(), strict=True):
        np.testing.assert_array_equal(old, new)
    training.step(training.right())
    assert same_everywhere(training.state())
    assert training.steps == 2


def test_ranks_with_other_gradients_do_not_meet(training: Training) -> None:
    if SIZE == 1:
        pytest.skip("needs two ranks")
    same_shape = [(np.ones(3), training.first), (None, training.second)]
    with training.strategy.scope():
        twin = ms.Variable(np.zeros(3), name="twin")
        training.optimizer.build([twin])
    before = training.state()
    for other in (
        [(None, training.first), (np.ones((4, 2)), training.second)],
        [(np.ones(3), twin)],  # of one shape and dtype: only the name tells them apart
        [(np.ones(3), training.first), (sparse(np.ones((1, 2)), [0]), training.second)],
        [(np.ones(3, np.float32), training.first)],
    ):
        ended = outcomes(training.step, other if RANK else same_shape)
        assert {one.error for one in ended} == {errors.CollectiveMismatchError}
    for old, new in zip(before, training.state(), strict=True):
        np.testing.assert_array_equal(old, new)
    training.step(training.right())


def test_a_variable_without_a_gradient_is_left_alone(training: Training) -> None:
    before = [v.local_copy() for v in (training.second, *training.optimizer.slots_of(training.second).values())]
    training.step([(np.ones(3), training.first), (None, training.second)])
    after = [v.local_copy() for v in (training.second, *training.optimizer.slots_of(training.second).values())]
    np.testing.assert_array_equal(before, after)
    assert training.steps == 2


def test_one_optimizer_serves_steps_of_one_strategy_and_says_what_changes(training: Training) -> None:
    other = ms.MirroredStrategy()
    with other.scope():
        v = ms.Variable(np.ones(3))
    ended = outcomes(lambda: other.run(lambda: training.optimizer.apply_gradients([(np.ones(3), v)])))
    assert {one.error for one in ended} == {errors.OptionError}
    np.testing.assert_array_equal(v, np.ones(3))
    other.close()
    with training.strategy.scope(), pytest.raises(errors.ContextError, match=r"strategy\.run"):
        training.optimizer.apply_gradients(training.right())
    with pytest.raises(errors.UnsupportedError, match="change"):
        training.strategy.run(lambda: Optimizer(0.1).apply_gradients(training.right()))
