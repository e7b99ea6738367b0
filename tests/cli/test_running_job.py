"""`mpistrategy doctor --job` and `--pid`: a job that runs or hangs, seen from outside."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import launching
import pytest

from mpistrategy.cli import main
from mpistrategy.cli.doctor import running_job
from mpistrategy.cli.doctor.node_view import NodeCalls, View
from mpistrategy.cli.doctor.running_job import Lateness, hangs, lines
from mpistrategy.mpi.watchdog.status_board import RankStatus

pytestmark = pytest.mark.one_rank

HANGING = """
import os, signal
import mpistrategy as ms

strategy = ms.MirroredStrategy()


def shuffle():
    open("stuck", "w").write(str(os.getpid()))
    signal.pause()


if strategy.replica_id_in_sync_group == 1:
    shuffle()
strategy.reduce("SUM", [1.0, 2.0, 3.0])
"""


@pytest.mark.slow
def test_a_job_that_hangs_is_read_from_outside(tmp_path: Path) -> None:
    """By a process of this node; test_slurm_jobs.py does it by Slurm, and looks at more of the report."""
    stuck, environment = tmp_path / "stuck", launching.environment()
    run = [sys.executable, "-m", "mpistrategy", "run", str(launching.program(HANGING, tmp_path))]
    with subprocess.Popen(
        [*launching._mpiexec(), "-n", "3", *run],
        cwd=tmp_path,
        env=environment | {launching.JOB_MARK: str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as job:
        try:
            end = time.monotonic() + 60
            while not (stuck.exists() and stuck.read_text()):
                assert time.monotonic() < end, "the job does not start"
                time.sleep(0.1)
            doctor = [sys.executable, "-m", "mpistrategy", "doctor", "--pid", stuck.read_text()]
            while True:
                done = subprocess.run(doctor, env=environment, capture_output=True, text=True, timeout=30, check=False)
                if done.returncode == 1 or "cannot be read" in done.stderr:
                    break
                assert time.monotonic() < end, f"the job does not hang: {done}"
        finally:
            launching._kill(job, str(tmp_path))
    if "cannot be read" in done.stderr:
        pytest.skip(f"not run: {done.stderr}")
    assert re.search(r"rank 1 +in no collective: at \S+ in shuffle", done.stdout), done
    assert len(re.findall(r"rank [02] +in #\d+ Strategy.reduce SUM", done.stdout)) == 2, done
    assert "2 of 3 ranks wait; not come: rank 1." in done.stdout, done
    assert f"kill -QUIT {stuck.read_text()}" in done.stdout, done


# ------------------------------------------------------------------------------------------------ made-up ranks


def seen(rank: int, age: float = 1.0, **others: Any) -> RankStatus:
    told = {"process": 70, "signal": 0, "waited": 30.0, "limit": 600.0, "text": f"in #7 at x.py:{rank}", **others}
    return RankStatus(rank, beat=time.monotonic() - age, **told)


def told(ranks: list[RankStatus], job: str = "", calls: Sequence[NodeCalls] = ()) -> list[str]:
    """Return what the doctor prints of a job whose title is "job 17"."""
    return lines("job 17", View(ranks, [*calls], []), job)


def test_the_report_of_a_hung_job() -> None:
    stuck = seen(1, waited=0.0, text="in no collective: at data.py:3", process=71, signal=3, host="node2")
    ranks = [seen(0, host="node1"), stuck, seen(2, host="node2")]
    shown = told(ranks, job="17")
    assert shown[0] == "job 17: 3 ranks heard of, in the memory that its ranks share on 2 nodes"
    assert shown[2] == "  rank 1    in no collective: at data.py:3"
    assert shown[4:6] == ["2 of 3 ranks wait; not come: rank 1.", shown[5]]
    assert shown[6] == "     srun --jobid=17 --overlap --nodes=1 --ntasks=1 -w node2 kill -QUIT 71"
    assert re.search(r" 56[89] s from now", shown[7])
    assert told(ranks)[6] == "     ssh node2 kill -QUIT 71"
    assert told([replace(each, host=os.uname().nodename) for each in ranks])[6] == "     kill -QUIT 71"
    assert hangs(ranks)
    assert not hangs([seen(0, waited=0.2, age=0.5), seen(1, waited=0.0)])
    assert "All 2 ranks wait" in "\n".join(told([seen(0), seen(1)]))
    silent = told([seen(0), seen(1, silent="its process 7 is stopped (SIGSTOP, SIGTSTP)")])
    assert "does not answer: its process 7 is stopped" in silent[2]
    assert silent[3] == "1 of 2 ranks wait; no answer: rank 1."
    shown = told([seen(0), seen(2)], calls=[NodeCalls(7, 3, 2, [])])
    assert shown[5] == "Of these ranks alone: 1 rank of the job are on nodes that were not looked at."
    many = told([seen(rank, waited=30.0 * (rank != 99)) for rank in range(100)])
    assert many[1].startswith("  rank 99 ")
    assert "  and 36 more" in many


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--job", "999999"], "job 999999: not seen: squeue"),
        (["--job", "999999"], "its roll call is mpistrategy-run-999999-*/roll-call.txt"),
        (["--pid", "1"], "the job of process 1: not seen: its processes here have no strategy"),
    ],
)
def test_jobs_of_which_nothing_is_known(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", *arguments]) == 2
    assert told in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ who comes late


def calls_of(ranks: Sequence[int], entered: Sequence[Sequence[int]], of: int = 4) -> NodeCalls:
    """Return the notes of a node whose ranks came to calls 1, 2, ... at these milliseconds."""
    arrivals = [
        (number, max(times) / 1e3, ranks[times.index(max(times))], min(times) / 1e3)
        for number, times in enumerate(entered, 1)
    ]
    return NodeCalls(7, of, len(ranks), arrivals)


def working(rank: int) -> RankStatus:
    return seen(rank, 0.0, process=90 + rank, signal=3, waited=0.0, text="works", host=f"node{1 + rank // 2}")


def test_who_came_last_on_several_nodes() -> None:
    here = calls_of([0, 1], [(100 * n, 100 * n + 4) for n in range(5)])
    there = calls_of([2, 3], [(100 * n + 2, 100 * n + (40 if n else 3)) for n in range(5)])
    (late,) = running_job.compare([here, there])
    assert (len(late.numbers), late.missing, list(late.waits), late.slow()) == (5, 0, [3, 1], 3)
    assert list(late.waits[3]) == pytest.approx([40 / 1e3] * 4)
    shown = "\n".join(told([working(3)], "17", [here, there]))
    assert "rank 3    last in 4 on node2; the first waited 40 ms for it (median), at most 40 ms; 36% of" in shown
    assert "  Rank 3 keeps the others waiting.\n" in shown
    assert "srun --jobid=17 --overlap --nodes=1 --ntasks=1 -w node2 kill -QUIT 93" in shown
    (half,) = running_job.compare([there])
    assert (half.missing, half.slow()) == (2, None)
    assert running_job.lines_about(half, {})[-1] == "  Whom they all wait for cannot be said without the other 2 ranks."


#: Of calls 1, 2, ..., the milliseconds at which ranks came to them.
NOBODY_IS_SLOW: dict[str, list[NodeCalls]] = {
    "too few, or too quick, to compare": [calls_of([0, 1, 2, 3], [(0, 1, 2, 1500), (1600, 1601, 1602, 3000)])],
    "No rank keeps the others waiting for long": [
        calls_of([0, 1], [(100 * n, 100 * n + 4) for n in range(8)]),
        calls_of([2, 3], [(100 * n + (50 if n % 2 else 3), 100 * n + (3 if n % 2 else 50)) for n in range(8)]),
    ],
}


@pytest.mark.parametrize("words", NOBODY_IS_SLOW)
def test_nobody_is_slow(words: str) -> None:
    (late,) = running_job.compare(NOBODY_IS_SLOW[words])
    assert late.slow() is None
    shown = "\n".join(told([working(rank) for rank in range(4)], calls=NOBODY_IS_SLOW[words]))
    assert words in shown
    assert shown.endswith("No rank has waited for long: nothing hangs.")
    short, seldom = {0: [1e-5] * 60, 1: [1e-6] * 4}, {0: [1e-3] * 60, 1: [1e-6] * 4}
    assert Lateness(2, 0, range(64), 1e-3, short).slow() is None
    assert Lateness(2, 0, range(64), 1e3, seldom).slow() is None


def test_what_the_nodes_of_a_job_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of several nodes come in any order, mixed with others."""
    answers = []
    for name, ranks in (("node1", [0, 1]), ("node2", [2, 3])):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        calls = calls_of(ranks, [(100 * n, 100 * n + 4) for n in range(200)])
        answers.append(running_job.answer(View([working(rank) for rank in ranks], [calls], [])))
    printed = [line for lines in itertools.zip_longest(*answers, fillvalue="") for line in lines]
    assert len(printed) > 4
    assert max(map(len, printed)) < 1000
    lost = ["srun: a warning", "mpistrategy-view node3 AAAA"]
    found = running_job.read("\n".join([*lost, *printed]))
    assert [status.rank for status in found.statuses] == [0, 1, 2, 3]
    assert found.statuses[3].host == "node2"
    assert len(running_job.compare(found.calls)[0].numbers) == running_job.MOST_CALLS
    (trouble,) = found.troubles
    assert trouble.startswith("node3: its answer cannot be read (")
