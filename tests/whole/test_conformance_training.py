"""The judge of training loops: bare numbers agree to float64's rounding, and to nothing coarser."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from conformance.cases import load_cases
from conformance.compare import STEPS, Tolerance, differences
from conformance.ranks import MpiRanks
from conformance.runner import replay
from mpi4py import MPI

pytestmark = pytest.mark.mpi
Json = Any
CASES = [case for case in load_cases(areas=("optimizer",)) if case["program"] == "train"]


@pytest.mark.parametrize(
    ("want", "got", "agrees"),
    [
        (0.5, 0.5 + 1e-15, True),
        (0.5, 0.5 + 1e-11, False),
        (0.0, 1e-14, True),  # beside inputs of magnitude 4
        (1e6, 1e6 + 1e-8, True),
        (1e6, 1e6 + 1e-6, False),
        (0.5, "NaN", False),
        ("NaN", "NaN", True),
        (3, 3, True),
        (3, 4, False),
        (3.0, 3, False),
        ([0.5, {"w": 1.0}], [0.5 + 1e-15, {"w": 1.0 - 1e-15}], True),
        ([0.5, {"w": 1.0}], [0.5, {"v": 1.0}], False),
        ([0.5], [0.5, 0.5], False),
    ],
)
def test_numbers_of_a_training_loop(want: Json, got: Json, agrees: bool) -> None:
    tolerance = Tolerance.of_training({"inputs": {"x": [[4.0, -1.0]], "steps": 10**9}}, STEPS)
    assert (not list(differences(want, got, tolerance, "x"))) is agrees


def test_other_programs_have_exact_numbers() -> None:
    assert list(differences(0.5, 0.5 + 1e-15, Tolerance(4, 4.0), "x"))


@pytest.mark.parametrize("style", ["four_steps", "compat_v1_optimizer", "keras_optimizer", "variable_aggregation"])
@pytest.mark.parametrize("what", ["weight", "slot", "loss", "steps"])
def test_a_spoilt_trajectory_fails(style: str, what: str) -> None:
    """End to end: the last step's numbers shifted by a billionth, which is what float32 hyper-parameters would do."""
    spoilers: dict[str, Callable[[Json], Any]] = {
        "weight": lambda rows: rows[-1].update(w=[rows[-1]["w"][0] + 1e-9, *rows[-1]["w"][1:]]),
        "slot": lambda rows: shift_slot(rows[-1]["state"]),
        "loss": lambda rows: rows[-1].update({LOSS: rows[-1][LOSS] + 1e-9}),
        "steps": lambda rows: rows.pop(),
    }
    honest = next((case for case in CASES if fits(case, style, what)), None)
    if honest is None:
        pytest.skip("nothing of the kind was recorded with this number of replicas")
    spoilt = copy.deepcopy(honest)
    for record in spoilt["outcome"].get("by_rank", [spoilt["outcome"]]):
        spoilers[what](record["observed"]["trajectory"])
    results = replay([honest, spoilt], MpiRanks(MPI.COMM_WORLD))
    if MPI.COMM_WORLD.rank == 0:
        assert [result.verdict for result in results] == ["passed", "failed"]


LOSS = "sum of the replicas' losses before the step"


def fits(case: Json, style: str, what: str) -> bool:
    record = case["outcome"].get("by_rank", [case["outcome"]])[0]
    rows = record.get("observed", {}).get("trajectory")
    of_size = case["num_replicas"] == MPI.COMM_WORLD.size and case["inputs"]["style"] == style
    return bool(of_size and rows and (what != "slot" or "state" in rows[0]))


def shift_slot(state: Json) -> None:
    name = next(iter(state["w"]))
    state["w"][name][0] += 1e-9
