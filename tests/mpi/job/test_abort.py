"""The end of one rank is the end of the job: real jobs, started by plain ``mpiexec python program.py``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

Launch = Callable[..., launching.Finished]

PROGRAM = """
import os, sys, threading, time
import numpy as np
from mpi4py import MPI
import mpistrategy as ms

strategy = ms.MirroredStrategy()
world = MPI.COMM_WORLD
context = ms.get_replica_context
rank, size = world.rank, world.size


def fail():
    with open(os.environ["WHEN"], "w") as file:
        file.write(repr(time.time()))
{fail}


def wait():
    {wait}


if {first}:
    strategy.reduce("SUM", 1.0)
fail() if rank == {bad} else wait()
"""
WAITS = {
    "in a library collective": 'strategy.reduce("SUM", 1.0)',
    "in an MPI call of the user's": "world.Barrier()",
    "computing": "time.sleep(30)",
}
# What the bad rank does, the job's status (None: any but 0), what its stderr must hold.
ENDS: dict[str, tuple[str, int | None, str]] = {
    "ValueError": ('raise ValueError("the reason")', 1, "ValueError: the reason"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    "sys.exit(3)": ("sys.exit(3)", 3, "sys.exit(3) was called here"),
    "sys.exit(text)": ('sys.exit("the reason")', 1, "sys.exit('the reason') was called here"),
    "exit() in the scope": ("with strategy.scope():\n    exit(4)", 4, "sys.exit(4) was called here"),
    "a thread": (
        'threading.Thread(target=lambda: {}["the reason"], name="worker").start()\nwait()',
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
        "my own hook",
    ),
    "a kept SystemExit": (
        "try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error\n    raise",
        3,
        "sys.exit(3) was called here",
    ),
}
CASES = [
    # how the bad rank ends, how the others wait, whether there was a collective before, which rank is bad
    ("ValueError", "in a library collective", True, 0),
    ("ValueError", "in an MPI call of the user's", False, 2),
    ("ValueError", "computing", True, 2),
    ("KeyboardInterrupt", "in an MPI call of the user's", True, 0),
    ("sys.exit(3)", "in a library collective", False, 2),
    ("sys.exit(3)", "in an MPI call of the user's", True, 0),
    ("sys.exit(text)", "computing", True, 2),
    ("exit() in the scope", "in an MPI call of the user's", True, 2),
    ("a thread", "in a library collective", True, 2),
    ("a thread", "in an MPI call of the user's", False, 0),
    ("merge_fn", "in a library collective", True, 2),
    ("a hook of the user's", "in an MPI call of the user's", True, 2),
    ("a kept SystemExit", "in an MPI call of the user's", True, 2),
]


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("how", "waiting", "first", "bad"), CASES, ids=[f"{how}, the others {wait}" for how, wait, *_ in CASES]
)
def test_one_rank_ends_and_the_job_ends(
    launch: Launch, tmp_path: Path, how: str, waiting: str, first: bool, bad: int
) -> None:
    code, status, said = ENDS[how]
    wait = WAITS[waiting]
    source = PROGRAM.format(fail="\n".join(f"    {line}" for line in code.split("\n")), wait=wait, first=first, bad=bad)
    when = tmp_path / "when"
    job = launch(3, source, timeout=20, env={"WHEN": str(when)})
    assert when.exists(), f"the job did not come to its end: {job}"
    seconds = time.time() - float(when.read_text())

    assert seconds < 5, job
    assert job.returncode if status is None else job.returncode == status, job
    assert said in job.stderr, job
    if said and "hook" not in how:
        line = next(line for line in job.stderr.splitlines() if said in line)
        assert re.match(rf"\[rank {bad}/3\] ", line), job
        assert f"[rank {bad}/3]   File " in job.stderr, "where it happened"


def run(launch: Launch, body: str, ranks: int = 2) -> launching.Finished:
    head = "import sys, threading, time\nfrom mpi4py import MPI\nimport mpistrategy as ms\n"
    head += "strategy = ms.MirroredStrategy()\nrank = strategy.extended.communicator.rank\n"
    lines = body.strip("\n").split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    return launch(ranks, head + "\n".join(line[indent:] for line in lines) + "\n", timeout=20)


@pytest.mark.each_mpi
def test_a_normal_end_is_status_0_and_says_nothing(launch: Launch) -> None:
    """Also when the ranks end at different times, after different collectives of MPI's own."""
    body = """
        strategy.reduce("SUM", 1.0)
        time.sleep(0.5 * rank)
        print("bye", flush=True)
    """
    job = run(launch, body, 3).check()
    assert job.stdout.count("bye") == 3
    assert job.stderr.strip() == ""


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


@pytest.mark.each_mpi
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_rank_that_was_interrupted_in_a_call_ends_the_job(launch: Launch, nodes: str) -> None:
    """The others wait for it there, whether its program catches that or not."""
    job = launch(2, INTERRUPTED, env={"MPIR_CVAR_NUM_CLIQUES": nodes}, timeout=20)
    assert job.returncode == 130, job
    assert "[rank 1/2] KeyboardInterrupt" in job.stderr, job
    assert "caught" not in job.stdout, job


@pytest.mark.each_mpi
def test_all_ranks_exit_together_with_their_status(launch: Launch) -> None:
    job = run(launch, 'strategy.reduce("SUM", 1.0)\nsys.exit(7)')
    assert job.returncode == 7, job
    assert "the whole job ends" not in job.stderr


@pytest.mark.each_mpi
def test_exits_that_end_nothing(launch: Launch) -> None:
    """Caught, in a thread, or with status 0."""
    body = """
        try:
            sys.exit(3)
        except SystemExit as caught:
            assert caught.code == 3
            kept = caught
        thread = threading.Thread(target=sys.exit, args=(3,))
        thread.start()
        thread.join()
        assert strategy.reduce("SUM", 1.0) == 2
        sys.exit(0)
    """
    assert run(launch, body).check().stderr.strip() == ""


LEFT = "left: its program has ended"


@pytest.mark.each_mpi
@pytest.mark.parametrize("end", ["sys.exit(0)", "raise SystemExit", "pass"])
def test_a_rank_that_is_done_is_named_to_those_who_still_call_it(launch: Launch, end: str) -> None:
    body = f"""
        if rank == 0:
            {end}
        else:
            try:
                strategy.reduce("SUM", 1.0)
            except ms.errors.CollectiveMismatchError as error:
                print(error, flush=True)
    """
    job = run(launch, body).check()
    assert f"  rank 0 {LEFT}\n" in job.stdout, job
    assert re.search(r"rank 1: call=Strategy\.reduce  at .*program_\w+\.py:\d+", job.stdout), job


@pytest.mark.each_mpi
@pytest.mark.parametrize("leavers", [{1, 2}, {0, 3}, {1}], ids=str)
@pytest.mark.slow
def test_those_who_left_are_told_apart_from_those_who_differ(launch: Launch, leavers: set[int]) -> None:
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


@pytest.mark.each_mpi
@pytest.mark.parametrize("waiting", ["in a library collective", "in an all-reduce"])
def test_a_rank_that_left_ends_those_who_do_not_catch_it(launch: Launch, waiting: str) -> None:
    call = WAITS.get(waiting, 'strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1.0))')
    job = run(launch, f"sys.exit(0) if rank == 1 else {call}", 3)
    assert job.returncode == 1, job
    assert job.seconds < 10, job
    assert re.search(rf"\[rank [02]/3\]   rank 1 {LEFT}", job.stderr), job


@pytest.mark.each_mpi
def test_a_group_of_ranks_that_fails_ends_the_other_groups_too(launch: Launch) -> None:
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


def test_on_one_rank_exceptions_and_exits_are_pythons_own(launch: Launch) -> None:
    job = run(launch, 'raise ValueError("the reason")', 1)
    assert job.returncode == 1
    assert job.stderr.startswith("Traceback"), job
    assert run(launch, "sys.exit(3)", 1).returncode == 3


def test_a_hook_that_was_there_before_is_called_too(launch: Launch) -> None:
    source = """
        import sys
        sys.excepthook = lambda kind, *rest: print("logged", kind.__name__, file=sys.stderr, flush=True)
        import mpistrategy as ms
        strategy = ms.MirroredStrategy()
        if strategy.extended.communicator.rank == 1:
            raise ValueError("the reason")
        strategy.reduce("SUM", 1.0)
    """
    job = launch(2, source, timeout=20)
    assert job.returncode == 1
    assert "logged ValueError" in job.stderr, job
    assert "[rank 1/2] ValueError: the reason" in job.stderr, job
