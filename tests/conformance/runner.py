"""Replays cases on ranks; rank 0 judges and writes one line of JSON at each start and end.

As a program, on exactly the number of ranks that its cases were recorded with, real or simulated:

    mpiexec -n 2 python -m conformance.runner WORK.json RESULTS.jsonl
    python -m conformance.runner WORK.json RESULTS.jsonl --simulated 2

WORK.json says which cases: {"oracle": directory, "ids": [..]}.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mpistrategy as ms
from mpistrategy.testing import run_replicas

from . import __path__ as package_path
from . import on_device
from .cases import load_cases
from .compare import Difference, short
from .deviations import Rule, find_rule, load_rules
from .environment import Env, kind_of, run_program
from .judge import elsewhere_paths, judge
from .ranks import MpiRanks, Ranks, SimulatedRanks
from .registry import PROGRAMS, Program, UnsupportedProgramError
from .values import Json

MAX_RESYNC = 100


@dataclasses.dataclass(frozen=True)
class Result:
    """The verdict on one case: "passed", "deviations", "superseded", "unsupported" or "failed"."""

    case_id: str
    verdict: str
    rule: str = ""
    details: tuple[str, ...] = ()


def load_programs() -> dict[str, Program]:
    """Import every programs_*.py and return the interpreter functions by name."""
    for module in pkgutil.iter_modules(package_path):
        if module.name.startswith("programs_"):
            importlib.import_module(f"{__package__}.{module.name}")
    return PROGRAMS


def replay(
    cases: list[Json],
    ranks: Ranks,
    *,
    started: Callable[[str], None] = lambda case_id: None,
    ended: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Replay cases on all ranks; every rank must give the same list.

    Args:
        cases: cases whose num_replicas is the number of ranks.
        ranks: who takes part.
        started, ended: called on rank 0 before and after each case.

    Returns:
        the results, on rank 0; an empty list elsewhere.
    """
    programs, rules = load_programs(), load_rules()
    twins = collections.defaultdict(list)
    for case in cases:
        twins[case["id"].partition("@")[0]].append(case)
    results = []
    with on_device.ready():
        for case in cases:
            if on_device.is_left_out(case["id"]):
                continue
            if ranks.rank == 0:
                started(case["id"])
            outcome = replay_one(case, programs.get(case["program"]), ranks)
            outcomes = ranks.gather_json(outcome)
            if ranks.rank == 0:
                others = [twin for twin in twins[case["id"].partition("@")[0]] if kind_of(twin) != kind_of(case)]
                result = verdict(case, programs.get(case["program"]), outcomes, rules, others)
                ended(result)
                results.append(result)
    return results


def replay_one(case: Json, program: Program | None, ranks: Ranks) -> Json:
    """Run one case on this rank; afterwards all ranks stand at the same place again."""
    if program is None:
        return {"status": "unsupported", "note": f"no interpreter function for program {case['program']!r}"}
    env = Env(case, ranks.rank, ranks.strategies)
    # Made first: it chooses this rank's GPU, on which the case makes its arrays.
    strategy = env.strategy if env.n > 1 else None
    try:
        outcome = run_program(env, program.function, case.get("inputs"))
    except UnsupportedProgramError as reason:
        outcome = {"status": "unsupported", "note": str(reason)}
    if ms.has_strategy():
        ms.experimental_set_strategy(None)
        outcome = {"status": "left open", "note": "the case left a scope open"}
    if strategy is not None:
        resynchronise(strategy, case["id"])
    return outcome


def resynchronise(strategy: Any, case_id: str) -> None:
    """Meet all ranks: a rank that still waits in a collective of the case gets a CollectiveMismatchError
    there."""
    for _ in range(MAX_RESYNC):
        try:
            strategy.extended.barrier(name=f"end of {case_id}")
            return
        except ms.errors.CollectiveMismatchError:
            continue
    raise RuntimeError(f"the ranks did not meet again after {case_id}")


# ------------------------------------------------------------------------------------------------ verdicts


def verdict(
    case: Json, program: Program | None, outcomes: list[Json], rules: list[Rule], twins: Sequence[Json] = ()
) -> Result:
    """Judge the ranks' outcomes of one case.

    Args:
        case: the recording.
        program: its interpreter function, or None when there is none.
        outcomes: what our ranks did, in rank order.
        rules: the table of deviations.
        twins: the same case recorded in other environments, with the same number of replicas.  Where a rule says
            that another environment decides, the outcome must be the one recorded there.
    """
    kept = ("unsupported", "left open")
    notes = tuple(f"rank {rank}: {o['note']}" for rank, o in enumerate(outcomes) if o["status"] in kept)
    if program is None or all(outcome["status"] == "unsupported" for outcome in outcomes):
        return Result(case["id"], "unsupported", details=notes)
    if notes:
        return Result(case["id"], "failed", details=notes)
    found = judge(case, program, outcomes)
    if not found:
        return Result(case["id"], "passed")
    rule = find_rule(rules, case, outcomes, found)
    details = tuple(map(_describe, found))
    if rule is None:
        return Result(case["id"], "failed", details=details)
    if rule.kind == "deviation":
        return Result(case["id"], "deviations", rule.name, details)
    if twins and not any(_holds_for(twin, program, outcomes, rules) for twin in twins):
        return Result(case["id"], "failed", rule.name, (*details, "nor is it what the other environment recorded"))
    return Result(case["id"], "superseded", rule.name, details)


def _holds_for(twin: Json, program: Program, outcomes: list[Json], rules: list[Rule]) -> bool:
    """Return whether the outcomes agree with another environment's recording, or deviate from it as allowed."""
    if any(True for outcome in outcomes for _ in elsewhere_paths(outcome.get("observed", {}))):
        return True  # where a value lives is said differently there
    found = judge(twin, program, outcomes)
    rule = find_rule(rules, twin, outcomes, found) if found else None
    return not found or (rule is not None and rule.kind == "deviation")


def _describe(difference: Difference) -> str:
    return f"{difference.path}: expected {short(difference.expected)}, found {short(difference.found)}"


def main() -> None:
    """Replay the work file's cases on COMM_WORLD, or on simulated ranks; append to the results file on rank 0."""
    work, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    wanted = set(work["ids"])
    cases = [case for case in load_cases(Path(work["oracle"])) if case["id"] in wanted]

    def write(line: Json) -> None:
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def replay_all(ranks: Ranks) -> None:
        replay(
            cases,
            ranks,
            started=lambda case_id: write({"started": case_id}),
            ended=lambda result: write({"ended": dataclasses.asdict(result)}),
        )

    if sys.argv[3:4] == ["--simulated"]:
        run_replicas(lambda: replay_all(SimulatedRanks()), int(sys.argv[4]))
        return
    from mpi4py import MPI

    replay_all(MpiRanks(MPI.COMM_WORLD.Dup()))


if __name__ == "__main__":
    main()
