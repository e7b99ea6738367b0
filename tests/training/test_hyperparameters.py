"""Settings of optimizers are checked whenever they are set; names of other libraries and former names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from replicas import new_variable

import mpistrategy as ms
from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.optimizers import SGD, Adam, AdamW, Optimizer

pytestmark = pytest.mark.mpi

BAD: list[tuple[type[Optimizer], str, Any, type[Exception]]] = [
    (SGD, "learning_rate", 0, OptionError),
    (SGD, "learning_rate", "fast", OptionTypeError),
    (SGD, "learning_rate", np.inf, OptionError),
    (SGD, "learning_rate", True, OptionTypeError),
    (SGD, "learning_rate", None, OptionTypeError),
    (SGD, "momentum", 1.5, OptionError),
    (SGD, "nesterov", "yes", OptionTypeError),
    (SGD, "aggregation", "MAX", OptionError),
    (SGD, "aggregation", "mena", OptionError),
    (SGD, "global_clipnorm", -1.0, OptionError),
    (SGD, "mirrored_check_steps", -1, OptionError),
    (SGD, "mirrored_check_steps", 1.5, OptionTypeError),
    (SGD, "nonfinite", "stop", OptionError),
    (Adam, "beta_1", 1.0, OptionError),
    (Adam, "beta_2", -0.1, OptionError),
    (Adam, "epsilon", float("nan"), OptionError),
    (AdamW, "weight_decay", -1, OptionError),
]


@pytest.mark.parametrize(("kind", "name", "value", "error"), BAD, ids=lambda given: getattr(given, "__name__", given))
def test_a_setting_is_checked_alike_by_the_constructor_and_later(
    kind: type[Optimizer], name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as made:
        kind(**{name: value})
    optimizer = kind()
    before = getattr(optimizer, name)
    with pytest.raises(error) as changed:
        setattr(optimizer, name, value)
    assert str(made.value) == str(changed.value)
    assert str(made.value).startswith(f"{kind.__name__}: found {name}={value!r}; expected ")
    assert getattr(optimizer, name) == before


@pytest.mark.parametrize(("wrong", "right"), [("lr", "learning_rate"), ("clipnorm", "global_clipnorm")])
def test_a_name_of_another_library_is_refused_with_ours(wrong: str, right: str) -> None:
    optimizer = SGD()
    with pytest.raises(AttributeError, match=right):
        setattr(optimizer, wrong, 0.5)
    with pytest.raises(AttributeError, match=right):
        getattr(optimizer, wrong)
    assert not hasattr(optimizer, wrong)
    with pytest.raises(TypeError, match=right):
        SGD(**{wrong: 0.5})
    with pytest.raises(TypeError, match="rate_of_learning"):
        SGD(rate_of_learning=0.5)


def test_reprs_say_what_a_user_set_and_how_far_a_thing_is(strategy: ms.MirroredStrategy) -> None:
    accumulator = ms.gradients.GradientAccumulator(steps=3)
    accumulator.add([np.ones(2)])
    with strategy.scope():
        loss = ms.metrics.Mean("loss")
    strategy.run(lambda: loss.update_state(np.ones(4)))
    for thing, text in (
        (SGD(), "SGD()"),
        (SGD(0.5, momentum=0.9, aggregation="mean"), "SGD(learning_rate=0.5, momentum=0.9, aggregation=MEAN)"),
        (AdamW(nonfinite="skip"), "AdamW(nonfinite='skip')"),
        (ms.HierarchicalCopyAllReduce(num_packs=2), "HierarchicalCopyAllReduce(num_packs=2)"),
        (accumulator, "<GradientAccumulator with 1 of 3 steps>"),
        (loss, "<Mean, on this rank loss/total 4, loss/count 4>"),
        (ms.telemetry.trace("folder"), "Trace(directory='folder')"),
    ):
        assert repr(thing) == text


def test_a_variable_may_be_a_key(strategy: ms.MirroredStrategy) -> None:
    first, second = new_variable(strategy, np.zeros(3)), new_variable(strategy, np.zeros(3))
    rates = {first: 1.0, second: 2.0}
    assert (rates[first], rates[second], len({first, second, first})) == (1.0, 2.0, 2)
    assert first in [first, second]
    assert any(second is each for each in [first, second])
    assert (first == second).all()  # elements are compared, as before
