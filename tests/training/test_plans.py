"""A step is prepared once: whatever it depends on may change between two steps, and the next one does as it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, bits, outcomes, same_everywhere

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array
from mpistrategy.optimizers import SGD, Adam, Optimizer

pytestmark = pytest.mark.mpi

SHAPES = ((3, 5), (70, 31), (1,))


@pytest.fixture
def fresh() -> Iterator[ms.MirroredStrategy]:
    with closing(ms.MirroredStrategy()) as made:
        yield made


class Asked(SGD):
    """SGD whose `change` is called: no step of it is prepared."""

    def change(self, gradient: Array, slots: Any) -> Array:
        return super().change(gradient, slots)


class Summing(ms.MpiAllReduce):
    """A program's own algorithm."""

    asked = 0

    def batch_reduce_implementation(self, *args: Any) -> list[Any]:
        Summing.asked += 1
        return super().batch_reduce_implementation(*args)


def model(strategy: ms.Strategy) -> list[ms.Variable]:
    with strategy.scope():
        return [ms.Variable(np.linspace(-1, 1, int(np.prod(s)), dtype=np.float32).reshape(s)) for s in SHAPES]


def step(strategy: ms.Strategy, optimizer: Optimizer, variables: Sequence[ms.Variable], number: int) -> None:
    random = np.random.default_rng([number, RANK])
    apply(strategy, optimizer, [random.standard_normal(v.shape).astype(v.dtype) for v in variables], variables)


def apply(strategy: ms.Strategy, optimizer: Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))


def attribute(name: str, value: Any) -> Callable[[ms.Strategy, Optimizer], None]:
    return lambda strategy, optimizer: setattr(optimizer, name, value)


def of_strategy(name: str, value: Any) -> Callable[[ms.Strategy, Optimizer], None]:
    return lambda strategy, optimizer: setattr(strategy.extended, name, value)


CHANGES: dict[str, Callable[[ms.Strategy, Optimizer], None]] = {
    "learning rate": attribute("learning_rate", 0.5),
    "momentum": attribute("momentum", 0.25),
    "nesterov": attribute("nesterov", True),
    "aggregation": attribute("aggregation", ms.ReduceOp.MEAN),
    "norm": attribute("global_clipnorm", 0.01),
    "nonfinite": attribute("nonfinite", "skip"),
    "algorithm": of_strategy("cross_device_ops", ms.ReductionToOneDevice()),
    "options": of_strategy("options", ms.CommunicationOptions(bytes_per_pack=64)),
    "arena": lambda strategy, optimizer: None if type(optimizer) is Asked else made_later(optimizer),
}


def made_later(optimizer: Optimizer) -> None:
    optimizer.gradient_arena([var for var, _ in optimizer._slots.by_id.values()])


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_counts(fresh: ms.Strategy, change: str) -> None:
    ours, theirs = model(fresh), model(fresh)
    one, two = SGD(0.1, momentum=0.9), Asked(0.1, momentum=0.9)
    for number in range(6):
        if number == 3:
            before = [bits(v.local_copy()) for v in ours]
            CHANGES[change](fresh, one)
            CHANGES[change](fresh, two)
        step(fresh, one, ours, number)
        step(fresh, two, theirs, number)
        assert [bits(v.local_copy()) for v in ours] == [bits(v.local_copy()) for v in theirs]
    assert [bits(v.local_copy()) for v in ours] != before
    assert same_everywhere([v.local_copy() for v in ours])
    assert int(one.iterations or 0) == 6


def test_an_algorithm_that_is_set_later_is_called(fresh: ms.Strategy) -> None:
    variables, optimizer = model(fresh), Adam(0.1)
    for number in range(2):
        step(fresh, optimizer, variables, number)
    Summing.asked = 0
    fresh.extended.cross_device_ops = Summing()
    for number in range(2):
        step(fresh, optimizer, variables, number)
        assert (optimizer.latest_path, Summing.asked) == ("plain", number + 1)
    fresh.extended.cross_device_ops = ms.MpiAllReduce()
    step(fresh, optimizer, variables, 2)
    assert Summing.asked == 2
    assert optimizer.latest_path == ("sliced" if SIZE > 1 else "plain")


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_method_that_is_overridden_later_is_called(fresh: ms.Strategy, where: str) -> None:
    class Own(SGD):
        pass

    variables, optimizer, seen = model(fresh), Own(0.1), []

    def change(gradient: Array, slots: Any) -> Array:
        seen.append(gradient.shape)
        return np.zeros_like(gradient)

    step(fresh, optimizer, variables, 0)
    before = [bits(v.local_copy()) for v in variables]
    if where == "class":
        Own.change = lambda self, gradient, slots: change(gradient, slots)  # type: ignore[method-assign]
    else:
        optimizer.change = change  # type: ignore[method-assign]
    step(fresh, optimizer, variables, 1)
    assert seen == list(SHAPES)
    assert [bits(v.local_copy()) for v in variables] == before


def test_a_counter_of_the_programs_own_counts_on(fresh: ms.Strategy) -> None:
    variables, optimizer = model(fresh), Adam(0.1)
    with fresh.scope():
        mine, other = ms.Variable(np.int64(10), trainable=False), ms.Variable(np.float32(0), trainable=False)
    optimizer.iterations = mine
    for number in range(2):
        step(fresh, optimizer, variables, number)
    optimizer.iterations = other
    step(fresh, optimizer, variables, 2)
    assert (int(mine), float(other), optimizer.next_step()) == (12, 1.0, 2)


@pytest.mark.mpi(min_size=2)
def test_other_variables_in_every_step_take_no_more_memory(fresh: ms.Strategy) -> None:
    """As where a part of the model is left out by chance: shared memory for gradients is made twice, and no more."""
    ours, theirs = [model(fresh)[0] for _ in range(5)], [model(fresh)[0] for _ in range(5)]
    one, two, paths = SGD(0.1), Asked(0.1), []
    for first in (0, 1, 2, 3, 0):
        for optimizer, variables in ((one, ours), (two, theirs)):
            step(fresh, optimizer, variables[first : first + 2], first)
        paths.append(one.latest_path)
        assert [bits(v.local_copy()) for v in ours] == [bits(v.local_copy()) for v in theirs]
    assert paths in (["sliced", "sliced", "plain", "plain", "sliced"], ["plain"] * 5)  # on several nodes


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("kind", "dtype", "path"), [(SGD, "f8", "sliced"), (SGD, "f2", "plain"), (Asked, "f8", "plain")]
)
def test_a_rank_that_is_a_step_ahead_is_found(fresh: ms.Strategy, kind: type[SGD], dtype: str, path: str) -> None:
    optimizer = kind(0.1)
    with fresh.scope():
        variables = [ms.Variable(np.ones(shape, dtype)) for shape in SHAPES]
    for number in range(2):
        step(fresh, optimizer, variables, number)
    assert optimizer.latest_path in (path, "plain")  # on several nodes
    assert optimizer.iterations is not None
    with fresh.scope():
        optimizer.iterations.assign(np.int64(2 + RANK))  # each rank writes its own copy
    before = [bits(v.local_copy()) for v in variables]
    for end in outcomes(step, fresh, optimizer, variables, 2):
        assert end.error is errors.CollectiveMismatchError
        assert "they differ in: step" in end.text
    assert [bits(v.local_copy()) for v in variables] == before


def test_gradients_of_other_kinds_in_between(fresh: ms.Strategy) -> None:
    """Prepared or not, the step is the same: one rank may bring ordinary arrays, and another its own containers."""
    ours, theirs = model(fresh), model(fresh)
    one, two = SGD(0.1, global_clipnorm=1.0), Asked(0.1, global_clipnorm=1.0)
    for number in range(4):
        random = np.random.default_rng([number, RANK])
        gradients: list[Any] = [random.standard_normal(v.shape).astype(v.dtype) for v in ours]
        mixed = list(gradients)
        if number == 1:
            mixed[0] = ms.PerReplica((gradients[0],))
        if number == 2 and RANK == 0:
            mixed[1] = ms.PerReplica((np.asfortranarray(gradients[1]),))
        apply(fresh, one, mixed, ours)
        apply(fresh, two, gradients, theirs)
        assert [bits(v.local_copy()) for v in ours] == [bits(v.local_copy()) for v in theirs]
