"""The names of TensorFlow 1, copies of strategies, and what other libraries ask of a strategy."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, outcomes, still_works

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi


MAKERS: list[Callable[[], ms.Strategy]] = [ms.MirroredStrategy, lambda: ms.OneDeviceStrategy("CPU:0"), ms.get_strategy]


# ------------------------------------------------------------------------------------------- old names


class TestRun:
    def test_run_v2_is_run(self, strategy: ms.MirroredStrategy) -> None:
        def step(x: int, *, y: int) -> Any:
            return ms.get_replica_context().all_reduce("SUM", x + y)

        assert strategy.experimental_run_v2(step, args=(RANK,), kwargs={"y": 1}) == SIZE * (SIZE + 1) / 2
        assert strategy.experimental_run_v2(lambda: 3) == 3

    def test_run_takes_the_next_element(self, strategy: ms.MirroredStrategy) -> None:
        """The loop of TensorFlow 1's document."""
        iterator = strategy.make_dataset_iterator(ms.Dataset.from_arrays(np.arange(2.0 * SIZE), SIZE))
        assert strategy.experimental_initialize() == []
        iterator.initialize()

        def replica_fn(inputs: Any) -> Any:
            assert not ms.in_cross_replica_context()
            return ms.get_replica_context().all_reduce("SUM", inputs.sum())

        sums = [strategy.experimental_run(replica_fn, iterator) for _ in range(2)]
        assert sums == [sum(range(SIZE)), sum(range(SIZE, 2 * SIZE))]
        for outcome in outcomes(strategy.experimental_run, replica_fn, iterator):
            assert outcome.error is errors.OutOfRangeError, outcome.text
        assert strategy.experimental_finalize() == []

    def test_run_takes_tuples_as_one_argument(self, strategy: ms.MirroredStrategy) -> None:
        iterator = strategy.make_input_fn_iterator(lambda context: [(1, {"y": 2})])
        assert strategy.experimental_run(lambda inputs: inputs, iterator) == (1, {"y": 2})

    def test_run_without_an_iterator(self, strategy: ms.MirroredStrategy) -> None:
        assert strategy.experimental_run(lambda: ms.get_replica_context().replica_id_in_sync_group) == RANK

    @pytest.mark.parametrize("wrong", [3, "iterator", [1, 2], iter([1])], ids=lambda value: type(value).__name__)
    def test_what_is_no_iterator(self, strategy: ms.MirroredStrategy, wrong: Any) -> None:
        for outcome in outcomes(strategy.experimental_run, lambda x: x, wrong):
            assert outcome.error is errors.OptionTypeError, outcome.text
        assert still_works(strategy)

    def test_in_a_step_it_is_refused(self, strategy: ms.MirroredStrategy) -> None:
        for method in (strategy.experimental_run, strategy.experimental_run_v2):
            for outcome in outcomes(strategy.run, lambda method=method: method(lambda: 1)):
                assert outcome.error is errors.ContextError, outcome.text


@pytest.mark.parametrize("make", MAKERS)
def test_every_strategy_has_the_old_names(make: Callable[[], ms.Strategy]) -> None:
    strategy = make()
    assert strategy.experimental_initialize() == strategy.experimental_finalize() == []
    assert strategy.experimental_run_v2(lambda x: x + 1, (1,)) == 2
    assert strategy.experimental_run(lambda: 3) == 3
    # A dataset of the default strategy warns where this rank has peers.
    with pytest.warns(errors.OutsideStepWarning) if strategy._is_default and SIZE > 1 else nullcontext():
        iterator = strategy.make_dataset_iterator([np.arange(strategy.num_replicas_in_sync)])
    assert strategy.experimental_run(lambda x: len(x), iterator) == 1
    config = types.SimpleNamespace(threads=[3])
    updated = strategy.update_config_proto(config)
    assert updated == config
    assert updated is not config
    assert updated.threads is config.threads  # a shallow copy
    if not strategy._is_default:
        strategy.close()


# ------------------------------------------------------------------------------------------- copies


class TestCopies:
    def test_a_shallow_copy_is_refused(self, strategy: ms.MirroredStrategy) -> None:
        for one in (strategy, ms.OneDeviceStrategy("CPU:0"), ms.get_strategy()):
            with pytest.raises(RuntimeError, match=r"copy\.deepcopy"):
                copy.copy(one)

    def test_there_is_one_default_strategy(self) -> None:
        with pytest.raises(RuntimeError, match="the default strategy"):
            copy.deepcopy(ms.get_strategy())

    def test_a_deep_copy_is_another_strategy_on_the_same_ranks(self, strategy: ms.MirroredStrategy) -> None:
        copied = copy.deepcopy(strategy)
        assert type(copied) is ms.MirroredStrategy
        assert copied is not strategy
        assert copied.extended is not strategy.extended
        assert copied.extended.communicator is strategy.extended.communicator
        assert copied.num_replicas_in_sync == SIZE
        assert copied.devices_by_rank == strategy.devices_by_rank
        assert copied.run(lambda: ms.get_replica_context().strategy) is copied
        assert copied.run(lambda: ms.get_replica_context().all_reduce("SUM", 1)) == SIZE
        assert still_works(copied)

    def test_each_has_variables_of_its_own(self, strategy: ms.MirroredStrategy) -> None:
        with strategy.scope():
            of_original = ms.Variable(1.0)
        copied = copy.deepcopy(strategy)
        with copied.scope():
            of_copy = ms.Variable(2.0)
        assert strategy.extended.variable_created_in_scope(of_original)
        assert not copied.extended.variable_created_in_scope(of_original)
        assert copied.extended.variable_created_in_scope(of_copy)
        assert not strategy.extended.variable_created_in_scope(of_copy)
        assert of_copy.name != of_original.name

    def test_scopes_of_the_two_do_not_mix(self, strategy: ms.MirroredStrategy) -> None:
        copied = copy.deepcopy(strategy)
        with strategy.scope():
            for outcome in outcomes(copied.scope().__enter__):
                assert outcome.error is errors.ContextError, outcome.text

    def test_a_nest_keeps_its_structure(self, strategy: ms.MirroredStrategy) -> None:
        first, second = copy.deepcopy([strategy, strategy])
        assert first is second
        assert first is not strategy

    def test_on_one_device(self) -> None:
        copied = copy.deepcopy(ms.OneDeviceStrategy("CPU:0"))
        assert copied.run(lambda: ms.get_replica_context().all_reduce("SUM", 2)) == 2

    def test_closing_is_for_both(self) -> None:
        original = ms.MirroredStrategy()
        copied = copy.deepcopy(original)
        copied.close()
        for one in (original, copied):
            if SIZE > 1:
                with pytest.raises(errors.ContextError, match="close"):
                    one.reduce("SUM", 1.0)


# ------------------------------------------------------------------------------------------- questions


@pytest.mark.parametrize("make", MAKERS)
def test_what_other_libraries_ask(make: Callable[[], ms.Strategy]) -> None:
    strategy = make()
    extended = strategy.extended
    assert extended.experimental_require_static_shapes is False
    assert extended.experimental_should_init is True
    assert extended.experimental_between_graph is (strategy.num_replicas_in_sync > 1)
    first = extended.communicator.rank == 0
    assert extended.should_checkpoint is extended.should_save_summary is first
    if not strategy._is_default:
        strategy.close()


def test_read_var(strategy: ms.MirroredStrategy) -> None:
    with strategy.scope():
        mirrored = ms.Variable([1.0, 2.0])
        total = ms.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: total.assign(RANK + 1.0))
    assert strategy.extended.read_var(mirrored).tolist() == [1.0, 2.0]
    with strategy.scope():
        assert strategy.extended.read_var(total) == SIZE * (SIZE + 1) / 2
    assert strategy.run(lambda: strategy.extended.read_var(total)) == RANK + 1
    for wrong in (3.0, None, np.zeros(2)):
        for outcome in outcomes(strategy.extended.read_var, wrong):
            assert outcome.error is errors.OptionTypeError, outcome.text
