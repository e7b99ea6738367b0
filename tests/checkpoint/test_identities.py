"""A name stands for the same thing on all ranks, or nothing is saved or restored: names alone do not tell."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, outcomes, still_works

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi(min_size=2)

#: The rank that has two names the wrong way round.
OTHER = SIZE - 1


def checkpoint_of(strategy: ms.Strategy, objects: dict[str, Any]) -> ms.Checkpoint:
    with strategy.scope():
        return ms.Checkpoint(**objects)


def swapped(one: Any, two: Any) -> dict[str, Any]:
    """Return two things by name, in other places on one rank."""
    return {"one": one, "two": two} if RANK != OTHER else {"one": two, "two": one}


class Model:
    """An object that tells its own state."""

    def __init__(self, strategy: ms.Strategy) -> None:
        with strategy.scope():
            self.weights = ms.Variable(np.zeros(2))

    def state_dict(self) -> Any:
        return {"weights": self.weights}

    def load_state_dict(self, state: Any) -> None:
        self.weights = state["weights"]


def variables(strategy: ms.Strategy) -> tuple[Any, Any]:
    with strategy.scope():
        return ms.Variable(np.ones(2), name="w"), ms.Variable(np.zeros(2), name="v")


def variables_of_one_name(strategy: ms.Strategy) -> tuple[Any, Any]:
    with strategy.scope():
        return ms.Variable(np.ones(2), name="w"), ms.Variable(np.ones(2), name="w")


def optimizers_with_slots(strategy: ms.Strategy) -> tuple[Any, Any]:
    made = ms.optimizers.Adam(0.1), ms.optimizers.Adam(0.1)
    with strategy.scope():
        for optimizer, var in zip(made, variables(strategy), strict=True):
            optimizer.build([var])
    return made


def metrics(strategy: ms.Strategy) -> tuple[Any, Any]:
    with strategy.scope():
        return ms.metrics.Mean(), ms.metrics.Mean()


KINDS: dict[str, tuple[Callable[[ms.Strategy], tuple[Any, Any]], str]] = {
    "variables": (variables, r"w \(variable \d+\)"),
    "variables of one name": (variables_of_one_name, r"w \(variable \d+\)"),
    "optimizers with slots": (optimizers_with_slots, r"Adam/iterations \(variable \d+\)"),
    "metrics": (metrics, r"mean/total \(variable \d+\)"),
    "objects": (lambda strategy: (Model(strategy), Model(strategy)), r"Variable_\d+ \(variable \d+\)"),
    "in nests": (lambda s: ({"x": [v := variables(s)[0]]}, {"x": [(v, variables(s)[1])[1]]}), r"w \(variable \d+\)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_under_anothers_name_is_neither_saved_nor_restored(
    strategy: ms.MirroredStrategy, folder: Path, kind: str
) -> None:
    make, words = KINDS[kind]
    one, two = make(strategy)
    wrong = checkpoint_of(strategy, swapped(one, two))
    manager = ms.CheckpointManager(wrong, folder / "run")
    for save in (lambda: wrong.save(folder / "c"), lambda: manager.save(1)):
        for outcome in outcomes(save):
            assert outcome.error is errors.CollectiveMismatchError, outcome.text
            assert f"rank {OTHER}" in outcome.text
            assert "one is " in outcome.text or "'one'" in outcome.text or "one/" in outcome.text
            assert re.search(words, outcome.text), outcome.text
    strategy.barrier("looked")
    assert os.listdir(folder) == [] or RANK
    with ms.CheckpointManager(checkpoint_of(strategy, {"one": one, "two": two}), folder / "run") as right:
        right.save(1)
        assert right.restore() == 1
    for restore in (lambda: wrong.restore(right.path_of(1)), manager.restore):
        assert {outcome.error for outcome in outcomes(restore)} == {errors.CollectiveMismatchError}
    assert still_works(strategy)


def test_one_variable_under_two_names(strategy: ms.MirroredStrategy, folder: Path) -> None:
    w, v = variables(strategy)
    checkpoint = checkpoint_of(strategy, {"one": w, "two": w if RANK == OTHER else v})
    (first, *_) = outcomes(checkpoint.save, folder / "c")
    assert first.error is errors.CollectiveMismatchError
    rows = {line.strip().partition(":")[0]: line for line in first.text.splitlines()}
    assert f"two is {v._key}: variable" in rows["rank 0"]
    assert f"two is {w._key}: variable" in rows[f"rank {OTHER}"]


def test_values_of_a_ranks_own_may_be_anybodys(strategy: ms.MirroredStrategy, folder: Path) -> None:
    """Arrays that look swapped are what neighbours have sent each other; generators are drawn from at will."""
    here, there = np.full(2, RANK), np.full(2, RANK ^ 1)
    draws, other = np.random.default_rng(RANK), np.random.default_rng(100 + RANK)
    plain = {"first": bool(RANK), "second": not RANK}
    checkpoint = checkpoint_of(strategy, {"here": here, "there": there, "draws": draws, "other": other, "plain": plain})
    checkpoint.save(folder / "c")
    here[:], there[:] = -1, -1
    checkpoint.restore(folder / "c")
    assert (here.tolist(), there.tolist()) == ([RANK] * 2, [RANK ^ 1] * 2)
