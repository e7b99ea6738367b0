"""Options and enumerations: what is accepted, and what the refusal says."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrategy as ms
from mpistrategy import CommunicationImplementation, CommunicationOptions, VariableAggregation, errors

pytestmark = pytest.mark.one_rank


def test_words_are_taken_in_any_letter_case() -> None:
    assert CommunicationOptions(wire="BFloat16") == CommunicationOptions(wire="bfloat16")
    assert CommunicationOptions(implementation="Ring").implementation is CommunicationImplementation.RING
    assert ms.get_strategy().reduce("mEaN", 3) == ms.get_strategy().reduce(VariableAggregation.MEAN, 3) == 3
    assert ms.optimizers.SGD(nonfinite="SKIP").nonfinite == "skip"
    with ms.MirroredStrategy("CPU", check="Always", on_error="RAISE") as strategy:
        assert strategy.extended.communicator.guard.contains_errors
        assert len(list(strategy.distribute_dataset([np.ones(4)], check_batches="Raise"))) == 1  # type: ignore[arg-type]


def test_merging_prefers_what_the_call_sets() -> None:
    of_strategy = CommunicationOptions(bytes_per_pack=8, timeout_seconds=5.0)
    of_call = CommunicationOptions(bytes_per_pack=16, implementation="RING")
    merged = of_strategy.merge(of_call)
    assert merged == CommunicationOptions(16, 5.0, CommunicationImplementation.RING)
    assert of_strategy.merge(None) is of_strategy
    assert of_strategy == CommunicationOptions(bytes_per_pack=8, timeout_seconds=5.0)


ERRORS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MpiStrategyError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_has_four_parts_and_a_builtin_base(kind: type[errors.MpiStrategyError]) -> None:
    error = kind.at("place", found="this", expected="that", fix="Do so.")
    assert str(error) == "place: found this; expected that. Do so."
    assert isinstance(error, ms.errors.MpiStrategyError)
    builtin = (ValueError, TypeError, RuntimeError, NotImplementedError, IndexError, FloatingPointError)
    assert kind is errors.MpiStrategyError or isinstance(error, builtin)
