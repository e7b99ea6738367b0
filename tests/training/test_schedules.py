"""Learning-rate schedules: what they return, what optimizers do with them, and what checkpoints keep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import RANK, context, new_variable

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.optimizers import SGD
from mpistrategy.schedules import Constant, CosineDecay, PiecewiseConstantDecay, Warmup

#: What `keras.optimizers.schedules` (3.15) returns for the same arguments and steps, rounded to 9 digits.
KERAS = [
    (CosineDecay(0.1, 10), {0: 0.1, 1: 0.097552826, 5: 0.05, 9: 0.002447174, 10: 0.0, 50: 0.0}),
    (CosineDecay(0.1, 10, alpha=0.1), {0: 0.1, 5: 0.055, 10: 0.01, 11: 0.01}),
    (
        CosineDecay(0.02, 10, warmup_target=0.1, warmup_steps=4),
        {0: 0.02, 1: 0.04, 3: 0.08, 4: 0.1, 9: 0.05, 14: 0.0, 20: 0.0},
    ),
    (PiecewiseConstantDecay([3, 6], [1.0, 0.5, 0.1]), {0: 1.0, 3: 1.0, 4: 0.5, 6: 0.5, 7: 0.1}),
]


@pytest.mark.one_rank
@pytest.mark.parametrize(("schedule", "rates"), KERAS, ids=lambda each: repr(each)[:40])
def test_rates_are_those_of_keras(schedule: Any, rates: dict[int, float]) -> None:
    assert {step: round(schedule(step), 9) for step in rates} == rates


@pytest.mark.one_rank
def test_a_warmup_leads_to_another_schedule() -> None:
    assert [Warmup(0.4, 4)(step) for step in range(6)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])
    decay = CosineDecay(0.1, 10)
    both = Warmup(decay, 5, start=0.05)
    assert both(0) == 0.05
    assert [both(5 + step) for step in range(12)] == [decay(step) for step in range(12)]
    assert Constant(0.1)(3) == 0.1


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: CosineDecay(-0.1, 10), "initial_learning_rate=-0.1"),
        (lambda: CosineDecay(0.1, 0), "decay_steps=0"),
        (lambda: CosineDecay(0.1, 10, warmup_steps=-1), "warmup_steps=-1"),
        (lambda: PiecewiseConstantDecay([1, 1], [1, 2, 3]), "growing"),
        (lambda: PiecewiseConstantDecay([1], [1]), "1 values for 1 boundaries"),
        (lambda: PiecewiseConstantDecay(3, [1]), "boundaries=3"),  # type: ignore[arg-type]
        (lambda: Warmup("x", 3), "then='x'"),  # type: ignore[arg-type]
        (lambda: Constant(float("nan")), "learning_rate=nan"),
        (lambda: SGD(lambda step: -1.0), r"learning_rate\(0\)=-1.0"),
        (lambda: SGD(lambda step: "fast"), r"learning_rate\(0\)='fast'"),  # type: ignore[arg-type,return-value]
    ],
)
def test_what_does_not_fit_is_refused(make: Any, told: str) -> None:
    with pytest.raises(errors.MpiStrategyError, match=told):
        make()


def halved(step: int) -> float:
    return 0.5**step


def steps_of(strategy: ms.Strategy, optimizer: Any, weights: ms.Variable, count: int) -> None:
    for _ in range(count):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), weights)]))


@pytest.mark.mpi
def test_a_rate_may_be_an_array_of_one_number_and_zero_and_replace_a_number(strategy: ms.Strategy) -> None:
    weights = new_variable(strategy, np.ones(3))
    optimizer = SGD(0.5, aggregation="MEAN")
    steps_of(strategy, optimizer, weights, 1)
    optimizer.learning_rate = lambda step: np.float32(0.25) if step == 1 else 0  # type: ignore[assignment]
    assert optimizer.learning_rate == 0.25
    steps_of(strategy, optimizer, weights, 2)
    assert optimizer.learning_rate == 0
    np.testing.assert_array_equal(weights.numpy(), np.full(3, 0.25))
    optimizer.learning_rate = 0.25
    steps_of(strategy, optimizer, weights, 1)
    np.testing.assert_array_equal(weights.numpy(), np.zeros(3))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("second", "kind", "told"),
    [
        (lambda: 0.2, errors.CollectiveMismatchError, r"'learning_rate': 0\.[12]"),
        (lambda: math.log(-1), (ValueError, errors.RemoteError), "math domain|expected a pos"),
    ],
)
def test_schedules_that_differ_or_fail_on_one_rank_raise_on_every_rank(
    strategy: ms.Strategy, second: Any, kind: Any, told: str
) -> None:
    weights = new_variable(strategy, np.ones(3))
    optimizer = SGD(lambda step: 0.1 if step < 1 or RANK else second())
    steps_of(strategy, optimizer, weights, 1)
    with pytest.raises(kind, match=told):
        steps_of(strategy, optimizer, weights, 1)


class Plateau:
    """A schedule with a state."""

    def __init__(self) -> None:
        self.rate = 0.5

    def __call__(self, step: int) -> float:
        return self.rate

    def state_dict(self) -> Any:
        return {"rate": self.rate}

    def load_state_dict(self, state: Any) -> None:
        self.rate = state["rate"]


@pytest.mark.mpi
def test_a_checkpoint_keeps_the_step_and_a_state_of_the_schedule(strategy: ms.Strategy, folder: Path) -> None:
    with strategy.scope():
        weights = ms.Variable(np.zeros(3))
        optimizer, plateau = SGD(halved, aggregation="MEAN"), Plateau()
        second = SGD(plateau, aggregation="MEAN")
        checkpoint = ms.Checkpoint(weights=weights, optimizer=optimizer, second=second)
    steps_of(strategy, optimizer, weights, 2)
    plateau.rate = 0.0  # the last rate of many schedules
    steps_of(strategy, second, weights, 1)
    checkpoint.save(folder / "saved")
    rate, plateau.rate = optimizer.learning_rate, 0.5
    steps_of(strategy, optimizer, weights, 3)
    steps_of(strategy, second, weights, 3)
    checkpoint.restore(folder / "saved")
    assert (plateau.rate, optimizer.learning_rate) == (0.0, rate)
    np.testing.assert_array_equal(weights.numpy(), np.full(3, -1.5))
    steps_of(strategy, optimizer, weights, 1)
    steps_of(strategy, second, weights, 1)
    np.testing.assert_array_equal(weights.numpy(), np.full(3, -1.75))
    stateless = ms.Checkpoint(weights=weights, optimizer=optimizer, second=SGD(halved))
    with pytest.raises(errors.CheckpointMismatchError, match="second/schedule"):
        stateless.restore(folder / "saved")


# --------------------------------------------------------------------------------------------------------- losses


@pytest.mark.mpi
def test_parts_of_a_loss_add_up_to_the_mean_over_the_global_batch(strategy: ms.Strategy) -> None:
    size = strategy.num_replicas_in_sync
    losses = np.arange(RANK + 1.0)
    rows = size * (size + 1) // 2

    def step() -> Any:
        part = ms.losses.compute_average_loss(losses, global_batch_size=rows)
        penalty = ms.losses.scale_regularization_loss(np.array([1.0, 2.0]))
        return context().all_reduce("SUM", [part, penalty])

    mean, penalty = strategy.run(step)
    everything = np.concatenate([np.arange(rank + 1.0) for rank in range(size)])
    assert mean == pytest.approx(everything.mean())
    assert penalty == pytest.approx(3.0)
    equal = strategy.run(lambda: context().all_reduce("SUM", ms.losses.compute_average_loss(np.full(4, 2.0))))
    assert equal == pytest.approx(2.0)
    with pytest.raises(errors.ContextError, match=r"strategy\.run"), strategy.scope():
        ms.losses.compute_average_loss(losses)


@pytest.mark.one_rank
def test_weights_dtypes_and_mistakes_of_losses() -> None:
    average = ms.losses.compute_average_loss
    assert average(np.array([1.0, 3.0]), sample_weight=[1, 0]) == 0.5
    assert average(np.ones((2, 3)), sample_weight=np.array([1.0, 0.0]), global_batch_size=2) == 1.5
    assert average(np.array([1, 2])).dtype == np.float64
    half = average(np.full(4096, 16.0, np.float16))
    assert half.dtype == np.float16
    assert half == 16.0
    assert average(np.zeros(0), global_batch_size=4) == 0.0
    for make, told in (
        (lambda: average(1.0), "one loss for each row"),
        (lambda: average(np.ones(2), sample_weight=np.ones(3)), "sample_weight of shape"),
        (lambda: average(np.zeros(0)), "global_batch_size=0"),
        (lambda: average(np.ones(2), global_batch_size=2.5), "global_batch_size=2.5"),
    ):
        with pytest.raises(errors.MpiStrategyError, match=told):
            make()
