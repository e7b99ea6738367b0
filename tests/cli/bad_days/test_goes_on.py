"""What comes from outside ends a job for a while: it goes on, and ends with the bits of a run without interruption.

On a real Slurm with settings of real clusters.  With both MPIs where each ends its ranks in its own way.
MPISTRATEGY_TEST_ALL=1 runs all days, the tests of each change the most usual ones.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterator

import pytest
from preempted import runs_in
from replicas import long_lane
from slurm_bed import SlurmBed
from slurm_trainings import REQUEUED, SAVE_EVERY, STEPS, ends_of, training, trains, uninterrupted
from slurm_user import NEEDS_SLURM, User, needs_srun, started, twice

pytestmark = [*NEEDS_SLURM, pytest.mark.one_rank, pytest.mark.timeout(240), needs_srun]

LONG = (pytest.mark.each_mpi, long_lane)
deaf_or_not = pytest.mark.parametrize("handler", ["saves when told", pytest.param("knows no signals", marks=LONG)])


@pytest.fixture(scope="module")
def bed() -> Iterator[SlurmBed]:
    yield from started(nodes=2, cpus=4, gpus=0, changed=REQUEUED, grace=4)


@pytest.fixture(scope="module")
def whole(bed: SlurmBed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    twice(lambda user: found.update(uninterrupted(user)))(User(bed, tmp_path_factory.mktemp("whole")))
    return found


def check(user: User, job: str, whole: dict[str, bytes]) -> str:
    """Wait for the end, and see that nothing that was saved is lost and no bit differs; return what the job said."""
    done = user.bed.wait(job, user.output(job), 90)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    assert re.search("restart [1-4] of 10", done.output), done.output
    runs = runs_in(user.folder)
    assert len(runs) >= 2
    for last, run in itertools.pairwise(runs):  # it goes on after the last step that was saved
        told = [int(step) for step in re.findall(r"saved step (\d+)", done.output)]
        assert run.begun in {last.saved, last.made // SAVE_EVERY * SAVE_EVERY, *told}, runs
        assert last.made - run.begun <= SAVE_EVERY, runs
    assert runs[-1].made == STEPS
    assert ends_of(user.folder) == whole
    return done.output


@pytest.mark.each_mpi
@pytest.mark.parametrize("how", ["its connections close", pytest.param("nobody hears of it", marks=LONG)])
@twice
def test_a_node_is_lost_and_srun_gives_up_before_slurm_misses_it(user: User, whole: dict[str, bytes], how: str) -> None:
    user.environment["MPISTRATEGY_TIMEOUT_SECONDS"] = "5"
    trains(user)
    job = user.submit("requeue.sbatch")
    user.made(7)
    user.bed.cut("node2", silently=how == "nobody hears of it")
    try:
        user.says(job, "Terminating StepId")
    finally:
        user.bed.run("scontrol", "update", "nodename=node2", "state=down", "reason=crashed")
        user.bed.revive("node2")
    check(user, job, whole)


@pytest.mark.each_mpi
@long_lane
@deaf_or_not
@twice
def test_slurm_misses_a_node_first(user: User, whole: dict[str, bytes], handler: str) -> None:
    trains(user, "requeue.sbatch", *(["--deaf"] if handler == "knows no signals" else []))
    job = user.submit("requeue.sbatch")
    user.made(7)
    user.bed.crash("node2")
    try:
        user.bed.until(lambda: user.bed.show(job).get("Restarts") != "0", 30, "requeue", user.output(job))
    finally:
        user.bed.revive("node2")
    check(user, job, whole)


@pytest.mark.each_mpi
@deaf_or_not
@twice
def test_a_more_urgent_job_takes_the_nodes(user: User, whole: dict[str, bytes], handler: str) -> None:
    """With a grace time, the ranks are sent SIGTERM first."""
    output = _gives_way(user, whole, handler)
    assert ("told to stop (SIGTERM" in output) == (handler == "saves when told"), output


@pytest.mark.each_mpi
@long_lane
@deaf_or_not
@twice
def test_a_more_urgent_job_takes_the_nodes_at_once(user: User, whole: dict[str, bytes], handler: str) -> None:
    user.bed.run("scontrol", "update", "partition=test", "gracetime=0")
    try:
        _gives_way(user, whole, handler)
    finally:
        user.bed.run("scontrol", "update", "partition=test", "gracetime=4")


def _gives_way(user: User, whole: dict[str, bytes], handler: str) -> str:
    trains(user, "requeue.sbatch", *(["--deaf"] if handler == "knows no signals" else []))
    job = user.submit("requeue.sbatch")
    user.made(7)
    urgent = user.bed.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true", cwd=user.folder,
        env=user.environment,
    )  # fmt: skip
    number = urgent.stdout.strip()
    ended = lambda: user.bed.show(number).get("JobState") == "COMPLETED"  # noqa: E731
    user.bed.until(ended, 60, "the urgent job", user.output(job))
    return check(user, job, whole)


#: Its first start is slow: Slurm looks at time limits every 30 s only.
SLOW_AT_FIRST = """
import os, sys, preempted
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    sys.argv += ["--pause", "2"]
preempted.main()
"""


@pytest.mark.each_mpi
@long_lane
@deaf_or_not
@pytest.mark.timeout(240)
@twice
def test_the_time_limit(user: User, whole: dict[str, bytes], handler: str) -> None:
    """Slurm itself tells the script that the time is nearly up."""
    trains(user)
    (user.folder / "slow.py").write_text(SLOW_AT_FIRST)
    user.edit("requeue.sbatch", "slow.py", *training(), *(["--deaf"] if handler == "knows no signals" else []))
    job = user.submit("requeue.sbatch")
    user.made(1)
    soon = datetime.datetime.now() + datetime.timedelta(seconds=122)  # the script is told 120 s before
    user.bed.run("scontrol", "update", f"jobid={job}", f"endtime={soon:%Y-%m-%dT%H:%M:%S}")
    user.says(job, "the time is nearly up")
    assert "back to the queue" in check(user, job, whole)


@pytest.mark.each_mpi
@long_lane
@twice
def test_the_network_between_the_nodes_stops_for_a_while(user: User, whole: dict[str, bytes]) -> None:
    user.environment["MPISTRATEGY_TIMEOUT_SECONDS"] = "5"
    trains(user)
    job = user.submit("requeue.sbatch")
    user.made(7)
    user.bed.unplug("node2")
    try:
        user.says(job, "Terminating StepId")
    finally:
        user.bed.plug("node2")
    output = check(user, job, whole)
    # Where the ranks of the other node were the first to call the roll, nobody hears it.
    assert re.search(
        r"roll call: a collective is late|Abort\(124\)|exit(ed)? (with exit )?(code|status):? 124", output
    ), output
    assert "back to the queue" in output


#: On its first start, rank 1 stops at a step.
HANGS = """
import os, sys, preempted
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    sys.argv += ["--tell", "8:1:SIGSTOP"]
preempted.main()
"""


@twice
def test_a_rank_hangs(user: User, whole: dict[str, bytes]) -> None:
    user.environment["MPISTRATEGY_TIMEOUT_SECONDS"] = "5"
    trains(user)
    (user.folder / "hangs.py").write_text(HANGS)
    user.edit("requeue.sbatch", "hangs.py", *training())
    job = user.submit("requeue.sbatch")
    output = check(user, job, whole)
    assert re.search(r"rank 1: does not answer: its process \d+ is stopped", output), output
    assert re.search(r"the program stopped with status \d+; back to the queue", output), output


@twice
def test_scancel_ends_it_and_the_next_job_goes_on(user: User, whole: dict[str, bytes]) -> None:
    """A cancelled job does not come back; what it has saved is whole, and whoever submits it again loses little."""
    trains(user)
    job = user.submit("requeue.sbatch")
    user.made(7)
    assert user.bed.run("scancel", job).returncode == 0
    assert user.bed.wait(job, user.output(job)).state == "CANCELLED"
    idle = lambda: not user.bed.run("squeue", "--noheader", "--states=all-active").stdout  # noqa: E731
    user.bed.until(idle, 60, "end", user.output(job))
    assert user.bed.show(job)["Restarts"] == "0"
    [cancelled] = runs_in(user.folder)
    done = user.run("requeue.sbatch")
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    runs = runs_in(user.folder)
    assert cancelled.made - runs[1].begun <= SAVE_EVERY, runs
    assert ends_of(user.folder) == whole


@twice
def test_a_chain_has_one_successor_after_the_loss_of_a_node(user: User, whole: dict[str, bytes]) -> None:
    trains(user, "chain.sbatch")
    first = user.submit("chain.sbatch")
    user.made(7)
    user.bed.crash("node2")
    try:
        lost = lambda: user.bed.show(first).get("JobState") == "NODE_FAIL"  # noqa: E731
        user.bed.until(lost, 60, "NODE_FAIL", user.output(first))
    finally:
        user.bed.revive("node2")
    job, links = first, []
    while not links or links[-1].state == "FAILED":  # a node that has just come back may not start a step at first
        found = re.findall(r"job (\d+) goes on after it", user.output(job).read_text())
        assert len(found) == 1
        job = found[0]
        links.append(user.bed.wait(job, user.output(job), 120))
    assert (links[-1].state, links[-1].status) == ("COMPLETED", 0), links
    assert runs_in(user.folder)[-1].made == STEPS
    assert ends_of(user.folder) == whole
    names = user.bed.run("squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%i").stdout.split()
    assert names == [], names
