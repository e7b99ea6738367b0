"""What comes from outside ends a job for a while: it goes on, and ends with the bits of a run without interruption.

What a program does itself ends a job for good.  On a real Slurm; with both MPIs where each ends its ranks in its own
way.
MPISTRATEGY_TEST_ALL=1 runs all days, the tests of each change the most usual ones.
"""

from __future__ import annotations

import datetime
import itertools
import random
import re
from collections.abc import Callable
from functools import partial

import pytest
from preempted import runs_in
from replicas import long_lane
from slurm_bed import SlurmBed
from slurm_user import NEEDS_SLURM, SAVE_EVERY, STEPS, User, needs_srun, twice

pytestmark = [*NEEDS_SLURM, pytest.mark.timeout(240), needs_srun]


@pytest.fixture(scope="module")
def whole(bed: SlurmBed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the ranks of a training end with that nothing interrupts."""
    found: dict[str, bytes] = {}

    @twice
    def trains(user: User) -> None:
        user.trains()
        done = user.run("requeue.sbatch")
        assert (done.state, done.status, "restart 0" in done.output) == ("COMPLETED", 0, True), done.output
        found.update(user.ends())

    trains(User(bed, tmp_path_factory.mktemp("whole")))
    assert len(found) == 2
    return found


# ------------------------------------------------------------------------------------------------ it goes on


def told(user: User, job: str) -> None:
    """As Slurm tells the script that the time is nearly up."""
    user.made(random.randrange(2, 12))
    user.bed.run("scancel", "--batch", "--signal=USR2", job)


def told_by_slurm(user: User, job: str) -> None:
    """120 s before the end; the first start is slow, since Slurm looks at time limits every 30 s only."""
    user.made(1)
    soon = datetime.datetime.now() + datetime.timedelta(seconds=122)
    user.bed.run("scontrol", "update", f"jobid={job}", f"endtime={soon:%Y-%m-%dT%H:%M:%S}")
    user.says(job, "the time is nearly up")


def lost(user: User, job: str, silently: bool = False) -> None:
    """Srun gives up before Slurm misses the node."""
    user.made(7)
    user.bed.cut("node2", silently)
    try:
        user.says(job, "Terminating StepId")
    finally:
        user.bed.run("scontrol", "update", "nodename=node2", "state=down", "reason=crashed")
        user.bed.revive("node2")


def missed_by_slurm(user: User, job: str) -> None:
    user.made(7)
    user.bed.crash("node2")
    try:
        user.bed.until(lambda: user.bed.show(job).get("Restarts") != "0", 30, "requeue", user.output(job))
    finally:
        user.bed.revive("node2")


def gives_way(user: User, job: str, grace: int = 4) -> None:
    """With a grace time, the ranks are sent SIGTERM first."""
    user.made(7)
    user.bed.run("scontrol", "update", "partition=test", f"gracetime={grace}")
    urgent = ["sbatch", "--wait", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true"]
    assert user.bed.run(*urgent, cwd=user.folder, env=user.environment).returncode == 0


def cut_off(user: User, job: str) -> None:
    """The network between the nodes stops for a while."""
    user.made(7)
    user.bed.plug("node2", "down")
    try:
        user.says(job, "Terminating StepId")
    finally:
        user.bed.plug("node2", "up")


def hangs(user: User, job: str) -> None:
    """On the first start, rank 1 is stopped at a step."""
    user.says(job, "nothing is known of rank 1: its node does not answer")


HEARD_OF = "stopped with status 75; back to the queue"
#: What happens; what the job says of it; the options of the training, and what its first start has more.
DAYS: dict[str, tuple[Callable[[User, str], object], str, str, str]] = {
    "told": (told, HEARD_OF, "", ""),
    "told, deaf": (told, "stopped with status .*; back to the queue", "--deaf", ""),
    "told by Slurm": (told_by_slurm, HEARD_OF, "", "--pause 2"),
    "a node is lost": (lost, "restart 1", "", ""),
    "a node is lost, and nobody hears of it": (partial(lost, silently=True), "restart 1", "", ""),
    "Slurm misses a node": (missed_by_slurm, "restart 1", "", ""),
    "Slurm misses a node, deaf": (missed_by_slurm, "restart 1", "--deaf", ""),
    "a more urgent job": (gives_way, r"told to stop \(SIGTERM", "", ""),
    "a more urgent job, deaf": (gives_way, "restart 1", "--deaf", ""),
    "a more urgent job at once": (partial(gives_way, grace=0), "restart 1", "", ""),
    "the network stops": (cut_off, "back to the queue", "", ""),
    "a rank hangs": (hangs, "back to the queue", "", "--tell 8:1:SIGSTOP"),
}
ON_EACH_MPI = ("a node is lost", "a more urgent job")
USUAL = (*ON_EACH_MPI, "told", "a rank hangs")


@pytest.mark.parametrize(
    "day",
    [
        pytest.param(day, marks=[pytest.mark.each_mpi] * (day in ON_EACH_MPI) + [long_lane] * (day not in USUAL))
        for day in DAYS
    ],
)
@twice
def test_it_goes_on(user: User, whole: dict[str, bytes], day: str) -> None:
    """Nothing that was saved is lost, and no bit differs."""
    happens, said, options, at_first = DAYS[day]
    user.environment |= {"MPISTRATEGY_TIMEOUT_SECONDS": "5", "AT_FIRST": at_first}
    user.trains("requeue.sbatch", options)
    job = user.submit("requeue.sbatch")
    happens(user, job)
    done = user.bed.wait(job, user.output(job), 90)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    assert re.search(said, done.output), done.output
    assert re.search("restart [1-4] of 10", done.output), done.output
    runs = runs_in(user.folder)
    assert len(runs) >= 2
    for last, run in itertools.pairwise(runs):  # it goes on after the last step that was saved
        at_a_signal = [int(step) for step in re.findall(r"saved step (\d+)", done.output)]
        assert run.begun in {last.saved, last.made // SAVE_EVERY * SAVE_EVERY, *at_a_signal}, runs
        assert last.made - run.begun <= SAVE_EVERY, runs
    assert runs[-1].made == STEPS
    assert user.ends() == whole


@twice
def test_scancel_ends_it_and_the_next_job_goes_on(user: User, whole: dict[str, bytes]) -> None:
    """A cancelled job does not come back; what it has saved is whole, and whoever submits it again loses little."""
    user.trains()
    job = user.submit("requeue.sbatch")
    user.made(7)
    assert user.bed.run("scancel", job).returncode == 0
    assert user.bed.wait(job, user.output(job)).state == "CANCELLED"
    user.bed.until(user.bed.all_idle, 60, "end", user.output(job))
    assert user.bed.show(job)["Restarts"] == "0"
    [cancelled] = runs_in(user.folder)
    done = user.run("requeue.sbatch")
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    assert cancelled.made - runs_in(user.folder)[1].begun <= SAVE_EVERY
    assert user.ends() == whole


@twice
def test_a_chain_has_one_successor_after_the_loss_of_a_node(user: User, whole: dict[str, bytes]) -> None:
    user.trains("chain.sbatch")
    job = user.submit("chain.sbatch")
    user.made(7)
    user.bed.crash("node2")
    try:
        failed = lambda: user.bed.show(job).get("JobState") == "NODE_FAIL"  # noqa: E731
        user.bed.until(failed, 60, "NODE_FAIL", user.output(job))
    finally:
        user.bed.revive("node2")
    links = []
    while not links or links[-1].state == "FAILED":  # a node that has just come back may not start a step at first
        [job] = re.findall(r"job (\d+) goes on after it", user.output(job).read_text())
        links.append(user.bed.wait(job, user.output(job), 120))
    assert (links[-1].state, links[-1].status) == ("COMPLETED", 0), links
    assert "the program is done; the chain ends here" in links[-1].output
    assert user.ends() == whole
    [taken_back] = re.findall(r"job (\d+) goes on after it", links[-1].output)
    assert user.bed.show(taken_back)["JobState"] == "CANCELLED"


# ------------------------------------------------------------------------------------------------ it does not

FAILS = {
    "raise ValueError('of this rank')": "failed with ValueError on rank 1: of this rank",
    "os.kill(os.getpid(), signal.SIGSEGV)": "was ended: .*Segmentation fault",
}


@twice
def test_a_program_that_fails_is_not_tried_again(user: User) -> None:
    jobs = {}
    for number, (text, why) in enumerate(FAILS.items()):
        (user.folder / f"fails{number}.py").write_text(
            "import os, signal, sys\nimport mpistrategy as ms\n"
            "strategy = ms.MirroredStrategy()\nstrategy.barrier('a')\n"
            f"if strategy.replica_id_in_sync_group == 1:\n    {text}\nstrategy.barrier('b')\n"
        )
        user.edit("requeue.sbatch", f"fails{number}.py")
        jobs[user.submit("requeue.sbatch")] = why
    for job, why in jobs.items():
        done = user.bed.wait(job, user.output(job))
        assert done.state == "FAILED", done.output
        assert re.search(f"the program {why}; not requeued", done.output), done.output
