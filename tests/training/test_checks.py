"""A step that an optimizer refuses raises on every rank and changes nothing on any."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from optimizing import OPTIMIZERS, apply, model, state
from replicas import RANK, SIZE, all_raise, in_scope, same_everywhere

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.optimizers import Optimizer

pytestmark = pytest.mark.mpi

FIRST, SECOND, SHAPES = np.full(3, RANK + 1.0), np.ones((4, 2)), [((3,), "float64"), ((4, 2), "float64")]


#: The variables that a step is about.
Variables = namedtuple("Variables", "first second twin integer foreign")


@pytest.fixture(scope="module")
def foreign() -> Iterator[ms.Variable]:
    """A variable of another strategy."""
    with closing(ms.MirroredStrategy()) as other:
        yield model(other, SHAPES)[0]


def sparse(values: Any, indices: Any) -> ms.IndexedSlices:
    return ms.IndexedSlices(values, indices, (4, 2))


#: What is wrong with the second of two pairs: the pair, given the variables; and what is raised.
BAD_PAIRS: dict[str, tuple[Any, type[Exception]]] = {
    "second shape": (lambda v: (np.ones((2, 4)), v.second), errors.ShapeError),
    "would broadcast": (lambda v: (np.ones((1, 2)), v.second), errors.ShapeError),
    "None for a variable": (lambda v: (np.ones(3), None), errors.OptionError),
    "a scalar": (lambda v: (1.0, v.second), errors.ShapeError),
    "complex": (lambda v: (np.ones((4, 2), complex), v.second), errors.DTypeError),
    "text": (lambda v: (np.full((4, 2), "x"), v.second), errors.DTypeError),
    "bool": (lambda v: (np.ones((4, 2), bool), v.second), errors.DTypeError),
    "a sum that may wrap": (lambda v: (np.ones((4, 2), np.int8), v.second), errors.DTypeError),
    "the wrong way round": (lambda v: (v.second, SECOND), errors.OptionError),
    "an integer variable": (lambda v: (np.ones(3), v.integer), errors.OptionError),
    "another strategy's": (lambda v: (np.ones(3), v.foreign), errors.OptionError),
    "no pair": (lambda v: v.second, errors.OptionTypeError),
    "three of them": (lambda v: (SECOND, v.second, 1), errors.OptionTypeError),
    "sparse: outside": (lambda v: (sparse(np.ones((1, 2)), [4]), v.second), errors.ShapeError),
    "sparse: negative": (lambda v: (sparse(np.ones((1, 2)), [-1]), v.second), errors.ShapeError),
    "sparse: rows": (lambda v: (sparse(np.ones((1, 3)), [0]), v.second), errors.ShapeError),
    "sparse: counts": (lambda v: (sparse(np.ones((1, 2)), [0, 1]), v.second), errors.ShapeError),
    "sparse: float": (lambda v: (sparse(np.ones((1, 2)), [0.5]), v.second), errors.DTypeError),
}
#: What is right, but not what the other ranks have.
OTHER_PAIRS: dict[str, Any] = {
    "None": lambda v: (None, v.second),
    "another gradient is sparse": lambda v: (sparse(np.ones((1, 2)), [0]), v.second),
    "another dtype": lambda v: (SECOND.astype(np.float32), v.second),
    "another variable of the same shape": lambda v: (SECOND, v.twin),
}
if SIZE > 1:
    BAD_PAIRS |= {what: (pair, errors.CollectiveMismatchError) for what, pair in OTHER_PAIRS.items()}
BAD_STEPS: dict[str, tuple[Any, type[Exception]]] = {
    "no pairs": (lambda v: [], errors.EmptyBatchError),
    "only None": (lambda v: [(None, v.first), (None, v.second)], errors.EmptyBatchError),
    "no iterable": (lambda v: 5, errors.OptionTypeError),
}


@pytest.mark.parametrize("what", [*BAD_PAIRS, *BAD_STEPS])
def test_a_step_refused_on_the_last_rank_changes_nothing(
    strategy: ms.Strategy, foreign: ms.Variable, what: str
) -> None:
    variables = Variables(*model(strategy, [*SHAPES, SHAPES[1], ((3,), "int64")]), foreign)
    optimizer, right = OPTIMIZERS["momentum"](0.1), [(FIRST, variables.first), (SECOND, variables.second)]
    apply(strategy, optimizer, [FIRST, SECOND], variables[:2])
    made, kind = BAD_PAIRS.get(what) or BAD_STEPS[what]
    pairs = [right[0], made(variables)] if what in BAD_PAIRS else made(variables)
    before = state(optimizer, variables)
    all_raise(kind, lambda: strategy.run(lambda: optimizer.apply_gradients(pairs if RANK == SIZE - 1 else right)))
    assert state(optimizer, variables) == before
    apply(strategy, optimizer, [FIRST, SECOND], variables[:2])
    assert same_everywhere([v.local_copy() for v in variables[:2]])
    assert optimizer.next_step() == 3


def test_a_step_outside_a_step_function_and_without_a_formula_is_refused(
    strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (variable,) = model(strategy, SHAPES[:1])
    with strategy.scope(), pytest.raises(errors.ContextError, match=r"strategy\.run"):
        OPTIMIZERS["SGD"]().apply_gradients([(FIRST, variable)])
    with pytest.raises(errors.UnsupportedError, match="change"):
        apply(strategy, Optimizer(0.1), [FIRST], [variable])
    with pytest.raises(errors.LeafError, match=r"Forgetful\.change"):
        apply(strategy, Forgetful(0.1), [FIRST], [variable])
    assert (FIRST == RANK + 1).all()
    if SIZE > 1:
        own = Forgetful(0.1)
        monkeypatch.setattr(Forgetful, "decay", np.float32(RANK))
        all_raise(errors.CollectiveMismatchError, apply, strategy, own, [FIRST], [variable], words=["decay"])
        all_raise(errors.OptionError, in_scope, strategy, lambda: own.build([variable, *[3] * (RANK == 0)]))


class Forgetful(Optimizer):
    decay: Any = 0.0

    def change(self, gradient: Any, slots: Any) -> Any:
        """Work in place, and return nothing."""
        gradient *= 2
