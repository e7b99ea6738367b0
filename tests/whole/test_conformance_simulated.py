"""The recorded cases on simulated ranks: threads of one process give the verdicts that MPI's ranks give."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conformance import launch
from conformance.cases import load_cases
from conformance.environment import kind_of
from conformance.ranks import MpiRanks, SimulatedRanks
from conformance.runner import Result, replay
from mpi4py import MPI

from mpistrategy.testing import run_replicas

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
FEW = 3


def some_of_each_kind() -> list[Any]:
    """At most a few cases of every program in every environment with as many replicas as there are ranks here."""
    seen: Counter[Any] = Counter()
    chosen = []
    for case in load_cases():
        kind = (case["program"], kind_of(case), case.get("cross_device_ops"), case["outcome"].get("status"))
        if case["num_replicas"] == SIZE and seen[kind] < FEW:
            seen[kind] += 1
            chosen.append(case)
    return chosen


@pytest.mark.mpi
def test_simulated_ranks_give_the_same_verdicts() -> None:
    cases = some_of_each_kind()
    if not cases:
        pytest.skip("nothing was recorded with this number of replicas")
    comm = MPI.COMM_WORLD.Dup()
    real = replay(cases, MpiRanks(comm))
    comm.Free()
    if RANK == 0:
        simulated = run_replicas(lambda: replay(cases, SimulatedRanks()), SIZE)

        def verdicts(results: list[Result]) -> dict[str, tuple[str, str]]:
            return {result.case_id: (result.verdict, result.rule) for result in results}

        assert verdicts(simulated[0]) == verdicts(real)
        assert simulated[1:] == [[]] * (SIZE - 1)


def test_a_simulated_replay_starts_no_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if SIZE > 1:
        pytest.skip("runs in the session on 1 rank")
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('a simulated replay needs no MPI')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = launch.parse(["--simulated"])
    ids = [case["id"] for case in load_cases(areas=("merge_call",)) if case["num_replicas"] == 3]
    results = launch.replay_all(ids, 3, options)
    assert {result.verdict for result in results.values()} <= {"passed", "superseded", "deviations"}
    assert sorted(results) == sorted(ids)


def test_a_simulated_replay_that_dies_fails_its_case_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if SIZE > 1:
        pytest.skip("runs in the session on 1 rank")
    (tmp_path / "broken_simulation.py").write_text(
        "import json, os, sys\n"
        "assert sys.argv[3:] == ['--simulated', '3']\n"
        "for case_id in json.load(open(sys.argv[1]))['ids']:\n"
        "    print(json.dumps({'started': case_id}), file=open(sys.argv[2], 'a'), flush=True)\n"
        "    if case_id == 'dies':\n"
        "        os._exit(7)\n"
        "    ended = {'case_id': case_id, 'verdict': 'passed', 'rule': '', 'details': []}\n"
        "    print(json.dumps({'ended': ended}), file=open(sys.argv[2], 'a'), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = launch.replay_all(["a", "dies", "b"], 3, launch.parse(["--simulated"]), module="broken_simulation")
    verdicts = {case_id: result.verdict for case_id, result in results.items()}
    assert verdicts == {"a": "passed", "dies": "failed", "b": "passed"}
    assert "exit status 7" in results["dies"].details[0]
