"""The recorded TensorFlow cases on the ranks of this session, and the judge itself: it must be able to say no."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance.cases import load_cases
from conformance.compare import Tolerance, differences
from conformance.environment import kind_of
from conformance.judge import Judge
from conformance.replay import Ranks, replay, simulated_ranks
from conformance.rules import TABLE, Rule, load_table
from conformance.values import encode, leaves, local_view
from replicas import RANK, SIZE

from mpistrategy.testing import run_replicas

CASES = list(load_cases())
OF_SIZE = [case for case in CASES if case["num_replicas"] == SIZE]
READINGS, RULES = load_table()
Json = Any
SUM = {"reduce_op": {"reduce_op": "SUM"}}
needs_cases = pytest.mark.skipif(not OF_SIZE, reason="nothing was recorded with this number of replicas")


# ------------------------------------------------------------------------------------------------ the replay


@needs_cases
@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")  # some cases make variables there
def test_recorded_cases_hold_on_mpi_and_on_simulated_ranks_alike() -> None:
    real = replay(OF_SIZE, Ranks())
    if RANK == 0:
        wrong = [result for result in real if result.verdict in ("failed", "unsupported")]
        assert not wrong, "\n".join(f"{result.case_id}: {'; '.join(result.details)}" for result in wrong)
        every = 1 if len(OF_SIZE) < 500 else 3
        simulated = run_replicas(lambda: replay(OF_SIZE[::every], simulated_ranks()), SIZE)[0]
        verdicts = {result.case_id: (result.verdict, result.rule) for result in real}
        assert {result.case_id: (result.verdict, result.rule) for result in simulated}.items() <= verdicts.items()
        assert len(simulated) == len(OF_SIZE[::every])


def spoilt(case: Json, spoil: Callable[[Json], Any]) -> Json:
    """A copy of a case that was recorded otherwise."""
    twin = copy.deepcopy(case)
    for record in twin["outcome"].get("by_rank", [twin["outcome"]]):
        spoil(record)
    return twin


def first(program: str, **inputs: Json) -> Json:
    """A case of a program that went well and has these inputs."""
    well = [case for case in OF_SIZE if case["program"] == program and case["outcome"].get("status") == "ok"]
    found = [case for case in well if all(case["inputs"].get(name) == value for name, value in inputs.items())]
    if "reduce_op" in inputs:  # of an array of numbers, not of a nest
        found = [case for case in found if is_float32(case["outcome"].get("by_rank", [case["outcome"]])[0])]
    return next(iter(found), None) or pytest.skip("nothing of the kind was recorded with this number of replicas")


def result_of(record: Json) -> Json:
    """The first array that rank 0 should get."""
    return leaves(local_view(record["observed"]["result"], 0))[0]


def is_float32(record: Json) -> bool:
    result = result_of(record)
    return isinstance(result, dict) and result.get("dtype") == "float32"


def shift_slot(record: Json) -> None:
    slots = record["observed"]["trajectory"][-1]["state"]["w"]
    slots[next(iter(slots))][0] += 1e-9


@needs_cases
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("program", "inputs", "spoil"),
    [
        ("all_reduce", SUM, lambda r: result_of(r).update(dtype="float16")),
        ("all_reduce", SUM, lambda r: result_of(r).update(shape=[1, *result_of(r)["shape"]])),
        ("all_reduce", SUM, lambda r: r.update(status="error", error={"type": "ValueError", "message": ""})),
        ("variable_read", {"how": "add", "where": "outside"}, lambda r: r["observed"].update(copies=[5.0] * SIZE)),
        ("run_args", {}, lambda r: r["observed"].update({"notes": {"args": {f"replica {i}": 5 for i in range(SIZE)}}})),
        *[
            ("train", {"style": style, "optimizer": "adam"}, spoil)
            for style in ("four_steps", "compat_v1_optimizer")
            for spoil in (shift_slot, lambda r: r["observed"]["trajectory"].pop())
        ],
    ],
)
def test_a_spoilt_recording_fails(program: str, inputs: Json, spoil: Callable[[Json], Any]) -> None:
    """End to end: the same replay that passes says no when the recording says something else."""
    case = first(program, **inputs)
    results = replay([case, spoilt(case, spoil)], Ranks())
    if RANK == 0:
        assert [result.verdict for result in results] == ["passed", "failed"]


@needs_cases
@pytest.mark.mpi
@pytest.mark.parametrize(
    "unknown",
    [{"program": "never heard of"}, {"inputs": {"per_replica": [{"never heard of": 1}] * SIZE, "reduce_op": "SUM"}}],
)
def test_what_is_not_known_is_unsupported(unknown: Json) -> None:
    case = {**first("all_reduce"), **unknown}
    results = replay([case], Ranks())
    assert [result.verdict for result in results] == ["unsupported"] * (RANK == 0)


# ------------------------------------------------------------------------------------------------ the judge


def recorded(observed: Json, **fields: Json) -> Json:
    outcome = {"status": "ok", "observed": {"result": observed}}
    case = {"id": "area/name@m2r", "program": "p", "strategy": "MirroredStrategy", "num_replicas": 2}
    return {**case, "outcome": outcome, **fields}


def tensor(value: Json, dtype: str = "float32") -> Json:
    return {"tensor": value, "dtype": dtype, "shape": list(np.shape(value))}


def error(kind: str, *bases: str) -> Json:
    return {"status": "error", "observed": {}, "error": {"type": kind, "bases": list(bases), "message": ""}}


def ok(value: Any) -> Json:
    return {"status": "ok", "observed": {"result": encode(value)}}


FIVE = np.array([5.0, 6.0], np.float32)
ONE, NEAR = np.float32(1.0), np.nextafter(np.float32(1.0), np.float32(2.0))
HANG = {"by_rank": [{"status": "no_result"}, {"status": "ok", "observed": {"result": 1}}]}
FIVES = recorded({"PerReplica": [tensor([5.0, 6.0])] * 2})
MISMATCH = error("CollectiveMismatchError", "MpiStrategyError")
ELSEWHERE = {"status": "ok", "observed": {"result": {"elsewhere": "rank 0"}}}


def failing(kind: str) -> Json:
    return recorded(None, outcome=error(kind))


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("case", "outcomes", "agrees"),
    [
        (FIVES, [ok(FIVE), ok(FIVE)], True),
        *[
            (FIVES, [ok(FIVE), ok(wrong)], False)
            for wrong in (FIVE + ONE * 1e-6, FIVE.astype(float), FIVE.reshape(1, 2), FIVE[:1], [5.0, 6.0], None)
        ],
        *[
            (recorded(encode({"a": FIVE})), [ok(found)] * 2, isinstance(found, dict) and "a" in found)
            for found in ([FIVE], (FIVE,), {"a": FIVE}, {"b": FIVE}, FIVE)
        ],
        (FIVES, [ok(FIVE), error("ValueError", "Exception")], False),
        (failing("ValueError"), [error("ShapeError", "MpiStrategyError", "ValueError")] * 2, True),
        (failing("ValueError"), [error("DTypeError", "MpiStrategyError", "TypeError")] * 2, False),
        (failing("RuntimeError"), [error("NotImplementedError", "RuntimeError")] * 2, True),
        (failing("AssertionError"), [error("StructureError", "MpiStrategyError", "ValueError")] * 2, True),
        (failing("AssertionError"), [error("AssertionError", "Exception")] * 2, False),
        (failing("KeyError"), [error("ValueError", "Exception")] * 2, False),
        (failing("KeyError"), [error("KeyError", "LookupError"), ok(1)], True),  # a user's own, on one replica
        (failing("RuntimeError"), [error("RuntimeError", "Exception"), ok(1)], False),
        (recorded(None, strategy="MultiWorkerMirroredStrategy", outcome=HANG), [MISMATCH, MISMATCH], True),
        (recorded(None, strategy="MultiWorkerMirroredStrategy", outcome=HANG), [MISMATCH, ok(1)], True),
        (recorded(None, strategy="MultiWorkerMirroredStrategy", outcome=HANG), [MISMATCH, ok(2)], False),
        (recorded(None, strategy="MultiWorkerMirroredStrategy", outcome=HANG), [error("AttributeError")] * 2, False),
        (recorded(tensor(5.0)), [ok(np.float32(5.0)), ELSEWHERE], True),
        (recorded(tensor(5.0)), [ok(np.float32(4.0)), ELSEWHERE], False),
        (recorded(tensor(5.0)), [ELSEWHERE, ELSEWHERE], False),
    ],
)
def test_the_judge_says_yes_and_no(case: Json, outcomes: list[Json], agrees: bool) -> None:
    assert (Judge().differences(case, outcomes) == []) is agrees


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("want", "got", "tolerance", "agrees"),
    [
        (np.array(np.nan), np.array(np.nan), Tolerance(), True),
        (np.array(0.0), np.array(-0.0), Tolerance(), False),
        (np.array(np.inf), np.array(-np.inf), Tolerance(), False),
        (ONE, NEAR, Tolerance(3, 1.0), True),  # a sum of more than two values has MPI's order
        (ONE, NEAR, Tolerance(2, 1.0), False),
        (ONE, np.float32(1.001), Tolerance(3, 1.0), False),
        (np.int64(10**15), np.int64(10**15 + 1), Tolerance(3, 1.0), False),
        (0.5, 0.5 + 1e-15, Tolerance(4, 4.0), False),
        (0.5, 0.5 + 1e-15, Tolerance.of_training({"inputs": {"x": [4.0]}}), True),
        (0.5, 0.5 + 1e-11, Tolerance.of_training({"inputs": {"x": [4.0]}}), False),
        (3, 4, Tolerance.of_training({"inputs": {"x": [4.0]}}), False),
    ],
)
def test_numbers_are_compared_to_the_last_bit_but_for_what_any_order_gives(
    want: Any, got: Any, tolerance: Tolerance, agrees: bool
) -> None:
    assert (not list(differences(encode(want), encode(got), tolerance, "x"))) is agrees


# ------------------------------------------------------------------------------------------------ the table


@pytest.mark.one_rank
def test_every_rule_is_about_some_case_and_none_names_one() -> None:
    assert [row for row in (*READINGS, *RULES) if not any(map(row.covers, CASES))] == []
    names = {re.escape(case["id"].partition("@")[0]) for case in CASES}
    assert not re.search("|".join([r"@(m\d[rdh]|w\d|one|def)\b", *names]), TABLE.read_text())
    by_name: dict[str, list[Json]] = {}
    for case in CASES:
        by_name.setdefault(case["id"].partition("@")[0], []).append(case)

    def disagrees(case: Json) -> bool:
        twins = [twin for twin in by_name[case["id"].partition("@")[0]] if kind_of(twin) != kind_of(case)]
        return any(json.dumps(twin["outcome"]) != json.dumps(case["outcome"]) for twin in twins)

    superseded = [rule for rule in RULES if rule.kind == "superseded"]
    assert [rule.name for rule in superseded if not any(map(disagrees, filter(rule.covers, CASES)))] == []


def rule(kind: str, **fields: Any) -> Rule:
    return Rule(name="r", kind=kind, programs=("p",), reason="graph", why="", **fields)


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("row", "found", "verdict"),
    [
        (rule("deviation", ours="ok", only=("result",)), 4.0, "deviations"),
        (rule("deviation", ours="ok", only=("result",)), 5.0, "passed"),
        (rule("deviation", ours="ok", only=("status",)), 4.0, "failed"),
        (rule("deviation", ours="ValueError"), 4.0, "failed"),
        (rule("deviation", same_numbers=True), 4.0, "failed"),
        (rule("deviation", when={"env": "multi_worker"}), 4.0, "failed"),
        (rule("deviation", unless={"env": "mirrored"}), 4.0, "failed"),
        (rule("superseded", when={"env": "mirrored"}), 10.0, "superseded"),  # what the other environment recorded
        (rule("superseded", when={"env": "mirrored"}), 11.0, "failed"),
    ],
)
def test_a_rule_excuses_only_what_it_describes(row: Rule, found: float, verdict: str) -> None:
    twin = recorded(tensor(10.0), strategy="MultiWorkerMirroredStrategy")
    result = Judge(rules=[row]).verdict(recorded(tensor(5.0)), [ok(np.float32(found))] * 2, [twin])
    assert result.verdict == verdict
