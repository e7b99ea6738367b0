"""The recorded TensorFlow cases on the ranks of this session, and the judge itself: it must be able to say no."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from conformance import launch
from conformance.cases import load_cases
from conformance.compare import Tolerance, differences
from conformance.deviations import TABLE, Rule, load_rules, usage
from conformance.environment import kind_of
from conformance.judge import judge
from conformance.ranks import MpiRanks
from conformance.registry import Program
from conformance.report import print_report
from conformance.runner import Result, load_programs, replay, verdict
from conformance.values import decode, encode
from mpi4py import MPI

DONE = (
    "all_reduce",
    "all_gather",
    "gather",
    "reduce",
    "merge_call",
    "run",
    "replica_context",
    "scope",
    "cross_device_ops",
    "optimizer",
    "variables",
    "variables_create",
    "variables_on_read",
    "variables_on_write",
    "variables_scatter",
)
CASES = list(load_cases())
RULES = load_rules()
Json = Any


# ------------------------------------------------------------------------------------------------ the replay


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")  # some cases make variables there
def test_recorded_cases_hold_on_this_number_of_ranks() -> None:
    cases = [case for case in CASES if case["num_replicas"] == MPI.COMM_WORLD.size]
    if not cases:
        pytest.skip("nothing was recorded with this number of replicas")
    comm = MPI.COMM_WORLD.Dup()
    results = replay(cases, MpiRanks(comm))
    comm.Free()
    failed = [result for result in results if result.verdict == "failed"]
    assert not failed, "\n".join(f"{result.case_id}: {'; '.join(result.details)}" for result in failed)


@pytest.mark.mpi
def test_areas_that_are_done_have_a_function_for_every_program() -> None:
    programs = {case["program"] for case in CASES if case["area"] in DONE}
    assert programs <= set(load_programs())


# ------------------------------------------------------------------------------------------------ the judge


def recorded(observed: Json, **fields: Json) -> Json:
    return {
        "id": "area/name@m2r",
        "program": "p",
        "strategy": "MirroredStrategy",
        "num_replicas": 2,
        "outcome": {"status": "ok", "observed": {"result": observed}},
        **fields,
    }


def tensor(value: Json, dtype: str = "float32") -> Json:
    return {"tensor": value, "dtype": dtype, "shape": list(np.shape(value))}


def error(kind: str, *bases: str) -> Json:
    return {"status": "error", "observed": {}, "error": {"type": kind, "bases": list(bases), "message": ""}}


def ok(value: Any) -> Json:
    return {"status": "ok", "observed": {"result": encode(value)}}


def nothing(env: Any, inputs: Any) -> None:
    return None


PROGRAM = Program("p", nothing)
FIVE = np.array([5.0, 6.0], np.float32)


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("found", "agrees"),
    [
        (FIVE, True),
        (FIVE + np.float32(1e-6), False),
        (-FIVE, False),
        (FIVE.astype(np.float64), False),
        (FIVE.reshape(1, 2), False),
        (FIVE[:1], False),
        ([5.0, 6.0], False),
        (None, False),
    ],
)
def test_values_dtypes_and_shapes_are_compared(found: Any, agrees: bool) -> None:
    case = recorded({"PerReplica": [tensor([5.0, 6.0])] * 2})
    assert (judge(case, PROGRAM, [ok(FIVE), ok(found)]) == []) is agrees


@pytest.mark.one_rank
@pytest.mark.parametrize("structure", [[FIVE], (FIVE,), {"a": FIVE}, {"b": FIVE}, FIVE])
def test_structures_are_compared(structure: Any) -> None:
    want = encode({"a": FIVE})
    assert (judge(recorded(want), PROGRAM, [ok(structure)] * 2) == []) is (
        isinstance(structure, dict) and "a" in structure
    )


@pytest.mark.one_rank
def test_negative_zero_and_not_a_number() -> None:
    def same(a: float, b: float) -> bool:
        return not list(differences(encode(np.array(a)), encode(np.array(b)), Tolerance(), "x"))

    assert same(np.nan, np.nan)
    assert same(np.inf, np.inf)
    assert not same(0.0, -0.0)
    assert not same(np.inf, -np.inf)
    assert not same(np.nan, 1.0)


@pytest.mark.one_rank
def test_rounding_is_allowed_only_for_floating_sums_of_more_than_two_values() -> None:
    def same(num_values: int, a: Any, b: Any) -> bool:
        return not list(differences(encode(a), encode(b), Tolerance(num_values, 1.0), "x"))

    one, near = np.float32(1.0), np.nextafter(np.float32(1.0), np.float32(2.0))
    assert same(3, one, near)
    assert not same(2, one, near)
    assert not same(3, one, np.float32(1.001))
    assert not same(3, np.int64(10**15), np.int64(10**15 + 1))


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("kind", "found", "agrees"),
    [
        ("ValueError", error("ShapeError", "MpiStrategyError", "ValueError", "Exception"), True),
        ("ValueError", error("DTypeError", "MpiStrategyError", "TypeError", "Exception"), False),
        ("RuntimeError", error("NotImplementedError", "RuntimeError", "Exception"), True),
        ("AssertionError", error("StructureError", "MpiStrategyError", "ValueError", "Exception"), True),
        ("InvalidArgumentError", error("AssertionError", "Exception"), False),
        ("AssertionError", error("AssertionError", "Exception"), False),
        ("KeyError", error("ValueError", "Exception"), False),
        ("KeyError", error("KeyError", "LookupError", "Exception"), True),
        ("ValueError", ok(None), False),
    ],
)
def test_kinds_of_error_are_compared(kind: str, found: Json, agrees: bool) -> None:
    case = recorded(None, outcome=error(kind))
    assert (judge(case, PROGRAM, [found, found]) == []) is agrees


@pytest.mark.one_rank
def test_an_error_where_a_value_was_recorded_fails() -> None:
    case = recorded(tensor(5.0))
    assert judge(case, PROGRAM, [ok(np.float32(5.0)), error("ValueError", "Exception")])


@pytest.mark.one_rank
def test_every_rank_must_fail_unless_the_fault_is_of_some_replicas_only() -> None:
    case, failure = recorded(None, outcome=error("RuntimeError")), error("RuntimeError", "Exception")
    assert judge(case, PROGRAM, [failure, ok(1)])
    assert not judge(case, Program("p", nothing, partial=True), [failure, ok(1)])
    assert judge(case, Program("p", nothing, partial=True), [ok(1), ok(1)])


@pytest.mark.one_rank
def test_a_hang_passes_only_where_every_rank_says_why() -> None:
    hang = {"status": "no_result", "note": "did not return"}
    outcome = {"status": "mixed", "by_rank": [hang, {"status": "ok", "observed": {"result": 1}}]}
    case = recorded(None, strategy="MultiWorkerMirroredStrategy", outcome=outcome)
    typed, untyped = error("CollectiveMismatchError", "MpiStrategyError"), error("AttributeError", "Exception")
    assert not judge(case, PROGRAM, [typed, typed])
    assert not judge(case, PROGRAM, [typed, ok(1)])
    assert judge(case, PROGRAM, [typed, ok(2)])
    assert judge(case, PROGRAM, [untyped, untyped])


@pytest.mark.one_rank
def test_a_value_on_one_device_must_live_somewhere() -> None:
    case, elsewhere = recorded(tensor(5.0)), {"status": "ok", "observed": {"result": {"elsewhere": "rank 0"}}}
    assert not judge(case, PROGRAM, [ok(np.float32(5.0)), elsewhere])
    assert judge(case, PROGRAM, [ok(np.float32(4.0)), elsewhere])
    assert judge(case, PROGRAM, [elsewhere, elsewhere])


@pytest.mark.mpi
def test_an_unknown_program_is_unsupported_not_passed() -> None:
    case = {**CASES[0], "program": "never heard of", "num_replicas": MPI.COMM_WORLD.size}
    results = replay([case], MpiRanks(MPI.COMM_WORLD))
    if MPI.COMM_WORLD.rank == 0:
        assert [result.verdict for result in results] == ["unsupported"]


@pytest.mark.mpi
@pytest.mark.parametrize("spoil", ["value", "dtype", "shape", "status"])
def test_a_spoilt_recording_fails(spoil: str) -> None:
    """End to end: the same replay that passes says no when the recording says something else."""
    size = MPI.COMM_WORLD.size
    plain = [case for case in CASES if case["program"] == "all_reduce" and case["num_replicas"] == size]
    honest = next(filter(is_plain_sum, plain), None)
    if honest is None:
        pytest.skip("nothing was recorded with this number of replicas")
    spoilt = copy.deepcopy(honest)
    spoilers: dict[str, Callable[[Json], Any]] = {
        "value": lambda leaf: leaf.update(tensor=shift(leaf["tensor"])),
        "dtype": lambda leaf: leaf.update(dtype="float64"),
        "shape": lambda leaf: leaf.update(tensor=[leaf["tensor"]], shape=[1, *leaf["shape"]]),
    }
    if spoil == "status":
        spoilt["outcome"] = {"status": "error", "error": {"type": "ValueError", "message": ""}}
    else:
        for leaf in result_leaves(spoilt["outcome"]["observed"]["result"]):
            spoilers[spoil](leaf)
    results = replay([honest, spoilt], MpiRanks(MPI.COMM_WORLD))
    if MPI.COMM_WORLD.rank == 0:
        assert [result.verdict for result in results] == ["passed", "failed"]


def is_plain_sum(case: Json) -> bool:
    """Small float32 tensors, so that adding 1 to the result is no rounding."""
    leaves = case["inputs"]["per_replica"]
    if not all(isinstance(leaf, dict) and leaf.get("dtype") == "float32" and leaf.get("tensor") for leaf in leaves):
        return False
    small = all(np.abs(decode(leaf)).max() < 100 for leaf in leaves)
    return small and case["inputs"]["reduce_op"] == {"reduce_op": "SUM"} and case["outcome"]["status"] == "ok"


def result_leaves(node: Json) -> list[Json]:
    return [leaf for leaf in node.get("PerReplica", [node]) if isinstance(leaf, dict)]


def shift(value: Json) -> Json:
    return [shift(child) for child in value] if isinstance(value, list) else value + 1


# ------------------------------------------------------------------------------------------------ the table


@pytest.mark.one_rank
def test_every_rule_is_about_some_case_and_none_names_one() -> None:
    counts = usage(RULES, CASES)
    assert [name for name, count in counts.items() if count == 0] == []
    text = TABLE.read_text()
    assert not re.search(r"@(m\d[rdh]|w\d|one|def)\b", text)
    names = {re.escape(case["id"].partition("@")[0]) for case in CASES}
    assert not re.search("|".join(sorted(names)), text)


@pytest.mark.one_rank
def test_superseded_means_that_another_environment_recorded_otherwise() -> None:
    """Each such rule is about at least one case whose twin in another environment was recorded differently."""
    by_name: dict[str, list[Json]] = {}
    for case in CASES:
        by_name.setdefault(case["id"].partition("@")[0], []).append(case)

    def disagrees(case: Json) -> bool:
        twins = [twin for twin in by_name[case["id"].partition("@")[0]] if kind_of(twin) != kind_of(case)]
        return any(json.dumps(twin["outcome"]) != json.dumps(case["outcome"]) for twin in twins)

    superseded = [rule for rule in RULES if rule.kind == "superseded"]
    assert [rule.name for rule in superseded if not any(map(disagrees, filter(rule.covers, CASES)))] == []


@pytest.mark.one_rank
def test_a_rule_excuses_only_what_it_describes() -> None:
    rule = Rule(name="r", kind="deviation", programs=("p",), reason="graph", why="", ours=("ok",), only=("result",))
    case = recorded(tensor(5.0))
    assert verdict(case, PROGRAM, [ok(np.float32(4.0))] * 2, [rule]).verdict == "deviations"
    assert verdict(case, PROGRAM, [error("ValueError", "Exception")] * 2, [rule]).verdict == "failed"
    assert verdict({**case, "program": "q"}, PROGRAM, [ok(np.float32(4.0))] * 2, [rule]).verdict == "failed"
    assert verdict(case, PROGRAM, [ok(np.float32(5.0))] * 2, [rule]).verdict == "passed"


@pytest.mark.one_rank
def test_what_is_superseded_must_be_what_the_other_environment_recorded() -> None:
    rule = Rule(name="r", kind="superseded", programs=("p",), reason="semantics: x", why="", when=("env:mirrored",))
    case = recorded(tensor(5.0))
    twin = {**recorded(tensor(10.0)), "strategy": "MultiWorkerMirroredStrategy"}
    assert verdict(case, PROGRAM, [ok(np.float32(10.0))] * 2, [rule], [twin]).verdict == "superseded"
    assert verdict(case, PROGRAM, [ok(np.float32(11.0))] * 2, [rule], [twin]).verdict == "failed"


# ------------------------------------------------------------------------------------------------ the launcher

BROKEN_RUNNER = """
import json, os, sys, time
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
for case_id in json.load(open(sys.argv[1]))["ids"]:
    def write(line):
        if rank == 0:
            print(json.dumps(line), file=open(sys.argv[2], "a"), flush=True)
    write({"started": case_id})
    MPI.COMM_WORLD.Barrier()  # else the other rank could end the job before rank 0 has begun
    if case_id == "dies":
        os._exit(7)
    if case_id == "hangs":
        time.sleep(600)
    write({"ended": {"case_id": case_id, "verdict": "passed", "rule": "", "details": []}})
"""


@pytest.mark.slow
@pytest.mark.one_rank
def test_a_job_that_dies_or_hangs_fails_its_case_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if MPI.COMM_WORLD.size > 1:
        pytest.skip("starts MPI jobs of its own: runs in the session on 1 rank")
    (tmp_path / "broken_runner.py").write_text(BROKEN_RUNNER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "CASE_SECONDS", 3.0)
    mpi = "openmpi" if launching.IS_OPEN_MPI else "mpich"
    options = launch.parse(["--mpi", mpi])
    results = launch.replay_all(["a", "dies", "b", "hangs", "c"], 2, options, module="broken_runner")
    verdicts = {case_id: result.verdict for case_id, result in results.items()}
    assert verdicts == {"a": "passed", "dies": "failed", "b": "passed", "hangs": "failed", "c": "passed"}, results
    assert all(results[case_id].details[0].startswith("the job ") for case_id in ("dies", "hangs"))
    never_starts = launch.replay_all(["a", "b"], 2, options, module="no_such_module")
    assert [result.verdict for result in never_starts.values()] == ["failed", "failed"]


# ------------------------------------------------------------------------------------------------ the report


@pytest.mark.one_rank
@pytest.mark.parametrize(("worst", "status"), [("passed", 0), ("unsupported", 0), ("failed", 1)])
def test_the_report_ends_with_one_line(worst: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [{**recorded(1), "id": f"reduce/{i}", "area": "reduce"} for i in range(3)]
    verdicts = ("passed", "deviations", worst)
    results = {case["id"]: Result(case["id"], v) for case, v in zip(cases, verdicts, strict=True)}
    assert print_report(cases, results) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"conformance: passed=\d deviations=1 unsupported=\d failed=\d", last)


@pytest.mark.mpi
def test_an_input_that_is_not_known_is_unsupported() -> None:
    inputs = {"per_replica": [{"never heard of": 1}] * MPI.COMM_WORLD.size, "reduce_op": "SUM"}
    case = {**CASES[0], "program": "all_reduce", "inputs": inputs, "num_replicas": MPI.COMM_WORLD.size}
    results = replay([case], MpiRanks(MPI.COMM_WORLD))
    if MPI.COMM_WORLD.rank == 0:
        assert [result.verdict for result in results] == ["unsupported"]


@pytest.mark.one_rank
def test_values_survive_the_way_there_and_back() -> None:
    for value in (FIVE, np.float16(1.5), np.array(["a", "b"]), np.array([1 + 2j]), {"k": [1, (2.5, None)]}, True):
        assert encode(decode(encode(value))) == encode(value)
