"""The files of slurm/ on a real Slurm: submitted, run on two nodes, signalled, requeued.

Where there can be no Slurm (no root, no namespaces, no packages) these tests say `not run` and why.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launching
import pytest
from mpi4py import MPI
from preempted import runs_in
from slurm_bed import Job, SlurmBed
from slurm_scripts import script
from slurm_trainings import STEPS, trains
from slurm_user import ENDED, MPI_TYPE, NEEDS_SLURM, User, needs_srun, started, twice

pytestmark = NEEDS_SLURM


@pytest.fixture(scope="module")
def bed() -> Iterator[SlurmBed]:
    yield from started(nodes=2, cpus=4, gpus=2)


def check(job: Job, ranks: int, told: str = "made all 200 steps") -> None:
    assert (job.state, job.status) == ("COMPLETED", 0), job.output
    assert f"example.py on {ranks} ranks: {told}" in job.output, job.output
    assert "the program ended with status 0" in job.output


# ------------------------------------------------------------------------------------------------ as they stand


@needs_srun
def test_single_node(user: User) -> None:
    check(user.run("single_node.sbatch"), 2)


@needs_srun
@twice
def test_multi_node(user: User) -> None:
    job = user.run("multi_node.sbatch")
    check(job, 4)
    assert job.output.index("4 ranks meet and add up right") < job.output.index("example.py on 4 ranks: begins")
    assert "2 nodes: 2 ranks on node1, 2 ranks on node2" in job.output, job


@pytest.mark.skipif(not launching.IS_OPEN_MPI, reason="needs Open MPI")
def test_multi_node_mpirun(user: User) -> None:
    check(user.run("multi_node_mpirun.sbatch"), 4)


@pytest.mark.parametrize("bind_to", ["core", "none"])
def test_multi_node_mpirun_for_an_mpi_bound_to_cores_or_not(user: User, bind_to: str) -> None:
    (user.folder / "tells.py").write_text(
        "import os\nimport mpistrategy as ms\nstrategy = ms.MirroredStrategy()\nstrategy.barrier('all')\n"
        "print(f'{strategy.size} ranks, {len(os.sched_getaffinity(0))} cores', flush=True)\n"
    )
    kind = "openmpi" if launching.IS_OPEN_MPI else "mpich"
    keys = {"nodes": 2, "tasks_per_node": 2, "mpiexec": kind, "bind_to": bind_to, "program": "tells.py"}
    (user.folder / "mpirun.sbatch").write_text(script("multi_node_mpirun", keys))
    done = user.run("mpirun.sbatch")
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    cores = 1 if bind_to == "core" else len(os.sched_getaffinity(0))
    assert done.output.count(f"4 ranks, {cores} cores") == 4, done.output


@pytest.mark.one_rank
@needs_srun
def test_array(user: User) -> None:
    first = user.submit("array.sbatch")
    for index in range(4):
        job = f"{first}_{index}"
        check(user.bed.wait(job, user.output(job)), 2)
        assert list((user.folder / "checkpoints" / f"mpistrategy-{index}").glob("step-*"))


@needs_srun
def test_a_job_has_the_status_of_its_program(user: User) -> None:
    (user.folder / "three.py").write_text("import mpistrategy as ms; ms.MirroredStrategy(); raise SystemExit(3)")
    user.edit("single_node.sbatch", "three.py")
    job = user.run("single_node.sbatch")
    assert (job.state, job.status in (3, *ENDED)) == ("FAILED", True), job.output


def test_ranks_that_do_not_meet_are_found_before_the_program_starts(user: User) -> None:
    user.environment["SLURM_MPI_TYPE"] = "none"
    job = user.run("multi_node.sbatch")
    assert (job.state, job.status in (1, *ENDED)) == ("FAILED", True), job.output
    assert f"mpistrategy doctor ended with status {job.status}; the program was not started" in job.output
    assert "example.py" not in job.output
    assert "BAD   launch    4 programs of one rank each" in job.output
    assert f"Start it with `srun --mpi={MPI_TYPE}`" in job.output
    assert f"export SLURM_MPI_TYPE={MPI_TYPE}" in job.output


@needs_srun
@twice
def test_the_doctor_keeps_a_program_from_starting(user: User) -> None:
    """Made-up GPUs are given to the job, and no rank sees one."""
    text = script("multi_node", {"nodes": 1, "gpus_per_node": 2})
    (user.folder / "gpus.sbatch").write_text(text)
    job = user.run("gpus.sbatch")
    assert (job.state, job.status in (1, *ENDED)) == ("FAILED", True), job.output
    assert re.search(r"BAD +gpus +Slurm gave the job 2 on node1, but ranks 0, 1 see none", job.output), job.output
    assert f"mpistrategy doctor ended with status {job.status}; the program was not started" in job.output
    assert "example.py" not in job.output


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
        "srun --kill-on-bad-exit=1 python3 -m mpistrategy run --timeout 20 hang.py\n"
    )
    job = user.submit("hang.sbatch")
    user.says(job, "now it hangs")
    doctor = (sys.executable, "-m", "mpistrategy", "doctor", "--job", job)
    told = []

    def hangs() -> bool:
        told[:] = [user.bed.run(*doctor, cwd="/", env=user.environment)]
        return told[0].returncode == 1 and told[0].stdout.count(": in #") + told[0].stdout.count("  in #") >= 3

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
    """And select_gpu.sh gives each rank its own."""
    (user.folder / "show.py").write_text("import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)")
    (user.folder / "show.sbatch").write_text(script("single_node", {"gpus_per_node": 2, "program": "show.py"}))
    job = user.run("show.sbatch")
    assert job.status == 0, job.output
    assert job.output.count("sees 0,1\n") == 2, job.output
    own = ["./select_gpu.sh", "bash", "-c", 'echo "$SLURM_NODEID.$SLURM_LOCALID has $CUDA_VISIBLE_DEVICES"']
    two = ["srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    step = user.bed.run(*two, *own, cwd=user.folder, env=user.environment)
    assert sorted(step.stdout.splitlines()) == ["0.0 has 0", "0.1 has 1", "1.0 has 0", "1.1 has 1"], step


# ------------------------------------------------------------------------------------------------ the time limit


@needs_srun
@twice
def test_requeue(user: User) -> None:
    """The whole cycle: told through the script at some time; then told past it."""
    trains(user)
    job = user.submit("requeue.sbatch")
    output = user.output(job)
    user.made(random.randrange(2, 12))
    user.tell(job)
    user.says(job, "restart 1 of 10")
    user.made(7 + saved_by(output)[0])
    user.bed.run("scancel", "--signal=TERM", job)  # to the ranks, and not to the script
    done = user.bed.wait(job, output)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    told = re.findall(r"told to stop \((SIG\w+) on rank [0-3, ]+\): saved step \d+, .* of 60 s after", done.output)
    assert told == ["SIGUSR2", "SIGTERM"], done.output
    assert done.output.count("the program stopped with status 75; back to the queue") == 2
    assert "restart 2 of 10" in done.output
    assert "made all steps" in done.output
    runs, saved = runs_in(user.folder), saved_by(output)
    assert [run.begun for run in runs] == [0, *saved]
    assert [run.made for run in runs] == [*saved, STEPS]


def saved_by(output: Path) -> list[int]:
    return [int(step) for step in re.findall(r"saved step (\d+)", output.read_text())]


@pytest.mark.one_rank
@needs_srun
def test_requeue_of_a_program_that_knows_no_signals_and_its_cap(user: User) -> None:
    (user.folder / "deaf.py").write_text(
        "import time, mpistrategy as ms; ms.MirroredStrategy(); print('works on ', flush=True); time.sleep(60)"
    )
    text = script("requeue", {"nodes": 1, "tasks_per_node": 1, "program": "deaf.py", "max_restarts": 1})
    (user.folder / "deaf.sbatch").write_text(text)
    job = user.submit("deaf.sbatch")
    user.says(job, "works on")
    user.tell(job)
    user.says(job, "back to the queue")
    user.bed.until(lambda: user.output(job).read_text().count("works on") == 2, 60, "restart", user.output(job))
    user.tell(job)
    done = user.bed.wait(job, user.output(job))
    assert done.state == "FAILED", done.output
    assert done.status != 0
    assert "not done after 1 restarts; not requeued" in done.output


@pytest.mark.one_rank
@needs_srun
@twice
def test_chain(user: User) -> None:
    user.edit("chain.sbatch", "example.py", "--pause", "0.05", "--steps", "60")
    first = user.submit("chain.sbatch")
    user.says(first, "begins with step 1")
    user.tell(first)
    done = user.bed.wait(first, user.output(first))
    found = re.search(r"job (\d+) goes on after it", done.output)
    assert found, done.output
    assert (done.state, done.status) == ("FAILED", 75), done.output
    last = user.bed.wait(found[1], user.output(found[1]))
    assert (last.state, last.status) == ("COMPLETED", 0), last.output
    assert "example.py on 4 ranks: made all 60 steps" in last.output
    assert "the program is done; the chain ends here" in last.output
    assert "link 2 of 10" in last.output
    taken_back = re.search(r"job (\d+) goes on after it", last.output)
    assert taken_back, last.output
    assert user.bed.show(taken_back[1])["JobState"] == "CANCELLED"


# ------------------------------------------------------------------------------------------------ other homes


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)


@pytest.mark.one_rank
@needs_srun
@twice
def test_apptainer_with_a_stand_in(user: User) -> None:
    stand_in(
        user.folder,
        "apptainer",
        '[[ $1 == exec && -e $2 ]] || exit 9; echo "in $2"; shift 2; exec "$@"',
    )
    (user.folder / "image.sif").touch()
    user.environment["PATH"] = f"{user.folder}:{user.environment['PATH']}"
    job = user.run("apptainer.sbatch")
    check(job, 4)
    assert job.output.count("in image.sif\n") == 4


@pytest.mark.one_rank
@needs_srun
@twice
def test_pyxis_with_a_stand_in(user: User) -> None:
    if not user.bed.has_pyxis:
        pytest.skip("not run: the stand-in, a plugin of Slurm, takes a C compiler")
    job = user.run("pyxis.sbatch")
    check(job, 4)
    told = f"pyxis: image ./image.sqsh, mounts {user.folder}:{user.folder}, workdir {user.folder}\n"
    assert job.output.count(told) == 4, job.output


@needs_srun
@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="not run: packs a virtual environment, and there is none")
@twice
def test_staged_env(user: User) -> None:
    """tests/cli/test_slurm_stage.py shows it where another user is there first."""
    packages = Path(MPI.__file__).parents[1].relative_to(sys.prefix)
    kept = ["pyvenv.cfg", *(f"bin/{path.name}" for path in Path(sys.prefix, "bin").glob("python*"))]  # links in a chain
    kept += [
        str(path.relative_to(sys.prefix)) for path in Path(sys.prefix, "lib").iterdir() if path.name[:6] != "python"
    ]
    kept += [str(packages / name) for name in ("mpi4py", "numpy", "numpy.libs")]
    kept = [name for name in kept if Path(sys.prefix, name).exists()]
    archive = user.folder / "environment.tar.gz"
    subprocess.run(
        ["tar", "-C", sys.prefix, "--exclude=tests", "--exclude=__pycache__", "-cf", str(archive), *kept], check=True
    )
    text = script("staged_env", {"local": str(user.bed.local), "arguments": "--steps 10"})
    (user.folder / "staged.sbatch").write_text(text)
    user.environment["PATH"] = os.environ["PATH"]
    check(user.run("staged.sbatch"), 4, "made all 10 steps")
    assert [user.bed.on(node, "ls", str(user.bed.local)).stdout for node in ("node1", "node2")] == ["", ""]
