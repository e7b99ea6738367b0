"""Right layout or no start: launches that must be refused, those that must not, and ranks that do not fit together."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import launching
import pytest
from mpi4py import MPI
from replicas import RANK, SIZE, all_raise, still_works

import mpistrategy as ms
from mpistrategy.errors import LaunchError
from mpistrategy.mpi.job import launcher
from mpistrategy.mpi.job.launcher import ALONE, check_world

MPICH, OPEN_MPI, INTEL = "MPICH 5.0.2", "Open MPI v5.0.11", "Intel MPI Library 2021.18"
ROOT = Path(__file__).resolve().parents[3]

# ------------------------------------------------------------------------------------- the decision

BATCH = {
    "SLURM_JOB_ID": "6",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TASK_PID": "140",
}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
OMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-1@1"}
JSRUN = {"LSB_JOBID": "9", "LSB_DJOB_NUMPROC": "4", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "1"}
FLUX = {"FLUX_JOB_ID": "f23", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "FLUX_TASK_RANK": "3"}
FLUX |= {
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_URI": "local:///run/flux/local",
    "PMI_SIZE": "4",
    "PMI_RANK": "3",
    "PMI_FD": "9",
}

# name: environment, library, the rank, what the text must say of the launcher and of the cure
BROKEN = {
    "Hydra and Open MPI": (HYDRA, OPEN_MPI, 1, "the mpiexec of MPICH", "mpiexec of Open MPI v5.0.11"),
    "Open MPI's mpirun and MPICH": (OMPI, MPICH, 3, "the mpirun of Open MPI", "mpiexec of MPICH 5.0.2"),
    "Open MPI's mpirun and Intel MPI": (OMPI, INTEL, 3, "the mpirun of Open MPI", "mpiexec of Intel MPI"),
    "Hydra whose pipe was closed": (HYDRA, MPICH, 1, "the mpiexec of MPICH", "cannot reach its launcher"),
    "mpirun whose server was lost": (OMPI, OPEN_MPI, 3, "the mpirun of Open MPI", "cannot reach its launcher"),
    "a Hydra that tells only of its node": (
        {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
        OPEN_MPI,
        1,
        "the mpiexec of MPICH",
        "mpiexec of Open MPI",
    ),
    "srun --mpi=none and MPICH": (STEP, MPICH, 2, "srun started it", "srun --mpi=pmi2"),
    "srun --mpi=none and Open MPI": (STEP, OPEN_MPI, 2, "srun started it", "srun --mpi=pmix"),
    "srun --mpi=none and Intel MPI": (STEP, INTEL, 2, "srun started it", "srun --mpi=pmi2"),
    "srun --mpi=pmi2 and Open MPI": (
        STEP | {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_JOBID": "6.0"},
        OPEN_MPI,
        2,
        "srun started it",
        "srun --mpi=pmix",
    ),
    "srun --mpi=pmix and an MPI that does not know it": (
        STEP | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.6.0"},
        MPICH,
        2,
        "srun started it",
        "srun --mpi=pmi2",
    ),
    "srun in a job array": (
        STEP | {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "5"},
        MPICH,
        2,
        "srun started it",
        "srun --mpi=pmi2",
    ),
    "jsrun": (JSRUN, MPICH, 1, "jsrun started it", "mpiexec of MPICH"),
    "jsrun, which sets Open MPI's variables, too": (
        JSRUN | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        OPEN_MPI,
        1,
        "jsrun started it",
        "jsrun starts ranks of IBM Spectrum MPI",
    ),
    "flux run and Open MPI": (FLUX, OPEN_MPI, 3, "flux run started it", "`flux run -o pmi=pmix` (with flux-pmix"),
    "flux run -o pmi=off and MPICH": (
        {key: value for key, value in FLUX.items() if key[:4] == "FLUX"},
        MPICH,
        3,
        "flux run started it",
        "`flux run -o pmi=simple`, or with the mpiexec of MPICH 5.0.2 inside `flux batch`",
    ),
    "mpiexec in a job of Flux of one task": (
        HYDRA | {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0", "FLUX_JOB_ID": "f23"},
        OPEN_MPI,
        1,
        "the mpiexec of MPICH",
        "mpiexec of Open MPI",
    ),
    "mpirun_rsh": (
        {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "1"},
        OPEN_MPI,
        1,
        "MVAPICH",
        "mpiexec of Open MPI",
    ),
}
INTERACTIVE, BATCH_STEP = str(0xFFFFFFFA), str(0xFFFFFFFB)  # what Slurm calls them
#: The environment, and how many ranks MPI says there are.
VALID = {
    "python on a laptop": ({}, 1),
    "python in an sbatch script": (BATCH, 1),
    "python in an sbatch script, numbered": (BATCH | {"SLURM_STEP_ID": BATCH_STEP, "SLURM_STEP_NUM_TASKS": "4"}, 1),
    "python in a shell of salloc": ({"SLURM_JOB_ID": "6", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}, 1),
    "python in a shell of salloc on a node": (STEP | {"SLURM_STEP_ID": INTERACTIVE}, 1),
    "python in a shell of srun --pty": (STEP | {"SLURM_PTY_PORT": "44449", "SLURM_PROCID": "0"}, 1),
    "a job array's task": (BATCH | {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "9"}, 1),
    "sbatch from inside a step with PMI": (BATCH | {"PMI_JOBID": "5.0", "PMI_RANK": "0", "PMI_SIZE": "4"}, 1),
    "mpirun -n 2 inside a larger allocation": (
        STEP | {"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"},
        2,
    ),
    "mpirun -n 1 whose daemons srun started": (
        STEP | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        1,
    ),
    "mpiexec -n 1": ({"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, 1),
    "mpiexec -n 1 in a rank": (OMPI | {"PMI_RANK": "0", "PMI_SIZE": "1"}, 1),
    "srun -n 1": (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1),
    "srun -n 4": (STEP | {"PMI_RANK": "2", "PMI_SIZE": "4"}, 4),
    "jsrun -n 1": (JSRUN | {"JSM_NAMESPACE_SIZE": "1", "JSM_NAMESPACE_RANK": "0"}, 1),
    "python in a batch script of LSF": ({"LSB_JOBID": "9", "LSB_DJOB_NUMPROC": "4", "LSB_MCPU_HOSTS": "a 2 b 2"}, 1),
    "flux run -n 4": (FLUX, 4),
    "python in a shell of flux alloc": ({"FLUX_URI": "local:///tmp/flux/local-0", "FLUX_ENCLOSING_ID": "f23"}, 1),
    "mpiexec -n 1 in a rank of flux run": (FLUX | {"PMI_SIZE": "1", "PMI_RANK": "0"}, 1),
    "single programs on purpose": (STEP | {ALONE: "1"}, 1),
    "numbers of 5,000 digits": ({"PMI_SIZE": 5000 * "9", "PMI_RANK": "0", "SLURM_STEP_ID": 5000 * "9"}, 1),
    "numbers that are none": ({"PMI_SIZE": "many", "PMI_RANK": "0", "SLURM_STEP_ID": "batch"}, 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_launch_is_refused(name: str) -> None:
    environment, library, rank, launcher, cure = BROKEN[name]
    with pytest.raises(LaunchError) as refused:
        check_world(1, library, environment=environment)
    text = str(refused.value)
    tasks = 2 if "only of its node" in name else 4
    assert f"rank {rank} of {tasks}" in text
    assert launcher in text
    assert cure in text
    assert "MPISTRATEGY_ALONE=1" in text
    check_world(1, library, environment=environment | {ALONE: "1"})
    check_world(4, library, environment=environment)  # MPI sees them all


@pytest.mark.parametrize("name", VALID)
def test_a_valid_launch_is_not_refused(name: str) -> None:
    environment, size = VALID[name]
    check_world(size, MPICH, environment=environment)


# ------------------------------------------------------------------------------------- real launches

PROGRAM = """
import mpistrategy as ms
strategy = ms.MirroredStrategy()
print("replicas:", strategy.num_replicas_in_sync, flush=True)
"""


def alone(folder: Path, *, told: dict[str, str], run: bool = False, shell: bool = False) -> launching.Finished:
    """Run PROGRAM without a launcher, in the environment that one would have made; maybe in a shell in between."""
    program = launching.program(PROGRAM, folder)
    command = [sys.executable, "-W", "ignore", *(["-m", "mpistrategy", "run"] if run else []), str(program)]
    if shell:
        command = ["sh", "-c", f"{shlex.join(command)}; exit $?"]
    kept = {k: v for k, v in launching.environment().items() if not k.startswith("SLURM_")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # This process has MPI in it, but was not told the same: it is taken for a launcher.
    done = subprocess.run(
        command,
        env=kept | {"PYTHONPATH": path} | told,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=folder,
    )
    return launching.Finished(command, done.returncode, done.stdout, done.stderr, 0.0)


@pytest.mark.each_mpi
@pytest.mark.parametrize("shell", [False, True])
@pytest.mark.parametrize("run", [False, True])
def test_what_srun_starts_without_pmi_does_not_run(
    launch: launching.Launch, tmp_path: Path, run: bool, shell: bool
) -> None:
    job = alone(tmp_path, told=STEP, run=run, shell=shell)
    assert job.returncode == (2 if run else 1), job
    assert "replicas" not in job.stdout
    assert "srun started it as rank 2 of 4" in job.stderr, job
    assert ("Traceback" in job.stderr) is not run


@pytest.mark.each_mpi
@pytest.mark.parametrize("told", [BATCH, STEP | {"SLURM_PTY_PORT": "1"}, STEP | {ALONE: "1"}])
def test_what_runs_alone_in_an_allocation_runs(launch: launching.Launch, tmp_path: Path, told: dict[str, str]) -> None:
    assert alone(tmp_path, told=told).check().stdout == "replicas: 1\n"


def test_a_strategy_of_one_rank_on_purpose_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    with ms.MirroredStrategy(communicator=MPI.COMM_SELF) as strategy:
        assert strategy.num_replicas_in_sync == 1


# ------------------------------------------------------------------------------------- do the ranks fit together


@pytest.mark.mpi(min_size=2)
def test_different_versions_are_refused_on_every_rank(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    if RANK == SIZE - 1:
        monkeypatch.setattr(launcher, "versions", lambda: "mpistrategy 9.9, Python 3.11")
    all_raise(
        LaunchError,
        ms.MirroredStrategy,
        words=["different versions: ", f"mpistrategy 9.9, Python 3.11 on rank {SIZE - 1}; expected"],
    )
    monkeypatch.undo()
    assert still_works(strategy)
    with ms.MirroredStrategy() as another:
        assert still_works(another)
