"""`mpistrategy doctor --job`: which rank keeps the others waiting in a job that runs, seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launching
import pytest
from mpi4py import MPI

from mpistrategy.cli.doctor.running_job import all_nodes, last_calls
from mpistrategy.cli.doctor.running_job.hung_job import lines
from mpistrategy.cli.doctor.running_job.last_calls import Arrival, NodeCalls
from mpistrategy.cli.doctor.running_job.node_view import View
from mpistrategy.mpi.watchdog.status_board import RankStatus

DOCTOR = ["-m", "mpistrategy", "doctor"]
one_rank = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts processes: runs in the session on 1 rank")


def seen(rank: int) -> RankStatus:
    text, host = "in no collective: at train.py:3", f"node{1 + rank // 2}"
    return RankStatus(rank, 90 + rank, 3, time.monotonic(), 0.0, 600.0, text, host=host)


SLOW = """
import os, time
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()


def step():
    if strategy.replica_id_in_sync_group == 1:
        work()
    return ms.get_replica_context().all_reduce("SUM", np.array([float(os.path.exists("end"))]))


def work():
    time.sleep(0.01)  # the load that this rank has and the others have not


while not strategy.run(step)[0]:
    pass
"""


@one_rank
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.slow
def test_a_rank_that_comes_late_is_named_before_anything_hangs(tmp_path: Path, nodes: int) -> None:
    """Of one node; and with MPICH of three that this machine pretends to be, each rank alone on one."""
    if nodes > 1 and launching.IS_OPEN_MPI:
        pytest.skip("only MPICH pretends that there are nodes")
    program, number = launching.program(SLOW, tmp_path), f"9{os.getpid()}"
    ranks = [sys.executable, "-m", "mpistrategy", "run", str(program)]
    command = [*launching._mpiexec(), "-n", "3", "env", f"SLURM_JOB_ID={number}", *ranks]
    environment = launching.environment() | {"MPIR_CVAR_NUM_CLIQUES": str(nodes)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    ) as job:
        try:
            late = _ask_until_it_is_told(number, tmp_path, job)
        finally:
            (tmp_path / "end").touch()
            job.wait(30)
    assert [(each["ranks"], each["missing"], each["slow"]) for each in late] == [(3, 0, 1)]
    assert len(late[0]["waits"]["1"]) >= 0.5 * late[0]["calls"], late
    assert sorted(late[0]["waits"]["1"])[-20] >= 0.005, late


def _ask_until_it_is_told(number: str, folder: Path, job: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    command = [sys.executable, *DOCTOR, "--job", number, "--json"]
    end = time.monotonic() + 40
    while time.monotonic() < end and job.poll() is None:
        done = subprocess.run(
            command, cwd=folder, env=launching.environment(), capture_output=True, text=True, timeout=30, check=False
        )
        if "cannot be read" in done.stderr:
            pytest.skip(f"not run: {done.stderr}")
        if done.returncode == 0 and (late := json.loads(done.stdout)["last_calls"]) and late[0]["calls"] == 64:
            return late
    raise AssertionError(done)


def calls_of(ranks: Sequence[int], entered: Sequence[Sequence[int]], of: int = 4) -> NodeCalls:
    """Return the notes of a node whose ranks came to calls 1, 2, ... at these milliseconds."""
    arrivals = {}
    for number, times in enumerate(entered, 1):
        late = max(times)
        last = ranks[times.index(late)]
        summed = sum(late - each for each in times) * 10**6
        arrivals[number] = Arrival(last, late * 10**6, min(times) * 10**6, summed)
    return NodeCalls(7, of, len(ranks), len(entered), arrivals)


def test_who_came_last_on_several_nodes() -> None:
    here = calls_of([0, 1], [(100 * n, 100 * n + 4) for n in range(5)])
    there = calls_of([2, 3], [(100 * n + 2, 100 * n + (40 if n else 3)) for n in range(5)])
    (late,) = last_calls.compare([here, there])
    assert (late.calls, late.missing, late.by_times(), late.slow()) == (5, 0, [3, 1], 3)
    assert list(late.waits[3]) == pytest.approx([(40 + 36 + 38) / 3e3] * 4)
    shown = "\n".join(lines("job", View([seen(3)], [here, there]), "17"))
    assert "rank 3    last in 4 on node2; the others waited 38.0 ms for it (median), at most 38.0 ms; 35%" in shown
    assert "  Rank 3 keeps the others waiting.\n" in shown
    assert "srun --jobid=17 --overlap --nodes=1 --ntasks=1 -w node2 kill -QUIT 93" in shown
    (half,) = last_calls.compare([there])
    assert (half.missing, half.slow()) == (2, None)
    shown = last_calls.lines(half, {0: "node1", 1: "node1", 2: "node2", 3: "node2"})
    assert shown[-1] == "  Whom they all wait for cannot be said without the other 2 ranks."
    assert "too few, or too quick" in "\n".join(last_calls.lines(last_calls.compare([calls_of([0], [(1,)])])[0], {}))


def test_nobody_is_slow_from_one_collective() -> None:
    first = calls_of([0, 1, 2, 3], [(0, 1, 2, 1500)])
    second = calls_of([0, 1, 2, 3], [(0, 1, 2, 1500), (1600, 1601, 1602, 3000)])
    for calls in (first, second):
        (late,) = last_calls.compare([calls])
        assert late.slow() is None
        shown = "\n".join(lines("job", View([seen(rank) for rank in range(4)], [calls])))
        assert "keeps the others waiting" not in shown
        assert "too few, or too quick, to compare" in shown


def test_ranks_that_take_turns_and_waits_that_mean_nothing() -> None:
    here = calls_of([0, 1], [(100 * n, 100 * n + 4) for n in range(8)])
    there = calls_of([2, 3], [(100 * n + (50 if n % 2 else 3), 100 * n + (3 if n % 2 else 50)) for n in range(8)])
    (late,) = last_calls.compare([here, there])
    assert late.slow() is None
    quick = last_calls.Lateness(2, calls=64, seconds=1e-3, waits={0: [1e-5] * 60, 1: [1e-6] * 4})
    assert last_calls.lines(quick, {0: "node1", 1: "node1"})[-1] == "  No rank keeps the others waiting for long."


def test_clocks_that_cannot_be_right_are_corrected() -> None:
    """A rank cannot enter a call before the others have entered the one before it."""
    here = calls_of([0, 1], [(100 * n, 100 * n + 4) for n in range(5)])
    there = calls_of([2, 3], [(100 * n + 5000, 100 * n + 5003) for n in range(5)])
    offset = last_calls.offset_of(here, there)
    (late,) = last_calls.compare([here, there])
    assert -5100 * 10**6 <= offset <= -4900 * 10**6
    assert max(map(max, late.waits.values())) <= 0.1
    assert last_calls.offset_of(here, calls_of([2, 3], [(100 * n + 5, 100 * n + 40) for n in range(5)])) == 0


def test_what_the_nodes_of_a_job_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of several nodes come in any order, mixed with others."""
    printed = []
    for name, ranks in (("node1", [0, 1]), ("node2", [2, 3])):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        calls = calls_of(ranks, [(100 * n, 100 * n + 4) for n in range(200)])
        printed += all_nodes.answer(View([*map(seen, ranks)], [calls]))
    assert len(printed) > 4
    assert max(map(len, printed)) < 1000
    found = all_nodes.read("\n".join(["srun: a warning", *printed[::-1], "mpistrategy-view node3 1/2 AAAA"]))
    assert [each.rank for each in found.seen] == [0, 1, 2, 3]
    assert last_calls.compare(found.calls)[0].calls == last_calls.MOST_CALLS
    (trouble,) = found.troubles
    assert trouble.startswith("node3: its answer cannot be read (")
