"""The names of TensorFlow 1, copies of strategies, and what other libraries ask of a strategy."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, all_raise, in_step, new_variable

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi
MAKERS: list[Callable[[], ms.Strategy]] = [ms.MirroredStrategy, lambda: ms.OneDeviceStrategy("CPU:0"), ms.get_strategy]


def test_run_takes_the_next_element(strategy: ms.MirroredStrategy) -> None:
    """The loop of TensorFlow 1's document; tuples are one argument."""
    iterator = strategy.make_dataset_iterator(ms.Dataset.from_arrays(np.arange(2.0 * SIZE), SIZE))
    assert strategy.experimental_initialize() == []
    iterator.initialize()

    def replica_fn(inputs: Any) -> Any:
        assert not ms.in_cross_replica_context()
        return ms.get_replica_context().all_reduce("SUM", inputs.sum())

    sums = [strategy.experimental_run(replica_fn, iterator) for _ in range(2)]
    assert sums == [sum(range(SIZE)), sum(range(SIZE, 2 * SIZE))]
    all_raise(errors.OutOfRangeError, strategy.experimental_run, replica_fn, iterator)
    assert strategy.experimental_finalize() == []
    pairs = strategy.make_input_fn_iterator(lambda context: [(1, {"y": 2})])
    assert strategy.experimental_run(lambda inputs: inputs, pairs) == (1, {"y": 2})
    assert strategy.experimental_run(lambda: ms.get_replica_context().replica_id_in_sync_group) == RANK


@pytest.mark.parametrize("make", MAKERS)
def test_every_strategy_has_the_old_names(make: Callable[[], ms.Strategy]) -> None:
    strategy = make()
    assert strategy.experimental_initialize() == strategy.experimental_finalize() == []
    assert strategy.experimental_run_v2(lambda x, *, y: x + y, (1,), {"y": 1}) == 2
    # A dataset of the default strategy warns where this rank has peers.
    with pytest.warns(errors.OutsideStepWarning) if strategy._is_default and SIZE > 1 else nullcontext():
        iterator = strategy.make_dataset_iterator([np.arange(strategy.num_replicas_in_sync)])
    assert strategy.experimental_run(lambda x: len(x), iterator) == 1
    config = types.SimpleNamespace(threads=[3])
    updated = strategy.update_config_proto(config)
    assert updated == config
    assert updated is not config
    assert updated.threads is config.threads  # a shallow copy
    extended = strategy.extended
    assert extended.experimental_require_static_shapes is False
    assert extended.experimental_should_init is True
    assert extended.experimental_between_graph is (strategy.num_replicas_in_sync > 1)
    assert extended.should_checkpoint is extended.should_save_summary is (extended.communicator.rank == 0)
    if not strategy._is_default:
        strategy.close()
    else:
        with pytest.raises(RuntimeError, match="the default strategy"):
            copy.deepcopy(strategy)


def test_a_deep_copy_is_another_strategy_on_the_same_ranks() -> None:
    strategy = ms.MirroredStrategy()
    made = [new_variable(strategy, 1.0)]
    copied, same = copy.deepcopy([strategy, strategy])
    assert type(copied) is ms.MirroredStrategy
    assert copied is same is not strategy
    assert in_step(copied, lambda ctx: ctx.strategy is copied and ctx.all_reduce("SUM", 1)) == SIZE
    with copied.scope():
        made.append(ms.Variable(2.0))
    for one, mine in ((strategy, [True, False]), (copied, [False, True])):
        assert [one.extended.variable_created_in_scope(each) for each in made] == mine
    copied.close()  # closes both
    with pytest.raises(errors.ContextError, match="close"):
        strategy.reduce("SUM", 1.0)


def test_read_var(strategy: ms.MirroredStrategy) -> None:
    mirrored = new_variable(strategy, [1.0, 2.0])
    total = new_variable(strategy, 0.0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: total.assign(RANK + 1.0))
    assert strategy.extended.read_var(mirrored).tolist() == [1.0, 2.0]
    with strategy.scope():
        assert strategy.extended.read_var(total) == SIZE * (SIZE + 1) / 2
    assert strategy.run(lambda: strategy.extended.read_var(total)) == RANK + 1
