"""The contract between the ranks where it is easily broken: threads, user code, equal names, kept errors, ends."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy import errors

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size

pytestmark = pytest.mark.mpi
several = pytest.mark.mpi(min_size=2)


def reduced(strategy: ms.Strategy, op: str, value: Any, **options: Any) -> Any:
    return strategy.run(lambda: ms.get_replica_context().all_reduce(op, value, **options))


def still_works(strategy: ms.Strategy) -> bool:
    return bool(reduced(strategy, "SUM", 1.0) == SIZE)


def variable_of(strategy: ms.Strategy, value: Any, **policy: Any) -> ms.Variable:
    with strategy.scope():
        return ms.Variable(value, **policy)


def test_a_second_thread_is_refused_while_one_is_in_a_collective(strategy: ms.MirroredStrategy) -> None:
    refusals: list[BaseException] = []

    def other() -> None:
        try:
            strategy.reduce("SUM", 1.0)
        except errors.ContextError as error:
            refusals.append(error)

    def initial_value() -> float:  # called inside the collective call that creates a variable
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return 1.0

    variable_of(strategy, initial_value)
    assert "another thread" in str(refusals[0])
    assert still_works(strategy)


def test_threads_with_a_strategy_each_do_not_meet() -> None:
    made = [ms.MirroredStrategy() for _ in range(2)]
    totals: dict[int, list[float]] = {0: [], 1: []}

    def work(which: int) -> None:
        for _ in range(20):
            totals[which].append(float(made[which].reduce("SUM", 10.0**which)))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == {0: [SIZE] * 20, 1: [10.0 * SIZE] * 20}
    for strategy in made:
        strategy.close()


@several
def test_an_exception_of_users_code_after_the_agreement_comes_out_at_once() -> None:
    """The other ranks hear of it in their next call: their variables differ from this rank's."""
    strategy = ms.MirroredStrategy(on_error="raise")

    class Faulty(ms.optimizers.SGD):
        def change(self, gradient: Any, slots: Any) -> Any:
            if RANK == 0:
                raise KeyError("mine")
            return super().change(gradient, slots)

    with strategy.scope():
        weights, optimizer = ms.Variable(np.zeros(2)), Faulty(0.1)
        optimizer.build([weights])
    try:
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))
        failed = False
    except KeyError:
        failed = True
    assert failed == (RANK == 0)  # and no rank waits for another
    with pytest.raises(errors.ContextError if RANK == 0 else errors.RemoteError, match="rank 0 failed in "):
        strategy.reduce("SUM", 1.0)
    strategy.close()


@several
def test_reduce_along_an_axis_compares_the_operation(strategy: ms.MirroredStrategy) -> None:
    with pytest.raises(errors.CollectiveMismatchError, match="structure"):
        strategy.reduce("MEAN" if RANK == 0 else "SUM", np.ones(3), axis=0)
    assert still_works(strategy)


def test_an_on_read_variable_contributes_its_own_copy(strategy: ms.MirroredStrategy) -> None:
    variable = variable_of(strategy, np.zeros(1), synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: variable.assign([RANK + 1.0]))
    total = sum(range(1, SIZE + 1))
    assert float(variable[0]) == total
    assert strategy.reduce("SUM", variable)[0] == total
    assert strategy.reduce("MEAN", variable)[0] == total / SIZE
    assert strategy.reduce("SUM", variable, axis=0) == total
    assert np.array_equal(strategy.gather(variable, axis=0), np.arange(1.0, SIZE + 1))
    with strategy.scope():
        assert float(strategy.extended.reduce_to("SUM", variable, variable)[0]) == total


@several
@pytest.mark.parametrize("what", ["learning_rate", "global_clipnorm", "momentum"])
def test_optimizers_that_differ_between_ranks_are_refused(strategy: ms.MirroredStrategy, what: str) -> None:
    with strategy.scope():
        weights, optimizer = ms.Variable(np.zeros(2)), ms.optimizers.SGD(0.1)
        optimizer.build([weights])
    if RANK == 1:
        setattr(optimizer, what, 0.05)
    with pytest.raises(errors.CollectiveMismatchError, match="structure"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))
    assert not np.asarray(weights).any()


class Declares(ms.optimizers.SGD):
    """An optimizer with a setting of its own."""

    shrinking: float = 1.0


@several
def test_attributes_of_the_program_on_an_optimizer_are_not_compared(strategy: ms.MirroredStrategy) -> None:
    with strategy.scope():
        weights, optimizer = ms.Variable(np.zeros(2)), Declares(0.1)
    optimizer.last_loss = 0.5 + RANK  # type: ignore[attr-defined]
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))
    assert (weights.numpy() == -0.1 * SIZE).all()
    optimizer.shrinking = 1.0 + RANK
    with pytest.raises(errors.CollectiveMismatchError, match="shrinking"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))
    assert (weights.numpy() == -0.1 * SIZE).all()


@pytest.mark.parametrize("rate", [-5, 0, "x", None, float("nan")])
def test_a_learning_rate_set_later_is_checked_at_once(rate: Any) -> None:
    optimizer = ms.optimizers.Adam(0.1)
    with pytest.raises((ValueError, TypeError), match="learning_rate"):
        optimizer.learning_rate = rate
    assert optimizer.learning_rate == 0.1


@several
def test_variables_of_one_name_are_told_apart(strategy: ms.MirroredStrategy) -> None:
    first, second = (variable_of(strategy, 0.0, name="same", aggregation="SUM") for _ in range(2))
    mine = first if RANK == 0 else second
    with pytest.raises(errors.CollectiveMismatchError, match="name"):
        strategy.run(lambda: mine.assign(1.0))
    with strategy.scope():
        metrics = [ms.metrics.Mean(), ms.metrics.Mean()]
    with pytest.raises(errors.CollectiveMismatchError, match="name"):
        metrics[min(RANK, 1)].result()
    assert still_works(strategy)


def test_nothing_writes_through_a_view(strategy: ms.MirroredStrategy) -> None:
    variable = variable_of(strategy, np.zeros(3))
    with pytest.raises(errors.UnsupportedError, match="assign"):
        np.add.at(variable, [0], 1.0)
    assert not np.asarray(variable).any()


def test_numpy_gives_a_copy_that_keeps_its_value(strategy: ms.MirroredStrategy) -> None:
    variable = variable_of(strategy, np.zeros(3))
    best = variable.numpy()
    variable.assign(np.ones(3))
    assert not best.any()


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_variables_are_not_copied(strategy: ms.MirroredStrategy, copier: Callable[[Any], Any]) -> None:
    with pytest.raises(errors.CopyError, match="read_value"):
        copier(variable_of(strategy, 1.0))


@several
def test_strings_of_different_kinds_are_no_match(strategy: ms.MirroredStrategy) -> None:
    mine = np.array([b"abcdefgh"]) if RANK == 0 else np.array(["ab"])
    with pytest.raises(errors.CollectiveMismatchError, match="values"):
        strategy.gather(mine, axis=0)


@several
def test_a_close_that_not_all_make_is_no_hang() -> None:
    strategy = ms.MirroredStrategy()
    call = strategy.close if RANK == 0 else lambda: strategy.reduce("SUM", 1.0)
    with pytest.raises(errors.CollectiveMismatchError, match=r"Strategy\.close"):
        call()
    assert still_works(strategy)
    strategy.close()


@several
def test_an_error_object_raised_twice_is_told_twice(strategy: ms.MirroredStrategy) -> None:
    mine = ValueError("kept")

    def initial_value() -> float:
        if RANK == 0:
            raise mine
        return 1.0

    for _ in range(2):
        with pytest.raises(ValueError if RANK == 0 else errors.RemoteError, match="kept"):
            variable_of(strategy, initial_value)
    assert still_works(strategy)


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")
def test_the_default_strategy_stays_open() -> None:
    ms.get_strategy().close()
    assert ms.get_strategy().reduce("SUM", 1.0) == 1.0


@several
def test_update_takes_no_value_that_lives_elsewhere(strategy: ms.MirroredStrategy) -> None:
    variable = variable_of(strategy, 0.0)
    with strategy.scope():
        there = strategy.extended.reduce_to("SUM", np.float64(1), "task:0")
        with pytest.raises(errors.PlacementError, match="rank 0"):
            strategy.extended.update(variable, lambda var, x: var.assign(x), args=(there,))
    assert float(variable) == 0


@pytest.mark.parametrize("values", [(1.0, 2.0), np.arange(3), 5.0])
def test_a_container_takes_one_component(values: Any) -> None:
    with pytest.raises(errors.OptionTypeError, match="one"):
        ms.PerReplica(values)


def test_one_array_cannot_take_two_results(strategy: ms.MirroredStrategy) -> None:
    target = np.zeros(2)
    with pytest.raises(errors.StructureError, match="twice"):
        reduced(strategy, "SUM", [np.ones(2), np.ones(2)], out=[target, target])


@pytest.mark.parametrize("name", [["a"], 3])
def test_names_are_strings(strategy: ms.MirroredStrategy, name: Any) -> None:
    for call in (lambda: reduced(strategy, "SUM", 1.0, name=name), lambda: variable_of(strategy, 1.0, name=name)):
        with pytest.raises(errors.OptionTypeError, match="name"):
            call()
    assert still_works(strategy)
