"""The files of slurm/ on a real Slurm: submitted, run on two nodes, looked at.

Where there can be no Slurm (no root, no namespaces, no packages) these tests say `not run` and why.
"""

from __future__ import annotations

import re
import sys
import tarfile

import launching
import pytest
from slurm_bed import Job
from slurm_scripts import executable, script
from slurm_user import ENDED, MPI_TYPE, NEEDS_SLURM, User, needs_srun, twice

pytestmark = NEEDS_SLURM


def check(job: Job, ranks: int) -> None:
    assert (job.state, job.status) == ("COMPLETED", 0), job.output
    assert f"example.py on {ranks} ranks: made all 20 steps" in job.output, job.output
    assert "the program ended with status 0" in job.output


@needs_srun
@twice
def test_multi_node(user: User) -> None:
    user.edit("multi_node.sbatch", "example.py", "--steps", "20")
    job = user.run("multi_node.sbatch")
    check(job, 4)
    assert job.output.index("4 ranks meet and add up right") < job.output.index("example.py on 4 ranks: begins")
    assert "2 nodes: 2 ranks on node1, 2 ranks on node2" in job.output, job


def test_multi_node_mpirun_binds_ranks_to_cores(user: User) -> None:
    (user.folder / "tells.py").write_text(
        "import os\nimport mpistrategy as ms\nstrategy = ms.MirroredStrategy()\nstrategy.barrier('all')\n"
        "print(f'{strategy.size} ranks, {len(os.sched_getaffinity(0))} cores', flush=True)\n"
    )
    kind = "openmpi" if launching.IS_OPEN_MPI else "mpich"
    keys = {"nodes": 2, "tasks_per_node": 2, "mpiexec": kind, "program": "tells.py"}
    (user.folder / "mpirun.sbatch").write_text(script("multi_node_mpirun", keys))
    done = user.run("mpirun.sbatch")
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    assert done.output.count("4 ranks, 1 cores") == 4, done.output


@needs_srun
def test_array(user: User) -> None:
    user.edit("array.sbatch", "example.py", "--steps", "20")
    first = user.submit("array.sbatch", "--array=0-1")
    for job in (f"{first}_0", f"{first}_1"):
        check(user.bed.wait(job, user.output(job)), 2)
    assert {path.name for path in (user.folder / "checkpoints").iterdir()} == {"mpistrategy-0", "mpistrategy-1"}


def test_ranks_that_do_not_meet_are_found_before_the_program_starts(user: User) -> None:
    user.environment["SLURM_MPI_TYPE"] = "none"
    job = user.run("multi_node.sbatch")
    assert (job.state, job.status in (1, *ENDED)) == ("FAILED", True), job.output
    assert f"mpistrategy doctor ended with status {job.status}; the program was not started" in job.output
    assert "example.py" not in job.output
    assert re.search("BAD +launch +4 programs of one rank each", job.output), job.output
    assert f"Start it with `srun --mpi={MPI_TYPE}`" in job.output
    assert "export SLURM_MPI_TYPE" in job.output


HANGING = """
import signal, time, numpy as np, mpistrategy as ms
strategy = ms.MirroredStrategy()
def shuffle():
    print("now it hangs", flush=True)
    while True: signal.pause()
for _ in range(70):
    if strategy.replica_id_in_sync_group == 2:
        time.sleep(0.02)  # the load that this rank has and the others have not
    strategy.reduce("SUM", np.ones(3))
if strategy.replica_id_in_sync_group == 1:
    shuffle()
strategy.reduce("SUM", np.ones(3))
"""


@needs_srun
@twice
def test_a_job_that_hangs_is_looked_at_from_outside(user: User) -> None:
    (user.folder / "hang.py").write_text(HANGING)
    (user.folder / "hang.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2 --output=mpistrategy-%j.out\n"
        "MPISTRATEGY_TIMEOUT_SECONDS=20 srun --kill-on-bad-exit=1 python3 -m mpistrategy run hang.py\n"
    )
    job = user.submit("hang.sbatch")
    user.says(job, "now it hangs")
    doctor = (sys.executable, "-m", "mpistrategy", "doctor", "--job", job)
    told = []

    def hangs() -> bool:
        told[:] = [user.bed.run(*doctor, cwd="/", env=user.environment)]
        return told[0].returncode == 1 and told[0].stdout.count("  in #") >= 3

    try:
        user.bed.until(hangs, 40, "hang", user.output(job))
        shown = told[0].stdout
        pasted = re.search(r"^ +(srun .* kill -QUIT \d+)$", shown[shown.index("not come") :], re.M)
        assert pasted, shown
        assert f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 -w node1 kill" in pasted[1]
        done = user.bed.run("bash", "-c", pasted[1], cwd="/", env=user.environment)
        assert done.returncode == 0, done
        user.says(job, "in shuffle")
    finally:
        user.bed.run("scancel", job)
    assert f"job {job}: 4 ranks heard of, in the memory that its ranks share on 2 nodes" in shown, told
    assert re.search(r"rank 1 +in no collective: at \S+/hang.py:6 in shuffle; its last was #\d+ ", shown), shown
    assert len(re.findall(r"rank [023] +in #\d+ Strategy.reduce SUM float64\[3\]", shown)) == 3, shown
    assert "3 of 4 ranks wait; not come: rank 1." in shown
    assert re.search(r"strategy of 4 ranks: 71 collectives so far; who came last in the last 64, within ", shown), shown
    assert re.search(r"rank 2 +last in [3-6]\d on node2; the first waited \d+(\.\d)? ms for it", shown), shown


@needs_srun
def test_every_rank_sees_all_gpus(user: User) -> None:
    """And select_gpu.sh gives each rank its own.  The job has the status of its program."""
    (user.folder / "show.py").write_text(
        "import os\nimport mpistrategy as ms\nprint('sees', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        "ms.MirroredStrategy('cpu')\nraise SystemExit(3)\n"
    )
    (user.folder / "show.sbatch").write_text(script("single_node", {"gpus_per_node": 2, "program": "show.py"}))
    job = user.run("show.sbatch")
    assert (job.state, job.status in (3, *ENDED)) == ("FAILED", True), job.output
    assert job.output.count("sees 0,1\n") == 2, job.output
    own = ["./select_gpu.sh", "bash", "-c", 'echo "$SLURM_NODEID.$SLURM_LOCALID has $CUDA_VISIBLE_DEVICES"']
    two = ["srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    step = user.bed.run(*two, *own, cwd=user.folder, env=user.environment)
    assert sorted(step.stdout.splitlines()) == ["0.0 has 0", "0.1 has 1", "1.0 has 0", "1.1 has 1"], step


# ------------------------------------------------------------------------------------- a staged environment

#: Needs the copy to the end: it imports a module while it ends.
ENDS_BY_SIGTERM = """
import signal, sys, time

def save(number, frame):
    time.sleep(1)
    import copied
    print("saved", copied.__file__, flush=True)
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
print("works", flush=True)
time.sleep(120)
"""
IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("works", flush=True)
time.sleep(120)
"""


def submitted(user: User, program: str) -> str:
    """Submit a program with a copy of its environment: a python3 that starts the tests' own Python."""
    environment = user.folder / "environment"
    executable(environment / "bin" / "python3", f'PYTHONPATH=${{0%/bin/*}}:$PYTHONPATH exec {sys.executable} "$@"')
    (environment / "copied.py").touch()
    with tarfile.open(user.folder / "environment.tar.gz", "w:gz") as archive:
        archive.add(environment, ".")
    (user.folder / "program.py").write_text(program)
    keys = {"nodes": 2, "tasks_per_node": 1, "local": str(user.bed.local), "program": "program.py", "mpi": "none"}
    # Without MPI, each rank takes itself for the only one.
    text = script("staged_env", keys).replace(" -m mpistrategy run ", " ")
    (user.folder / "staged.sbatch").write_text(text)
    return user.submit("staged.sbatch", "--no-requeue")


def left(user: User, node: str) -> list[str]:
    """Return the copies that are on a node's disk."""
    done = user.bed.on(node, "ls", str(user.bed.local))
    assert done.returncode == 0, done
    return done.stdout.split()


@pytest.mark.parametrize("program", [ENDS_BY_SIGTERM, IGNORES_SIGTERM], ids=["ends", "killed"])
def test_a_staged_environment_after_scancel(user: User, program: str) -> None:
    """The copy stays until the ranks have ended; the next job removes what a killed job has left."""
    job = submitted(user, program)
    output = user.output(job)
    user.bed.until(lambda: output.exists() and output.read_text().count("works") == 2, 60, "ranks", output)
    assert [len(left(user, node)) for node in user.bed.names] == [1, 1]
    assert user.bed.run("scancel", job).returncode == 0
    user.bed.until(user.bed.all_idle, 60, "end", output)
    copies = [left(user, node) for node in user.bed.names]
    if program == ENDS_BY_SIGTERM:
        assert output.read_text().count(f"saved {user.bed.local}/mpistrategy-stage-{job}-") == 2
        assert copies == [[], []]
        return
    # Where Slurm kills the rank first, the copy may be removed in time.
    for node in user.bed.names:
        assert user.bed.on(node, "mkdir", str(user.bed.local / "mpistrategy-stage-1-0123456789")).returncode == 0
    again = submitted(user, "print('works', flush=True)")
    done = user.bed.wait(again, user.output(again))
    killed = 2 + sum(map(len, copies))
    assert (done.state, done.output.count("of a killed job")) == ("COMPLETED", killed), done.output
    assert [left(user, node) for node in user.bed.names] == [[], []]
