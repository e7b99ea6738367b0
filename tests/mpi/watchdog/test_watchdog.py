"""A collective that is late ends the job: who waits where, who has not come, status 124; and nothing else does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import launching
import pytest

RUN = ["-m", "mpistrategy", "run"]
TIMEOUT = 4  # on a busy machine ranks start a second or two apart
#: What detection may take beyond the timeout, in seconds.
ALLOWED = 10

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI

what, rank = sys.argv[1], MPI.COMM_WORLD.rank


def work_for_ever():
    while True:
        pass


def hold_the_interpreter():
    sum(range(10**13))


def odd():
    with open("odd", "w") as file:
        file.write(repr(time.time()))
    if what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "loop":
        work_for_ever()
    elif what == "holding":
        hold_the_interpreter()
    elif what == "thread":
        threading.Event().wait()
    elif what == "other MPI":
        MPI.COMM_WORLD.Barrier()


if what == "making" and rank == 1:
    odd()
    work_for_ever()

import mpistrategy as ms

strategy = ms.MirroredStrategy()


def step(value):
    return ms.get_replica_context().all_reduce("SUM", value)


for _ in range(5):
    strategy.run(step, (np.ones(3),))
print(f"rank {rank} is half way", flush=True)
if rank == 1:
    odd()
if what == "gather":
    strategy.gather(np.ones(rank), 0)
strategy.run(step, (np.ones(3),))
"""

WAITS = r"rank {}: waits in #\d+ {} for \d+\.\d s; at \S+\.py:{} in "
STEP = r"ReplicaContext\.all_reduce SUM float64\[3\] \(24 B\)"
LINE = str(1 + PROGRAM[: PROGRAM.index('.all_reduce("SUM"')].count("\n"))
#: What each odd rank does; how it is started; what the roll call says of it.  Ranks that loop are each on its own node.
CASES: dict[str, tuple[list[str], str]] = {
    "stopped": ([], r"rank 1: does not answer: its process \d+ is stopped .*its last was #6 \S+all_reduce"),
    "loop": ([], r"rank 1: has not come, is in no collective: at \S+ in work_for_ever; its last was #6 \S+all_reduce"),
    "holding": (
        RUN,
        r"rank 1: does not answer: its process \d+ runs, but code in it does not let other Python threads run; "
        r"its last was #6 \S+all_reduce",
    ),
    "thread": ([], r"rank 1: has not come, is in no collective: at \S+ in odd; its last was #6 \S+all_reduce"),
    "other MPI": ([], r"rank 1: has not come, is in no collective: at \S+ in odd; its last was #6 \S+all_reduce"),
}


def nodes_of(what: str) -> int:
    return 3 if what == "loop" and not launching.IS_OPEN_MPI else 1


@pytest.mark.slow
@pytest.mark.parametrize("what", [pytest.param("stopped", marks=pytest.mark.each_mpi), *[*CASES][1:]])
def test_a_late_collective_ends_the_job_and_says_why(launch: launching.Launch, tmp_path: Path, what: str) -> None:
    start, who = CASES[what]
    environment = {"MPISTRATEGY_TIMEOUT_SECONDS": str(TIMEOUT), "MPIR_CVAR_NUM_CLIQUES": str(nodes_of(what))}
    job = launch(3, [*start, launching.program(PROGRAM, tmp_path), what], env=environment)
    assert job.returncode == 124, job
    assert job.stderr.count("roll call: a collective is late") == 1, job
    assert re.search(who, job.stderr), job
    no_answer = what in ("stopped", "holding")
    assert f"2 of 3 ranks wait; {'no answer' if no_answer else 'not come'}: rank 1." in job.stderr, job
    assert what != "holding" or re.search(r"line \d+ in hold_the_interpreter", job.stderr), job
    for rank in (0, 2):
        assert re.search(WAITS.format(rank, STEP, LINE), job.stderr), job
    assert job.stdout.count("is half way") == 3, "what the program had printed is lost"

    (records,) = tmp_path.glob("mpistrategy-run-*")
    called = (records / "roll-call.txt").stat().st_mtime - float((tmp_path / "odd").read_text())
    assert called < TIMEOUT + ALLOWED
    reports = {path.name: json.loads(path.read_text()) for path in records.glob("error-*.json")}
    assert sorted(reports) == [f"error-{node}.json" for node in range(nodes_of(what))]
    assert len([*records.iterdir()]) == 1 + len(reports), "at most one file a node, and the roll call"
    (told,) = (report for report in reports.values() if report["text"])
    assert told["text"] == (records / "roll-call.txt").read_text(), told
    assert ([*told["ranks"]], told["missing"], told["unknown"]) == (["0", "1", "2"], [1], [])
    for rank, status in told["ranks"].items():
        assert bool(status["silent"]) == (rank == "1" and no_answer), told
        assert status["waited_seconds"] > 0 or rank == "1", told  # its last word may be of the call before
    texts = {rank: "\n".join(record) for report in reports.values() for rank, record in report["records"].items()}
    assert [*sorted(texts)] == ["0", "1", "2"]
    for rank, record in texts.items():
        assert ("thread MainThread (most recent call last):" in record) != (rank == "1" and no_answer)
        assert len(re.findall(STEP + r" at program_\w+\.py:\d+", record)) >= 5, record


def test_ranks_that_wait_in_the_constructor_say_so(launch: launching.Launch, tmp_path: Path) -> None:
    environment = {"MPISTRATEGY_TIMEOUT_SECONDS": str(TIMEOUT)}
    job = launch(2, [*RUN, launching.program(PROGRAM, tmp_path), "making"], env=environment)
    assert job.returncode == 124, job
    assert re.search(r"rank 0: waits in #1 MirroredStrategy for .*; at \S+:\d+ in <module>", job.stderr), job
    assert "nothing is known of rank 1" in job.stderr, job


BEFORE_AND_AFTER = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpistrategy as ms
from mpistrategy.arrays.devices import Device
from mpistrategy.mpi.gpu import device_selection
from mpistrategy.mpi.over_mpi.ranks import MpiRanks
from mpistrategy.mpi.over_mpi.background import Background

what, rank = sys.argv[1], MPI.COMM_WORLD.rank


def stopping(function):
    def stopped(*arguments):
        os.kill(os.getpid(), signal.SIGSTOP)
        return function(*arguments)

    return stopped if rank == 1 else function


if what == "making":
    device_selection.look = stopping(device_selection.look)
    ms.MirroredStrategy("auto")  # with CPUs alone nothing is exchanged after the agreement
ranks = MpiRanks(MPI.COMM_WORLD, node_key=rank)
ranks.guard.timeout = 1
ranks.devices = tuple(Device(peer, "CPU", 0) for peer in range(ranks.size))


class Apart(ms.Strategy):
    def __init__(self):
        super().__init__(ms.StrategyExtended(self, ranks))


strategy = Apart()
strategy.run(lambda: ms.get_replica_context().all_reduce_async("SUM", np.ones(3)).wait())
background = ranks.made[Background]
background.free = stopping(background.free)
strategy.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["making", "closing"])
def test_a_strategy_is_watched_from_its_first_step_to_its_last(
    what: str, launch: launching.Launch, tmp_path: Path
) -> None:
    path = launching.program(BEFORE_AND_AFTER, tmp_path)
    job = launch(2, [path, what], env={"MPISTRATEGY_TIMEOUT_SECONDS": "3"}, cwd=tmp_path, timeout=30)
    assert job.returncode == 124, job
    where = {"making": "MirroredStrategy", "closing": r"Strategy\.close"}[what]
    assert re.search(rf"rank 0: waits in #\d+ {where} ", job.stderr), job


SLOW_FILES = """
import os, sys, time
import mpistrategy as ms

from mpistrategy import own_files

usual = os.listdir
def slow(path="."):
    time.sleep(1.5 if sys.argv[1] == "slow" else 1000)
    return usual(path)
os.listdir = slow
if sys.argv[1] == "hung":
    own_files.make_folder = slow

strategy = ms.MirroredStrategy()
strategy.reduce("SUM", 1.0)
if strategy.extended.communicator.rank == 1:
    time.sleep(100)
strategy.reduce("SUM", 1.0)
"""


@pytest.mark.slow
@pytest.mark.one_rank
@pytest.mark.parametrize("how", ["slow", "hung"])
def test_files_that_take_long_do_not_stop_the_clock(launch: launching.Launch, tmp_path: Path, how: str) -> None:
    """Each look at what other nodes say takes longer than the pause that a suspended job makes, or does not end."""
    environment = {"MPIR_CVAR_NUM_CLIQUES": "2", "MPISTRATEGY_TIMEOUT_SECONDS": str(TIMEOUT)}
    job = launch(2, [launching.program(SLOW_FILES, tmp_path), how], timeout=60, cwd=tmp_path, env=environment)
    assert job.returncode == 124, job
    told = "1 of 2 ranks wait; not come: rank 1" if how == "slow" else "stacks and its last collectives are above"
    assert told in job.stderr, job


# ------------------------------------------------------------------------------------- what must not end a job

WELL = """
import os, subprocess, sys, time
import numpy as np
from mpi4py import MPI
import mpistrategy as ms
from mpistrategy.checkpoint import files as checkpoint_files
from mpistrategy.mpi.watchdog import watchdog

rank = MPI.COMM_WORLD.rank
usual = ms.MirroredStrategy()
patient = ms.MirroredStrategy(communication_options=ms.CommunicationOptions(timeout_seconds=30))


def long_work():
    end = time.monotonic() + 3.5
    while time.monotonic() < end:
        time.sleep(0 if what == "busy" else 0.01)
    return np.ones(2)


def meet_and_work():
    strategy.barrier()
    return long_work()


def step():
    return ms.get_replica_context().all_reduce("SUM", np.ones(2))


for what in sys.argv[1:]:
    strategy = patient if what == "own limit" else usual
    strategy.run(step)
    # Not before: the ranks may have started some seconds apart.  A rank that writes counts as at work for half of it,
    # and on a busy machine a second may lie between two writes.
    usual.extended.communicator.guard.timeout = 4 if "disk" in what else 2
    for group in watchdog.here.groups.values():
        group._next_look = 0.0
    watchdog.here._changed.set()  # it looks more often from now on
    if what == "busy" and rank == 1:
        with strategy.expect_long(10):
            long_work()
    elif what == "own limit" and rank == 1:
        long_work()
    elif what == "together":
        with strategy.scope():
            ms.Variable(long_work)
        dataset = strategy.distribute_datasets_from_function(lambda context: (long_work() for _ in range(1)))
        assert len(list(dataset)) == 1
    elif what == "meeting at work":
        with strategy.scope():
            ms.Variable(meet_and_work)
    elif "disk" in what:
        with strategy.scope():
            objects = {f"v{number}": ms.Variable(np.zeros(3)) for number in range(20)}
        checkpoint_files.watcher = lambda what, name: time.sleep(0.3 * (what == "write"))
        ms.Checkpoint(**objects).save(what, wait=what == "slow disk").wait()
    elif what == "suspended":
        process = os.getpid()
        subprocess.run(["sh", "-c", f"kill -STOP {process}; sleep 4; kill -CONT {process}"], check=True)
        strategy.barrier()
    print(f"{what}: {strategy.run(step)[0]}\\n", end="", flush=True)
if rank == 1:
    long_work()  # at the end
"""
HONEST = ["busy", "own limit", "together", "meeting at work", "slow disk", "slow disk behind", "suspended"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_honest_work_is_no_alarm(nodes: int, launch: launching.Launch, tmp_path: Path) -> None:
    """On two nodes, which MPICH pretends, each hears of the other through the run folder, which goes at the end."""
    path = launching.program(WELL, tmp_path)
    job = launch(2, [path, *HONEST], timeout=90, cwd=tmp_path, env={"MPIR_CVAR_NUM_CLIQUES": str(nodes)}).check()
    assert [what for what in HONEST if job.stdout.count(f"{what}: 2.0") != 2] == [], job
    assert "roll call" not in job.stderr, job
    assert not list(tmp_path.glob("mpistrategy-run-*"))


CLOSED_IN_A_WRITE = """
import os, threading
import mpistrategy as ms
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.mpi.watchdog.run_directory import RunDirectory

closed, other = ms.MirroredStrategy(), ms.MirroredStrategy()
group = next(iter(watchdog.here.groups.values()))
writing, going_on, write = threading.Event(), threading.Event(), RunDirectory._write


def write_slowly(directory, name, text):
    writing.set()
    going_on.wait()
    return write(directory, name, text)


if closed.extended.communicator.rank == 0:
    RunDirectory._write = write_slowly
    with closed.expect_long(1000):
        group._next_look = 0.0
        watchdog.here._changed.set()
        assert writing.wait(30)
closed.close()
going_on.set()
other.close()
if writing.is_set():
    print("left" if os.path.exists(group.directory.path) else "gone")
"""


def test_a_strategy_closed_while_its_node_says_it_is_busy_leaves_no_folder(
    launch: launching.Launch, tmp_path: Path
) -> None:
    path = launching.program(CLOSED_IN_A_WRITE, tmp_path)
    job = launch(2, [path], env={"MPIR_CVAR_NUM_CLIQUES": "2"}, cwd=tmp_path).check()
    assert job.stdout.split() == ["gone"], job


ONE_CALL = """
import sys, threading
import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()
quickly = ms.CommunicationOptions(timeout_seconds=0.7)
calls = {
    "all_reduce": lambda: ms.get_replica_context().all_reduce("SUM", np.ones(2), options=quickly),
    "all_gather": lambda: ms.get_replica_context().all_gather(np.ones(2), 0, options=quickly),
    "reduce_to": lambda: ms.get_replica_context().merge_call(
        lambda s: s.extended.reduce_to("SUM", np.ones(2), "task:0", quickly)
    ),
}
strategy.barrier()
if strategy.extended.communicator.rank == 1:
    threading.Event().wait()
strategy.run(calls[sys.argv[1]])
"""


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "reduce_to"])
def test_one_call_may_have_a_limit_of_its_own(what: str, launch: launching.Launch, tmp_path: Path) -> None:
    path = launching.program(ONE_CALL, tmp_path)
    job = launch(2, [path, what], env={"MPISTRATEGY_RUN_DIR": "/proc/nowhere"}, cwd=tmp_path)
    assert job.returncode == 124, job
    assert "(timeout_seconds=0.7)" in job.stderr
    # The run directory cannot be made: one warning, and everything on stderr.
    assert job.stderr.count("cannot write to its run directory") == 1, job
    assert job.stderr.count("thread MainThread (most recent call last):") == 2, job
    assert "stacks and its last collectives are above" in job.stderr


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"MPISTRATEGY_TIMEOUT_SECONDS": "-1"}, "MPISTRATEGY_TIMEOUT_SECONDS.*'-1'; expected seconds >= 0"),
        ({"MPISTRATEGY_TIMEOUT_SECONDS": "soon"}, "MPISTRATEGY_TIMEOUT_SECONDS.*'soon'; expected seconds >= 0"),
        ({"MPISTRATEGY_CHECK": "sometimes"}, """MPISTRATEGY_CHECK.*'sometimes'; expected "always" or "off\""""),
    ],
)
@pytest.mark.slow
def test_a_malformed_setting_is_refused_on_every_rank(
    launch: launching.Launch, tmp_path: Path, environment: dict[str, str], told: str
) -> None:
    path = launching.program("import mpistrategy as ms\nms.MirroredStrategy()\n", tmp_path)
    job = launch(2, [path], env=environment, cwd=tmp_path)
    assert job.returncode == 1, job
    assert re.search(f"OptionError: .*{told}", job.stderr), job


NOTHING_IS_FOUND = """
import sys, time
import numpy as np
import mpistrategy as ms
strategy = ms.MirroredStrategy()
step = lambda: strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3)))
sys.meta_path.clear()  # as if the file system were gone
if strategy.rank == 1:
    if sys.argv[1] == "late":
        time.sleep(1000)
    raise ValueError("a mistake")
step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "status", "told"), [("late", 124, "roll call: "), ("error", 1, "ValueError: a mist")])
def test_a_failure_needs_no_file_of_the_environment(
    launch: launching.Launch, tmp_path: Path, what: str, status: int, told: str
) -> None:
    program = launching.program(NOTHING_IS_FOUND, tmp_path)
    job = launch(2, [program, what], env={"MPISTRATEGY_TIMEOUT_SECONDS": "2"})
    assert job.returncode == status, job
    assert told in job.stderr
    assert "ImportError" not in job.stderr
    assert "ModuleNotFoundError" not in job.stderr


# -------------------------------------------------------------------------------------- crossed strategies, frames

CROSSED = """
import numpy as np
import mpistrategy as ms

first, second = ms.MirroredStrategy(), ms.MirroredStrategy()
for strategy in (second, first) if first.rank == 1 else (first, second):
    strategy.reduce("SUM", np.ones(300_000))
"""


@pytest.mark.one_rank
def test_ranks_that_use_their_strategies_in_another_order_are_shown(launch: launching.Launch, tmp_path: Path) -> None:
    job = launch(3, [launching.program(CROSSED, tmp_path)], env={"MPISTRATEGY_TIMEOUT_SECONDS": "2"}, cwd=tmp_path)
    assert job.returncode == 124, job
    assert "All 3 ranks wait: in different strategies, in calls that do not fit together" in job.stderr, job
    assert len(re.findall(r"  rank \d: waits in #\d .* at \S+:7 in <module>", job.stderr)) == 3, job


#: A main thread that calls and returns all the time and leaves garbage with finalizers, seen by another thread.
#: Without `_frames_stay` Python 3.11 ends in a segmentation fault, or finds other objects in the place of frames.
FRAMES = """
import sys, threading, time, weakref
from mpistrategy.mpi.watchdog import local_process as process_view

sys.setswitchinterval(1e-5)
main, over, looks = threading.main_thread().ident, threading.Event(), []

def watch():
    count = 0
    while not over.is_set():
        with process_view._frames_stay():
            frame = sys._current_frames().get(main)
            while frame is not None:
                frame = frame.f_back
        count += 1
    looks.append(count)

class Garbage:
    def __init__(self):
        self.me = self
        weakref.finalize(self, lambda: [[each] for each in range(200)])

def work(depth):
    Garbage()
    return work(depth - 1) if depth else None

thread = threading.Thread(target=watch)
thread.start()
end = time.monotonic() + 0.5
while time.monotonic() < end:
    work(30)
over.set()
thread.join()
assert looks[0] > 0
"""


@pytest.mark.one_rank
def test_looking_at_the_main_thread_while_it_runs_does_no_harm() -> None:
    ran = subprocess.run([sys.executable, "-c", FRAMES], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]
