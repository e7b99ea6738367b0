"""Collectives outside every step, and objects made outside scope(), once a strategy of several ranks was made.

The former work on this rank alone, and say so.  None of the latter is silently this rank's own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from declared import IN_STEPS, called
from replicas import RANK, SIZE, context

import mpistrategy as ms
from mpistrategy.errors import ContextError, OutsideStepWarning
from mpistrategy.mpi.contract.public_calls import declared
from mpistrategy.testing import run_replicas

Launch = Callable[..., launching.Finished]


def step_of_an_optimizer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideStepWarning)
        variable = ms.Variable(np.zeros(2))
    ms.optimizers.SGD(0.5).apply_gradients([(np.full(2, RANK + 1.0), variable)])
    return -2 * variable.numpy()[0]


def in_no_step(method: str) -> Any:
    return called(method, value=np.array([RANK + 1.0]))[0]


#: What is called, and the name and the cure that the warning has.
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        call.name: (partial(in_no_step, method), rf"strategy\.run.*outside a step use {re.escape(call.outside or '?')}")
        for method, call in IN_STEPS.items()
    },
    "Strategy.reduce": (lambda: ms.get_strategy().reduce("SUM", RANK + 1.0), "your own strategy"),
    "Strategy.gather": (lambda: ms.get_strategy().gather(np.array([RANK + 1.0]), 0)[0], "your own strategy"),
    "StrategyExtended.reduce_to": (
        lambda: context().merge_call(lambda s: s.extended.reduce_to("SUM", RANK + 1.0, "CPU:0")),
        "your own strategy",
    ),
    "StrategyExtended.batch_reduce_to": (
        lambda: ms.get_strategy().extended.batch_reduce_to("SUM", [(RANK + 1.0, "CPU:0")])[0],
        "your own strategy",
    ),
    "StrategyExtended.broadcast_to": (
        lambda: ms.get_strategy().extended.broadcast_to(RANK + 1.0, "CPU:0"),
        "your own strategy",
    ),
    "barrier": (lambda: ms.get_strategy().barrier() or RANK + 1, "your own strategy"),
    "SGD.apply_gradients": (step_of_an_optimizer, r"inside strategy\.scope\(\)"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CALLS)
def test_a_collective_outside_every_step_warns_and_stays_on_this_rank(strategy: ms.Strategy, name: str) -> None:
    call, cure = CALLS[name]
    with pytest.warns(OutsideStepWarning, match=f"^{name} was called .* this rank's own.*{cure}") as caught:
        assert call() == RANK + 1
    assert len(caught) == 1
    if "ReplicaContext" not in name:  # which are called in a file of their own
        assert caught[0].filename == __file__


@pytest.mark.mpi(min_size=2)
def test_a_collective_that_is_not_declared_with_what_to_call_there_is_refused(
    strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(declared, "ReplicaContext.all_gather", IN_STEPS["all_gather"]._replace(outside=""))
    for _ in range(2):
        with pytest.raises(ContextError, match=r"ReplicaContext\.all_gather: found a call outside every step"):
            called("all_gather")
        monkeypatch.delitem(declared, "ReplicaContext.all_gather", raising=False)


@pytest.mark.mpi(min_size=2)
def test_once_a_place_also_after_the_strategy_was_closed(strategy: ms.Strategy) -> None:
    ms.MirroredStrategy().close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            context().all_reduce("SUM", 1.0)
        context().all_reduce("SUM", 1.0)
    assert len(caught) == 2


@pytest.mark.mpi
def test_nothing_is_said_of_what_is_this_ranks_own(strategy: ms.Strategy) -> None:
    # Warnings are errors in these tests.  That nothing is said in steps, all the others show.
    assert ms.get_strategy().run(lambda: context().all_reduce("SUM", 1.0)) == 1
    assert ms.OneDeviceStrategy().reduce("SUM", 1.0) == 1
    assert context().merge_call(lambda default: default.num_replicas_in_sync) == 1
    with ms.OneDeviceStrategy().scope():
        own, loss = ms.Variable(1.0, aggregation="SUM"), ms.metrics.Mean()
    own.assign_add(1.0)
    loss.update_state(own)
    assert (float(own), loss.result()) == (2, 2)


@pytest.mark.mpi
def test_simulated_ranks_have_it_alike_and_leave_nothing_behind() -> None:
    def program() -> Any:
        alone = context().all_reduce("SUM", 1.0)  # no strategy of several ranks yet
        strategy = ms.MirroredStrategy()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outside = context().all_reduce("SUM", 1.0)
        inside = strategy.run(lambda: context().all_reduce("SUM", 1.0))
        return alone, outside, inside, [warning.category for warning in caught]

    if SIZE == 1:  # else a strategy of several ranks was made in this process by the tests before
        assert run_replicas(program, 3) == [(1, 1, 3, [OutsideStepWarning])] * 3
        assert context().all_reduce("SUM", 1.0) == 1
        assert run_replicas(lambda: (ms.MirroredStrategy(), context().all_reduce("SUM", 1.0))[1], 1) == [1]


# ------------------------------------------------------------------------------------------------- objects

#: What is made, where the ranks' values are to be combined.
REFUSED: dict[str, Callable[[], Any]] = {
    "Sum": ms.metrics.Sum,
    "Mean": ms.metrics.Mean,
    "Accuracy": ms.metrics.Accuracy,
    "Variable": lambda: ms.Variable(0.0, synchronization="ON_READ", aggregation="SUM"),
    "Variable, ON_WRITE": lambda: ms.Variable(0.0, aggregation="MEAN"),
}
#: What works on this rank alone, and warns.
WARNED: dict[str, Callable[[], Any]] = {
    "Variable": lambda: ms.Variable(0.0),
    "Strategy.rng": lambda: ms.get_strategy().rng(1),
    "Strategy.distribute_dataset": lambda: ms.get_strategy().distribute_dataset([np.ones(2)]),
    "Strategy.distribute_datasets_from_function": lambda: ms.get_strategy().distribute_datasets_from_function(
        lambda context: [np.ones(2)]
    ),
    "scale_regularization_loss": lambda: ms.losses.scale_regularization_loss(1.0),
    "compute_average_loss": lambda: ms.losses.compute_average_loss(np.ones(2)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_this_ranks_own_is_refused(strategy: ms.Strategy, what: str) -> None:
    with pytest.raises(ContextError, match=f"^{what.partition(',')[0]}: .*`with strategy.scope.*OneDevice"):
        REFUSED[what]()
    with ms.OneDeviceStrategy().scope():  # meant
        REFUSED[what]()
    with strategy.scope():
        REFUSED[what]()
    strategy.run(REFUSED[what])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", WARNED)
def test_what_belongs_to_one_rank_warns(strategy: ms.Strategy, what: str) -> None:
    with pytest.warns(OutsideStepWarning, match=f"^{what} was .*this rank's own.*OneDeviceStrategy") as caught:
        WARNED[what]()
    assert [warning.filename for warning in caught] == [__file__]


# Lines of each rank: what came of a call.
PROGRAM = """
import sys
import numpy as np
import mpistrategy as ms

def tried(call):
    try:
        return call()
    except ms.errors.ContextError as error:
        return "refused" if "with strategy.scope():" in str(error) else str(error)

folder = sys.argv[1]
state = {"rows": np.zeros(4)}
early, seen = ms.Checkpoint(state=state), ms.metrics.Sum()
strategy = ms.MirroredStrategy()
state["rows"][:] = mine = 1.0 + strategy.rank
checkpoint, plain = ms.Checkpoint(state=state), ms.Checkpoint(step=strategy.rank)
found = [early.strategy is strategy, checkpoint.strategy is strategy]
checkpoint.save(folder + "/c")
state["rows"][:] = 0
early.restore(folder + "/c")
found.append(bool((state["rows"] == mine).all()))
with ms.CheckpointManager(plain, folder + "/m") as manager:
    manager.save(1)
    plain.objects["step"] = -1
    manager.restore()
    found.append(plain.objects["step"] == strategy.rank)
strategy.run(lambda: seen.update_state(1.0))
found.append(tried(seen.result))
other = ms.MirroredStrategy()
found += [tried(lambda: ms.Checkpoint(state=state)), tried(lambda: plain.save(folder + "/x"))]
other.close()
found.append(ms.Checkpoint(state=state).strategy is strategy)
other = ms.MirroredStrategy()
del other  # dropped
found.append(ms.Checkpoint(state=state).strategy is strategy)
strategy.close()
found.append(tried(lambda: ms.Checkpoint(state=state)))
print(*found)
"""


@pytest.mark.one_rank
def test_a_checkpoint_joins_the_one_open_strategy(launch: Launch, tmp_path: Path) -> None:
    job = launch(3, [launching.program(PROGRAM, tmp_path), tmp_path]).check()
    words = "True True True True refused refused refused True True refused"
    assert job.stdout.splitlines() == [words] * 3, job


@pytest.mark.one_rank
def test_without_other_ranks_everything_works_as_ever(launch: Launch, tmp_path: Path) -> None:
    program = """
        import warnings
        import mpistrategy as ms
        warnings.simplefilter("error")
        strategy = ms.MirroredStrategy()
        total, mean = ms.Variable(1.0, aggregation="SUM"), ms.metrics.Mean()
        mean.update_state(total.assign_add(1.0))
        checkpoint = ms.Checkpoint(total=total, mean=mean, streams=ms.get_strategy().rng(1))
        print(checkpoint.strategy is ms.get_strategy(), mean.result())
    """
    assert launch(1, [launching.program(program, tmp_path)]).check().stdout == "True 2.0\n"
