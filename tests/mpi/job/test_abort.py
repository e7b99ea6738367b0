"""The end of one rank is the end of the job: real jobs, started by ``mpiexec python`` or ``mpistrategy run``."""

from __future__ import annotations

import re
import time
from pathlib import Path

import launching
import pytest

each_mpi = pytest.mark.each_mpi

RUN = ["-m", "mpistrategy", "run"]
PROGRAM = """
import os, signal, sys, threading, time
from mpi4py import MPI

rank, how = MPI.COMM_WORLD.rank, {how!r}


def fail(*given):
    with open(os.environ["WHEN"], "w") as file:
        file.write(repr(time.time()))
{fail}


class Part:
    def state_dict(self):
        return fail() if rank == {bad} else {{}}

    def load_state_dict(self, state):
        pass


if "import" in how and rank == {bad}:
    fail()
import mpistrategy as ms

strategy = ms.MirroredStrategy()
context = ms.get_replica_context
if {first}:
    strategy.reduce("SUM", 1.0)
if "save" in how:
    ms.Checkpoint(part=Part()).save(os.environ["WHEN"] + "-checkpoint")
fail() if rank == {bad} else {wait}
"""
WAITS = {
    "in a library collective": 'strategy.reduce("SUM", 1.0)',
    "in an MPI call of the user's": "MPI.COMM_WORLD.Barrier()",
    "in one more collective, then MPI": 'strategy.barrier("last") or MPI.COMM_WORLD.Barrier()',
    "computing": "time.sleep(30)",
}
# What the bad rank does, the job's status (None: any but 0), what its stderr must hold on that rank.
ENDS: dict[str, tuple[str, int | None, str]] = {
    "ValueError": ('raise ValueError("the reason")', 1, "ValueError: the reason"),
    "ValueError before the import": ('raise ValueError("the reason")', 1, "ValueError: the reason"),
    "ValueError in a save": ('raise ValueError("the reason")', 1, "ValueError: the reason"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    "sys.exit(3)": ("sys.exit(3)", 3, r"sys.exit\(3\) was called here|SystemExit: 3"),
    "sys.exit(3) before the import": ("sys.exit(3)", 3, "SystemExit: 3"),
    "sys.exit(text)": ('sys.exit("the reason")', 1, r"sys.exit\('the reason'\) was called here|SystemExit: the reason"),
    "SystemExit that is written out": ("raise SystemExit(3)", 3, r"sys.exit\(3\) was called here|SystemExit: 3"),
    "exit() in the scope": (
        "with strategy.scope():\n    exit(4)", 4, r"sys.exit\(4\) was called here|SystemExit: 4",
    ),
    "a kept SystemExit": (
        "try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error\n    raise",
        3,
        r"sys.exit\(3\) was called here",
    ),
    "sys.exit(3), a call in its finally block": (
        'try:\n    sys.exit(3)\nfinally:\n    strategy.barrier("last")', 3, r"sys.exit\(3\) was called here",
    ),
    "a thread": (
        'threading.Thread(target=lambda: {}["the reason"], name="worker").start()\ntime.sleep(30)',
        1,
        "KeyError: 'the reason'",
    ),
    "merge_fn": (
        "def merge_fn(given):\n"
        '    raise ValueError("the reason")\n'
        "strategy.run(lambda: context().merge_call(merge_fn))",
        1,
        "ValueError: the reason",
    ),
    "a hook of the user's": (
        'sys.excepthook = lambda *error: print("my own hook", file=sys.stderr)\nraise ValueError("the reason")',
        1,
        "",
    ),
    "a hook before the import": (
        'sys.excepthook = lambda *error: print("my own hook", file=sys.stderr)\nraise ValueError("the reason")',
        1,
        "ValueError: the reason",
    ),
    "is gone before the import": ("os._exit(4)", None, ""),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", None, ""),
}  # fmt: skip
CASES = [
    # how the bad rank ends, how the others wait, whether there was a collective before, which rank is bad, and how the
    # job was started
    ("ValueError", "in a library collective", True, 0, []),
    ("ValueError", "computing", True, 1, RUN),
    ("ValueError before the import", "in an MPI call of the user's", False, 1, RUN),
    ("ValueError in a save", "in an MPI call of the user's", True, 0, RUN),
    ("KeyboardInterrupt", "in an MPI call of the user's", True, 0, []),
    ("KeyboardInterrupt", "computing", True, 1, RUN),
    ("sys.exit(3)", "in a library collective", False, 1, []),
    ("sys.exit(3)", "in an MPI call of the user's", True, 0, []),
    ("sys.exit(3) before the import", "in an MPI call of the user's", False, 0, RUN),
    ("sys.exit(text)", "computing", True, 1, []),
    ("SystemExit that is written out", "in a library collective", True, 1, RUN),
    ("exit() in the scope", "in an MPI call of the user's", True, 1, RUN),
    ("a kept SystemExit", "in an MPI call of the user's", True, 1, []),
    ("sys.exit(3), a call in its finally block", "in one more collective, then MPI", True, 1, []),
    ("a thread", "in a library collective", True, 1, []),
    ("a thread", "in an MPI call of the user's", False, 0, RUN),
    ("merge_fn", "in a library collective", True, 1, []),
    ("a hook of the user's", "in an MPI call of the user's", True, 1, []),
    ("a hook before the import", "in an MPI call of the user's", True, 0, RUN),
    ("is gone before the import", "in an MPI call of the user's", False, 1, RUN),
    ("is killed", "in a library collective", True, 1, RUN),
]


#: How a process ends is the same with each MPI; how its end reaches the others is not.
OF_MPI = ("ValueError", "KeyboardInterrupt", "sys.exit(3)", "a thread", "is gone before the import", "is killed")


@pytest.mark.parametrize(
    ("how", "waiting", "first", "bad", "start"),
    [pytest.param(*case, marks=[each_mpi] * (case[0] in OF_MPI)) for case in CASES],
    ids=[f"{how}, the others {wait}{', by mpistrategy run' * bool(start)}" for how, wait, _, _, start in CASES],
)
def test_one_rank_ends_and_the_job_ends(
    launch: launching.Launch, tmp_path: Path, how: str, waiting: str, first: bool, bad: int, start: list[str]
) -> None:
    code, status, said = ENDS[how]
    fail = "\n".join(f"    {line}" for line in code.split("\n"))
    source = PROGRAM.format(how=how, fail=fail, wait=WAITS[waiting], first=first, bad=bad)
    when = tmp_path / "when"
    job = launch(2, [*start, launching.program(source, tmp_path)], timeout=20, env={"WHEN": str(when)})
    assert when.exists(), f"the job did not come to its end: {job}"
    assert time.time() - float(when.read_text()) < 5, job
    assert job.returncode if status is None else job.returncode == status, job
    assert "my own hook" in job.stdout + job.stderr or "hook of" not in how, job
    if said:
        assert re.search(rf"(?m)^\[rank {bad}/2\] .*({said})", job.stderr), job
        assert f"[rank {bad}/2]   File " in job.stderr, "where it happened"
        assert "mpistrategy/cli/run.py" not in job.stderr, "frames that say nothing to the user"


# What all ranks do, and the job's status; nothing is said.
TOGETHER = {
    "a normal end": ('strategy.reduce("SUM", 1.0)\ntime.sleep(0.5 * rank)', 0),
    "one status": ('strategy.reduce("SUM", 1.0)\nsys.exit(7)', 7),
    "caught, in a thread, or 0": (
        "try:\n    sys.exit(3)\nexcept SystemExit as caught:\n    kept = caught\n"
        "thread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()\nthread.join()\n"
        'assert strategy.reduce("SUM", 1.0) == 2\nsys.exit(0)',
        0,
    ),
    "MPI is over": ("MPI.Finalize()", 0),
}
HEAD = """
import sys, threading, time
from mpi4py import MPI
import mpistrategy as ms

strategy = ms.MirroredStrategy()
rank = strategy.rank
"""


@pytest.mark.parametrize(
    ("how", "start"),
    [
        *(pytest.param(how, [], marks=each_mpi) for how in TOGETHER),
        *((how, RUN) for how in ("one status", "caught, in a thread, or 0")),
    ],
)
def test_all_ranks_end_together(launch: launching.Launch, tmp_path: Path, how: str, start: list[str]) -> None:
    code, status = TOGETHER[how]
    job = launch(2, [*start, launching.program(HEAD + code + "\n", tmp_path)], timeout=20)
    assert job.returncode == status, job
    if status == 0:
        assert job.stderr.strip() == "", job
    assert not re.search("Traceback|the whole job ends", job.stderr), job  # a launcher may say that ranks failed


def run(launch: launching.Launch, body: str, ranks: int = 2) -> launching.Finished:
    lines = body.strip("\n").split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    return launch(ranks, HEAD + "\n".join(line[indent:] for line in lines) + "\n", timeout=20)


INTERRUPTED = """
import mpistrategy as ms

strategy = ms.MirroredStrategy()
guard = strategy.extended.communicator.guard
if strategy.rank == 1:
    def interrupt(*given):
        raise KeyboardInterrupt

    guard._channel.all_equal = interrupt  # as a signal while it waits for the others
    try:
        strategy.barrier()
    except KeyboardInterrupt:
        print("caught", flush=True)
strategy.barrier()
"""


@each_mpi
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_rank_that_was_interrupted_in_a_call_ends_the_job(launch: launching.Launch, nodes: str) -> None:
    """The others wait for it there, whether its program catches that or not."""
    job = launch(2, INTERRUPTED, env={"MPIR_CVAR_NUM_CLIQUES": nodes}, timeout=20)
    assert job.returncode == 130, job
    assert "[rank 1/2] KeyboardInterrupt" in job.stderr, job
    assert "caught" not in job.stdout, job


LEFT = "left: its program has ended"


@pytest.mark.parametrize("leavers", [pytest.param({1}, marks=each_mpi), {1, 2}, {0, 3}], ids=str)
def test_those_who_left_are_told_apart_from_those_who_differ(launch: launching.Launch, leavers: set[int]) -> None:
    """Every rank that stays hears of all that left, again and again, and of the calls of the others."""
    body = f"""
        for time in range(2 * (rank not in {leavers})):
            try:
                strategy.extended.barrier() if rank == {min({0, 1, 2, 3} - leavers)} else strategy.reduce("SUM", 1.0)
            except ms.errors.CollectiveMismatchError as error:
                text = str(error).replace(chr(10), " | ")
                sys.stdout.write(f"{{rank}}: {{text}}\\n")
    """
    job = run(launch, body, 4).check()
    reports = [launching.a_row_a_rank(report) for report in job.stdout.splitlines()]
    stay = sorted({0, 1, 2, 3} - leavers)
    assert sorted(int(report[0]) for report in reports) == sorted(2 * stay), job
    named = f"rank{'s' * (len(leavers) > 1)} {', '.join(map(str, sorted(leavers)))} left; they differ in: collective"
    for report in reports:
        assert named in report, job
        assert {rank for rank in range(4) if f"|   rank {rank} {LEFT} |" in report} == leavers, job
        for rank in stay:
            assert re.search(rf"rank {rank}: call=(barrier|Strategy\.reduce)  .* at \S+\.py:\d+ ", report), job


@each_mpi
def test_a_group_of_ranks_that_fails_ends_the_other_groups_too(launch: launching.Launch) -> None:
    body = """
        half = MPI.COMM_WORLD.Split(rank % 2, rank)
        group = ms.MirroredStrategy(communicator=half)
        if rank == 3:
            raise ValueError("the reason")
        group.reduce("SUM", 1.0)
        MPI.COMM_WORLD.Barrier()
    """
    job = run(launch, body, 4)
    assert job.returncode == 1, job
    assert "[rank 3/4] ValueError: the reason" in job.stderr
    assert job.seconds < 20


def test_on_one_rank_exceptions_are_pythons_own(launch: launching.Launch) -> None:
    job = run(launch, 'raise ValueError("the reason")', 1)
    assert job.returncode == 1
    assert job.stderr.startswith("Traceback"), job


# ---------------------------------------------------------------------------- an error of all ranks is printed once

ONE_REPORT = """
import sys
import numpy as np
import mpistrategy as ms

how = sys.argv[1]
strategy = ms.MirroredStrategy()
rank = strategy.rank
with strategy.scope():
    variable = ms.Variable(np.zeros(2), name="weights")
if how == "calls that differ":
    strategy.barrier("other") if rank == 2 else strategy.barrier("one")
if how == "the same mistake":
    strategy.reduce("SUM", "no number")
if how == "no such file":
    ms.Checkpoint(variable=variable).restore("none")
if how == "caught on rank 0":
    try:
        strategy.reduce("SUM", "no number")
    except ms.errors.DTypeError:
        if rank:
            raise
    strategy.barrier("on")
"""
#: What is done, and which ranks print a traceback.
WHOLE = {
    "calls that differ": "0",
    "the same mistake": "0",
    "no such file": "0",
    "caught on rank 0": "[12]+",
}


@pytest.mark.parametrize("how", WHOLE)
def test_an_error_of_all_ranks_is_printed_once(launch: launching.Launch, tmp_path: Path, how: str) -> None:
    run = ["-m", "mpistrategy", "run"] if how == "calls that differ" else []
    job = launch(3, [*run, launching.program(ONE_REPORT, tmp_path), how], timeout=40)
    assert job.returncode == 1, job
    printed = sorted(re.findall(r"\[rank (\d)/3\] Traceback", job.stderr))
    assert re.fullmatch(WHOLE[how], "".join(printed)), job
    for rank in {"0", "1", "2"} - {*printed}:
        lines = [line for line in job.stderr.splitlines() if line.startswith(f"[rank {rank}/3]")]
        assert len(lines) <= 1, job
        assert all("which another rank prints whole" in line for line in lines), job
