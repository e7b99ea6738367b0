"""Objects made outside scope() once a strategy of several ranks exists: none is silently this rank's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest

import mpistrategy as ms
from mpistrategy import errors

Launch = Callable[..., launching.Finished]

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
    with pytest.raises(errors.ContextError, match=f"^{what.partition(',')[0]}: .*`with strategy.scope.*OneDevice"):
        REFUSED[what]()
    with ms.OneDeviceStrategy().scope():  # meant
        REFUSED[what]()
    with strategy.scope():
        REFUSED[what]()
    strategy.run(REFUSED[what])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", WARNED)
def test_what_belongs_to_one_rank_warns(strategy: ms.Strategy, what: str) -> None:
    with pytest.warns(errors.OutsideStepWarning, match=f"^{what} was .*this rank's own.*OneDeviceStrategy") as caught:
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
