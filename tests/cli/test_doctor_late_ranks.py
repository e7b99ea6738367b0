"""`mpistrategy doctor --job`: which rank keeps the others waiting in a job that runs, seen from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import launching
import pytest
from mpi4py import MPI

from mpistrategy.cli.doctor import last_calls, node_view, running_job
from mpistrategy.cli.doctor.last_calls import Lateness, NodeCalls
from mpistrategy.cli.doctor.node_view import View
from mpistrategy.cli.doctor.running_job import lines
from mpistrategy.mpi.watchdog.status_board import RankStatus

one_rank = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts processes: runs in the session on 1 rank")


def seen(rank: int) -> RankStatus:
    text, host = "in no collective: at train.py:3", f"node{1 + rank // 2}"
    return RankStatus(rank, 90 + rank, 3, time.monotonic(), 0.0, 600.0, text, host=host)


SLOW = """
import os, time
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()
with open(f"{strategy.replica_id_in_sync_group}.pid", "w") as file:
    file.write(str(os.getpid()))


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
    program = launching.program(SLOW, tmp_path)
    command = [*launching._mpiexec(), "-n", "3", sys.executable, "-m", "mpistrategy", "run", str(program)]
    environment = launching.environment() | {"MPIR_CVAR_NUM_CLIQUES": str(nodes)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    ) as job:
        try:
            (late,) = _looked_at_until_it_is_told(tmp_path, job)
        finally:
            (tmp_path / "end").touch()
            job.wait(30)
    assert (late.ranks, late.missing, late.slow()) == (3, 0, 1)
    assert len(late.waits[1]) >= 0.5 * len(late.numbers), late
    assert sorted(late.waits[1])[-20] >= 0.005, late


def _looked_at_until_it_is_told(folder: Path, job: subprocess.Popen[bytes]) -> list[Lateness]:
    end = time.monotonic() + 40
    while time.monotonic() < end and job.poll() is None:
        processes = [int(text) for path in folder.glob("*.pid") if (text := path.read_text())]
        view = node_view.of_processes(processes)
        if any("cannot be read" in trouble for trouble in view.troubles):
            pytest.skip(f"not run: {view.troubles}")
        late = last_calls.compare(view.calls)
        if len(processes) == 3 and late and len(late[0].numbers) == last_calls.MOST_CALLS:
            return late
    raise AssertionError("nothing is told")


def calls_of(ranks: Sequence[int], entered: Sequence[Sequence[int]], of: int = 4) -> NodeCalls:
    """Return the notes of a node whose ranks came to calls 1, 2, ... at these milliseconds."""
    arrivals = {}
    for number, times in enumerate(entered, 1):
        late = max(times)
        arrivals[number] = (late / 1e3, ranks[times.index(late)], min(times) / 1e3)
    return NodeCalls(7, of, len(ranks), arrivals)


def test_who_came_last_on_several_nodes() -> None:
    here = calls_of([0, 1], [(100 * n, 100 * n + 4) for n in range(5)])
    there = calls_of([2, 3], [(100 * n + 2, 100 * n + (40 if n else 3)) for n in range(5)])
    (late,) = last_calls.compare([here, there])
    assert (len(late.numbers), late.missing, list(late.waits), late.slow()) == (5, 0, [3, 1], 3)
    assert list(late.waits[3]) == pytest.approx([40 / 1e3] * 4)
    shown = "\n".join(lines("job", View([seen(3)], [here, there]), "17"))
    assert "rank 3    last in 4 on node2; the first waited 40 ms for it (median), at most 40 ms; 36% of" in shown
    assert "  Rank 3 keeps the others waiting.\n" in shown
    assert "srun --jobid=17 --overlap --nodes=1 --ntasks=1 -w node2 kill -QUIT 93" in shown
    (half,) = last_calls.compare([there])
    assert (half.missing, half.slow()) == (2, None)
    shown = last_calls.lines(half, {0: "node1", 1: "node1", 2: "node2", 3: "node2"})
    assert shown[-1] == "  Whom they all wait for cannot be said without the other 2 ranks."
    assert "too few, or too quick" in "\n".join(last_calls.lines(last_calls.compare([calls_of([0], [(1,)])])[0], {}))


#: Of calls 1, 2, ..., the milliseconds at which ranks came to them.
NOBODY_IS_SLOW: dict[str, list[NodeCalls]] = {
    "one call": [calls_of([0, 1, 2, 3], [(0, 1, 2, 1500)])],
    "two calls": [calls_of([0, 1, 2, 3], [(0, 1, 2, 1500), (1600, 1601, 1602, 3000)])],
    "in turns": [
        calls_of([0, 1], [(100 * n, 100 * n + 4) for n in range(8)]),
        calls_of([2, 3], [(100 * n + (50 if n % 2 else 3), 100 * n + (3 if n % 2 else 50)) for n in range(8)]),
    ],
}


@pytest.mark.parametrize("what", NOBODY_IS_SLOW)
def test_nobody_is_slow(what: str) -> None:
    calls = NOBODY_IS_SLOW[what]
    (late,) = last_calls.compare(calls)
    assert late.slow() is None
    shown = "\n".join(lines("job", View([seen(rank) for rank in range(4)], calls)))
    assert "keeps the others waiting.\n" not in shown
    assert ("too few, or too quick, to compare" in shown) == (what != "in turns")
    quick = Lateness(2, 0, range(64), 1e-3, {0: [1e-5] * 60, 1: [1e-6] * 4})
    assert last_calls.lines(quick, {0: "node1", 1: "node1"})[-1] == "  No rank keeps the others waiting for long."


def test_what_the_nodes_of_a_job_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of several nodes come in any order, mixed with others."""
    printed = []
    for name, ranks in (("node1", [0, 1]), ("node2", [2, 3])):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        calls = calls_of(ranks, [(100 * n, 100 * n + 4) for n in range(200)])
        printed += running_job.answer(View([*map(seen, ranks)], [calls]))
    assert len(printed) > 4
    assert max(map(len, printed)) < 1000
    found = running_job.read("\n".join(["srun: a warning", *printed[::-1], "mpistrategy-view node3 1/2 AAAA"]))
    assert [each.rank for each in found.statuses] == [0, 1, 2, 3]
    assert len(last_calls.compare(found.calls)[0].numbers) == last_calls.MOST_CALLS
    (trouble,) = found.troubles
    assert trouble.startswith("node3: its answer cannot be read (")
