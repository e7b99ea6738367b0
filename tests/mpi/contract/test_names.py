"""`name=` of every collective: it is compared instead of the call site, and messages show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace as World
from typing import Any

import declared
import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, OnNodes, context, several, still_works

import mpistrategy as ms
from mpistrategy.errors import CollectiveMismatchError

pytestmark = pytest.mark.mpi

ONES, ROWS = np.ones(2), ms.IndexedSlices(np.ones((1, 2)), np.array([0]), (2, 2))
BATCHES = [np.arange(4.0), np.arange(4.0)]

#: A call is made with a strategy in its scope, some variables of it and a folder that all ranks share; and its name.
Call = Callable[[World, Any], Any]


@pytest.fixture
def world(strategy: ms.Strategy, folder: Path) -> Iterator[World]:
    with strategy.scope():
        found = World(
            strategy=strategy,
            extended=strategy.extended,
            ops=ms.MpiAllReduce(),
            summed=ms.Variable(ONES, aggregation="SUM"),
            first=ms.Variable(np.ones((2, 2)), aggregation="ONLY_FIRST_REPLICA"),
            on_read=ms.Variable(ONES, aggregation="MEAN", synchronization="ON_READ"),
            first_on_read=ms.Variable(ONES, aggregation="ONLY_FIRST_REPLICA", synchronization="ON_READ"),
            optimizer=ms.optimizers.SGD(0.1, momentum=0.9),
            sum=ms.metrics.Sum(),
            mean=ms.metrics.Mean(),
            folder=folder,
        )
        found.checkpoint = ms.Checkpoint(summed=found.summed)
        found.manager = ms.CheckpointManager(found.checkpoint, found.folder / "run")
        yield found
        found.manager.close()


def pairs(w: World) -> Any:
    return [(ONES, w.summed)]


def first_of(dataset: Any) -> Any:
    return next(iter(dataset))


def saved(w: World, name: Any) -> None:
    w.checkpoint.save(w.folder / "saved", overwrite=True, name=name)


def preempted(w: World, name: Any) -> None:
    handler = ms.PreemptionCheckpointHandler(w.manager, name=name)
    try:
        handler.run(lambda: None)  # which compares, since the step does not
    finally:
        handler.close()


def asked_for_preemption(w: World, name: Any) -> None:
    w.handler.save_checkpoint_if_preempted(name=name)


def mirrored(w: World, name: Any) -> None:
    ms.MirroredStrategy(name=name).close()


def before(name: str, w: World) -> None:
    """Prepare a call of the table, equally on all ranks."""
    if name == "Checkpoint.restore":
        saved(w, None)
    elif name in ("Checkpoint.wait", "Saving.wait", "CheckpointManager.wait", "CheckpointManager.close"):
        w.saving = w.manager.save(1, wait=False)
    elif "save_checkpoint_if_preempted" in name:
        told = ms.TerminationConfig(lambda: True, exit_fn=lambda: None) if "told" in name else None
        w.handler = ms.PreemptionCheckpointHandler(w.manager, termination_config=told)


def after(w: World) -> None:
    """End what `before` began."""
    w.manager.wait()
    if hasattr(w, "handler"):
        w.handler.close()


def declared_call(method: str, world: World, name: Any) -> Any:
    return declared.called(method, name=name)


#: The collectives of step functions.
IN_STEPS: dict[str, Call] = {
    **{call.name: partial(declared_call, method) for method, call in declared.IN_STEPS.items()},
    "Variable.assign": lambda w, name: w.summed.assign(ONES, name=name),
    "Variable.assign_add": lambda w, name: w.summed.assign_add(ONES, name=name),
    "Variable.assign_sub": lambda w, name: w.summed.assign_sub(ONES, name=name),
    "Variable.scatter_add": lambda w, name: w.first.scatter_add(ROWS, name=name),
    "Variable.scatter_sub": lambda w, name: w.first.scatter_sub(ROWS, name=name),
    "Variable.scatter_update": lambda w, name: w.first.scatter_update(ROWS, name=name),
    "Variable.scatter_max": lambda w, name: w.first.scatter_max(ROWS, name=name),
    "Optimizer.apply_gradients": lambda w, name: w.optimizer.apply_gradients(pairs(w), name=name),
}
#: Those of cross-replica context, or of any.
OUTSIDE_STEPS: dict[str, Call] = {
    "MirroredStrategy": mirrored,
    "Strategy.reduce": lambda w, name: w.strategy.reduce("SUM", ONES, name=name),
    "Strategy.gather": lambda w, name: w.strategy.gather(ONES, 0, name=name),
    "Strategy.broadcast": lambda w, name: w.strategy.broadcast(ONES, name=name),
    "Strategy.barrier": lambda w, name: w.strategy.barrier(name),
    "Strategy.assert_mirrored": lambda w, name: w.strategy.assert_mirrored(name=name),
    "Strategy.arena": lambda w, name: w.strategy.arena([ONES], name=name),
    "Arena": lambda w, name: ms.Arena(w.strategy, [ONES], name=name),
    "Strategy.distribute_dataset": lambda w, name: first_of(w.strategy.distribute_dataset(BATCHES, name=name)),
    "Strategy.experimental_distribute_dataset": lambda w, name: first_of(
        w.strategy.experimental_distribute_dataset(BATCHES, name=name)
    ),
    "Strategy.distribute_datasets_from_function": lambda w, name: list(
        w.strategy.distribute_datasets_from_function(lambda _: iter(BATCHES[: RANK + 1]), name=name)
    ),
    "Strategy.experimental_distribute_datasets_from_function": lambda w, name: list(
        w.strategy.experimental_distribute_datasets_from_function(lambda _: BATCHES, name=name)
    ),
    "Strategy.make_dataset_iterator": lambda w, name: w.strategy.make_dataset_iterator(BATCHES, name=name).get_next(),
    "Strategy.make_input_fn_iterator": lambda w, name: w.strategy.make_input_fn_iterator(
        lambda _: iter(BATCHES), name=name
    ).get_next(),
    "StrategyExtended.reduce_to": lambda w, name: w.extended.reduce_to("SUM", ONES, w.summed, name=name),
    "StrategyExtended.batch_reduce_to": lambda w, name: w.extended.batch_reduce_to("SUM", pairs(w), name=name),
    "StrategyExtended.broadcast_to": lambda w, name: w.extended.broadcast_to(ONES, w.summed, name=name),
    "StrategyExtended.barrier": lambda w, name: w.extended.barrier(name),
    "StrategyExtended.read_var": lambda w, name: w.extended.read_var(w.on_read, name=name),
    "CrossDeviceOps.reduce": lambda w, name: w.ops.reduce("SUM", ONES, w.summed, name=name),
    "CrossDeviceOps.batch_reduce": lambda w, name: w.ops.batch_reduce("SUM", pairs(w), name=name),
    "CrossDeviceOps.broadcast": lambda w, name: w.ops.broadcast(ONES, w.summed, name=name),
    "Variable.read_value": lambda w, name: w.on_read.read_value(name=name),
    "Variable.read_value of replica 0's": lambda w, name: w.first_on_read.read_value(name=name),
    "Variable.value": lambda w, name: w.on_read.value(name=name),
    "Variable.numpy": lambda w, name: w.on_read.numpy(name=name),
    "Variable.assign of an ON_READ one": lambda w, name: w.on_read.assign(ONES, name=name),
    "Sum.result": lambda w, name: w.sum.result(name=name),
    "Sum.reset_state": lambda w, name: w.sum.reset_state(name=name),
    "Mean.result": lambda w, name: w.mean.result(name=name),
    "Mean.reset_state": lambda w, name: w.mean.reset_state(name=name),
    "Optimizer.build": lambda w, name: w.optimizer.build([w.summed], name=name),
    "Optimizer.gradient_arena": lambda w, name: w.optimizer.gradient_arena([w.summed], name=name),
    "Optimizer.gradient_buckets": lambda w, name: w.optimizer.gradient_buckets([w.summed], name=name),
    "Checkpoint.save": saved,
    "Checkpoint.restore": lambda w, name: w.checkpoint.restore(w.folder / "saved", name=name),
    "Checkpoint.wait": lambda w, name: w.checkpoint.wait(name=name),
    "Saving.wait": lambda w, name: w.saving.wait(name=name),
    "CheckpointManager.save": lambda w, name: w.manager.save(1, name=name),
    "CheckpointManager.restore": lambda w, name: w.manager.restore(name=name),
    "CheckpointManager.wait": lambda w, name: w.manager.wait(name=name),
    "CheckpointManager.close": lambda w, name: w.manager.close(name=name),
    "PreemptionCheckpointHandler": preempted,
    "PreemptionCheckpointHandler.save_checkpoint_if_preempted": asked_for_preemption,
    "PreemptionCheckpointHandler.save_checkpoint_if_preempted, when told": asked_for_preemption,
}
COLLECTIVES = [*IN_STEPS, *OUTSIDE_STEPS]


def called(world: World, which: str, left: Any, right: Any) -> Any:
    """Make a call at one line on rank 0, at another one on the other ranks; with its own name at each."""
    call = IN_STEPS.get(which) or OUTSIDE_STEPS[which]

    def one() -> Any:
        return call(world, left)

    def other() -> Any:
        return call(world, right)

    chosen = other if RANK else one
    return world.strategy.run(chosen) if which in IN_STEPS else chosen()


@several
@pytest.mark.parametrize("which", COLLECTIVES)
def test_one_name_makes_one_call_of_two_places(world: World, which: str) -> None:
    before(which, world)
    called(world, which, "the same", "the same")
    after(world)
    assert still_works(world.strategy)


@several
@pytest.mark.parametrize(("names", "differs"), [((None, None), "place"), (("the left name", "the right name"), "name")])
@pytest.mark.parametrize("which", COLLECTIVES)
def test_other_places_or_names_are_two_calls(
    world: World, which: str, names: tuple[str | None, str | None], differs: str
) -> None:
    before(which, world)
    shown = r"rank 0: .*the left name.*\n.*ranks? 1\b.*: .*the right name" if differs == "name" else "place"
    with pytest.raises(CollectiveMismatchError, match=shown) as caught:
        called(world, which, *names)
    assert differs in caught.value.differ
    assert still_works(world.strategy)


@several
def test_the_first_batch_shows_the_name_of_its_dataset(strategy: ms.Strategy) -> None:
    batches = iter(strategy.distribute_dataset(BATCHES, name="digits"))
    with pytest.raises(CollectiveMismatchError, match=r"name=digits: dataset \d+ of the strategy"):
        strategy.barrier("end") if RANK else next(batches)


@several
def test_the_first_reduction_in_the_background_compares_the_name() -> None:
    places = (
        lambda: context().all_reduce_async("SUM", 1.0, name="loss").wait(),
        lambda: context().all_reduce_async("SUM", 1.0, name="loss").wait(),
    )
    with closing(OnNodes(RANKS, ms.MpiAllReduce())) as apart:
        assert apart.run(places[min(RANK, 1)]) == SIZE


@several
def test_gradients_may_be_ready_at_other_lines_on_other_nodes() -> None:
    with closing(OnNodes(RANKS, ms.MpiAllReduce())) as apart:
        with apart.scope():
            variables = [ms.Variable(ONES), ms.Variable(ONES)]
            optimizer = ms.optimizers.SGD(1.0)
            buckets = optimizer.gradient_buckets(variables, 1)

        def step() -> None:
            for gradient in buckets.values:
                gradient[...] = 1
            if RANK:
                buckets.ready(0)
                buckets.ready(1)
            else:
                buckets.ready(1)
                buckets.ready(0)
            optimizer.apply_gradients(buckets, name="update")

        apart.run(step)
        for variable in variables:
            np.testing.assert_array_equal(variable.local_view, 1 - SIZE)
