"""Options and enumerations: what is accepted, and what the refusal says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpistrategy as ms
from mpistrategy import CommunicationImplementation, CommunicationOptions, ReduceOp, VariableAggregation, errors

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize(
    "value",
    [None, 0, 1, True, "", "SUMM", " SUM", b"SUM", "MEDIAN", sum, np.sum, VariableAggregation.NONE,
     VariableAggregation.ONLY_FIRST_REPLICA, ["SUM"], ReduceOp],
)  # fmt: skip
def test_anything_else_is_no_reduce_op(value: Any) -> None:
    with pytest.raises(errors.ReduceOpError) as refusal:
        ReduceOp._parse(value, "Strategy.reduce")
    for part in ("Strategy.reduce", repr(value), "SUM", "MEAN"):
        assert part in str(refusal.value)
    assert isinstance(refusal.value, ValueError)


def test_words_are_taken_in_any_letter_case() -> None:
    assert CommunicationOptions(wire="BFloat16") == CommunicationOptions(wire="bfloat16")
    assert CommunicationOptions(implementation="Ring").implementation is CommunicationImplementation.RING
    assert ms.get_strategy().reduce("mEaN", 3) == ms.get_strategy().reduce(VariableAggregation.MEAN, 3) == 3
    assert ms.optimizers.SGD(nonfinite="SKIP").nonfinite == "skip"
    with ms.MirroredStrategy("CPU", check="Always", on_error="RAISE") as strategy:
        assert strategy.extended.communicator.guard.contains_errors
        assert len(list(strategy.distribute_dataset([np.ones(4)], check_batches="Raise"))) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"bytes_per_pack": -1}, ValueError, "bytes_per_pack=-1"),
        ({"bytes_per_pack": "8"}, TypeError, "bytes_per_pack='8'"),
        ({"bytes_per_pack": 8.0}, TypeError, "bytes_per_pack=8.0"),
        ({"wire": "float8"}, ValueError, "wire='float8'"),
        ({"bytes_per_pack": None}, TypeError, "bytes_per_pack=None"),
        ({"bytes_per_pack": float("nan")}, (TypeError, ValueError), "bytes_per_pack=nan"),
        ({"bytes_per_pack": float("inf")}, (TypeError, ValueError), "bytes_per_pack=inf"),
        ({"implementation": "FAST"}, ValueError, "implementation='FAST'"),
        ({"implementation": 1}, ValueError, "implementation=1"),
        ({"implementation": None}, ValueError, "implementation=None"),
    ],
)
def test_wrong_communication_options(arguments: dict[str, Any], error: Any, named: str) -> None:
    with pytest.raises(error) as refusal:
        CommunicationOptions(**arguments)
    assert isinstance(refusal.value, errors.MpiStrategyError)
    text = str(refusal.value)
    assert text.startswith("CommunicationOptions: ")
    assert named in text
    assert "expected" in text


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
