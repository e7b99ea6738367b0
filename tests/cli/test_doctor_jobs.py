"""The doctor in real jobs with real faults: verdicts and cures are right, and nothing else is bad."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import launching
import pytest

import mpistrategy
from mpistrategy.cli.doctor import cuda_trial
from mpistrategy.cli.ranks import Ranks
from mpistrategy.mpi.gpu.cuda_aware import Outcome

Launch = Callable[..., launching.Finished]
DOCTOR = ["-m", "mpistrategy", "doctor"]
SOURCE = str(Path(mpistrategy.__file__).parents[1])
of_mpich = pytest.mark.skipif(launching.IS_OPEN_MPI, reason="a fault of MPICH's, or one that MPICH can play")

PROGRAM = """
import os, sys
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
sys.path[:0] = {helpers!r}
{plant}
from mpistrategy.cli import main as cli
sys.exit(cli.main(["doctor", *{options!r}]))
"""


def program(plant: str, *options: str) -> str:
    """Return a program that plants a fault on each rank and runs the doctor."""
    return PROGRAM.format(helpers=[SOURCE, *launching.HELPERS], plant=plant, options=options)


class Said(NamedTuple):
    """What the doctor says of a fault: the check, its verdict, and words of what it found and of the cure."""

    check: str
    verdict: str
    found: str
    fix: str


#: MPICH counts two nodes.
NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}
#: Faults that do not hide each other: what the doctor says of them, what plants them, and variables.
JOBS: dict[str, tuple[tuple[Said, ...], str, dict[str, str]]] = {
    "threads, NumPy, variables of one rank, hidden GPUs": (
        (
            Said("cores", "bad", "OMP_NUM_THREADS=16", "export OMP_NUM_THREADS="),
            Said("versions", "bad", "1.0.0 on rank 1", "one environment"),
            Said("thread level", "bad", "serialized on rank 1", "for all ranks alike"),
            Said("gpus", "bad", "hides", "unset CUDA_VISIBLE_DEVICES"),
        ),
        "import numpy\nif rank:\n    numpy.__version__ = '1.0.0'\n"
        "    os.environ['MPI4PY_RC_THREAD_LEVEL'] = 'serialized'",
        {"OMP_NUM_THREADS": "16", "OPENBLAS_NUM_THREADS": "16", "CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "1"},
    ),
    "one thread, two MPIs, one GPU": (
        (
            Said("thread level", "bad", "single", "unset MPI4PY_RC_THREAD_LEVEL"),
            Said("mpi", "bad", "libmpi.so.99", "LD_DEBUG=libs"),
            Said("gpus", "bad", "ranks 0, 1", "--gpus-per-task=1"),
        ),
        "import mmap, tempfile\nfolder = tempfile.TemporaryDirectory()\n"
        "file = open(f'{folder.name}/libmpi.so.99', 'w+b')\nfile.write(bytes(4096)); file.flush()\n"
        "held = mmap.mmap(file.fileno(), 0)\n"
        "from gpu_here import visible\ngpu = visible('GPU-1')\ngpu.__enter__()",
        {"MPI4PY_RC_THREAD_LEVEL": "single"},
    ),
    "a host that shares no memory, TCP": (
        (
            Said("nodes", "bad", "share no memory", "--ipc=host"),
            Said("network", "bad", "beside InfiniBand", "FI_PROVIDER"),
        ),
        "from mpistrategy.cli.doctor import facts\nfacts.fabric = lambda: 'InfiniBand'",
        NODES | {"FI_PROVIDER": "tcp"},
    ),
}
SECRETS = {
    "WANDB_API_KEY": "0f3c9a7be1d2",
    "SLURM_JOB_COMMENT": "token=s3cr3t-of-mine",
    "DB_PASSWORD": "hunter2hunter2",
}


def judge(stdout: str, *said: Said) -> None:
    """Fail unless the doctor has said this, and that nothing else is bad."""
    findings = json.loads(stdout[stdout.index("{") :])["findings"]
    for check, verdict, found, fix in said:
        matches = [each for each in findings if (each["check"], each["verdict"]) == (check, verdict)]
        assert any(found in each["found"] and fix in each["fix"] for each in matches), (check, findings)
    bad = {each["check"] for each in findings if each["verdict"] == "bad"}
    assert bad <= {"cuda-aware", *(each.check for each in said)}, findings
    assert all(each["fix"] for each in findings if each["verdict"] != "ok"), "no fault without a cure"
    assert [name for name, value in SECRETS.items() if value in stdout] == []


@pytest.mark.parametrize(
    "names", [pytest.param(name, marks=of_mpich if NODES.items() <= JOBS[name][2].items() else ()) for name in JOBS]
)
def test_planted_faults_are_named_with_their_cures(launch: Launch, names: str) -> None:
    said, plant, env = JOBS[names]
    job = launch(2, program(plant, "--json"), env=SECRETS | env, timeout=50)
    judge(job.stdout, *said)
    assert job.returncode == 1, job


@pytest.mark.each_mpi
def test_a_job_that_is_well(launch: Launch) -> None:
    job = launch(2, DOCTOR)
    assert job.returncode == 0, job
    assert job.stdout.splitlines()[0] == "mpistrategy doctor: 2 ranks on 1 node", job
    assert job.stdout.count("mpistrategy doctor:") == 1, job
    assert re.search(r"^ok +sums +2 ranks meet and add up right$", job.stdout, re.M), job
    assert "BAD" not in job.stdout, job
    assert job.stderr == "", job


# ------------------------------------------------------------------------------------------------ before MPI starts

STEP = {"SLURM_JOB_ID": "6", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}


def alone(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "--json"],
        env=launching.environment() | {"PYTHONPATH": SOURCE} | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, Said("launch", "bad", "srun started it as rank 0 of 2", "srun --mpi=pmi")),
        pytest.param(
            {"PMIX_NAMESPACE": "a"},
            Said("launch", "bad", "offers PMIx, which MPICH", "srun --mpi=pmi2"),
            marks=of_mpich,
        ),
    ],
)
def test_a_launcher_or_its_pmi_that_mpi_does_not_know(env: dict[str, str], said: Said) -> None:
    done = alone(sys.executable, *DOCTOR, **STEP, **env)
    judge(done.stdout, said)
    assert done.returncode == 1


@pytest.mark.one_rank
@pytest.mark.skipif(
    bool(os.geteuid())
    or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="not run: needs root and mount namespaces",
)
def test_no_room_in_dev_shm_is_named_with_its_cure() -> None:
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    done = alone(*small, *launching._mpiexec(), "-n", "2", sys.executable, *DOCTOR)
    found = "wants 16 MiB for each rank" if launching.IS_OPEN_MPI else "it ends in a Bus error"
    judge(done.stdout, Said("shared memory", "bad", found, "--shm-size"))


# ------------------------------------------------------------------------------------------------ GPUs, missing ranks

CUPY = """
import numpy as np
from types import SimpleNamespace


class ndarray(np.ndarray):
    def set(self, other): self[...] = other
    def get(self, out): out[...] = self


asarray = lambda a: np.array(a).view(ndarray)
zeros_like = np.zeros_like
asnumpy = lambda a: np.asarray(a) + ({wrong} if a.size > 2**20 else 0)
stream = SimpleNamespace(synchronize=lambda: None)
cuda = SimpleNamespace(
    Device=lambda n: SimpleNamespace(use=lambda: None), get_current_stream=lambda: stream,
    runtime=SimpleNamespace(getDeviceCount=lambda: 1),
)
"""


@pytest.mark.slow
def test_gpu_memory_is_given_to_mpi_and_the_outcome_kept(launch: Launch, tmp_path: Path) -> None:
    """The word of the user says that MPI takes GPU memory; two ranks try it."""
    (tmp_path / "cupy.py").write_text(CUPY.format(wrong=0))
    (tmp_path / "cupyx.py").write_text("from numpy import empty as empty_pinned")
    path = os.pathsep.join((str(tmp_path), SOURCE))
    env = {"PYTHONPATH": path, "MPISTRATEGY_CUDA_AWARE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    plant = (
        f"sys.path.insert(0, {str(tmp_path)!r})\nfrom gpu_here import visible\ngpu = visible('GPU-1')\ngpu.__enter__()"
    )
    job = launch(2, program(plant, "--json"), env=env)
    shared = Said("gpus", "bad", "ranks 0, 1", "--gpus-per-task")
    judge(job.stdout, shared, Said("cuda-aware", "ok", "yes, tried: 2 ranks, ", ""))
    assert "gives GPU memory to MPI. If this ends here: export MPISTRATEGY_CUDA_AWARE=0" in job.stderr, job
    [kept] = (tmp_path / "mpistrategy").glob("*-gpu*")
    assert json.loads(kept.read_text())["outcome"] == "right"


@pytest.mark.one_rank
def test_gpu_memory_that_comes_back_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("cupy", CUPY.format(wrong=1)), ("cupyx", "from numpy import empty as empty_pinned")):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        exec(text, vars(sys.modules[name]))
    assert cuda_trial._trial(Ranks(), 0) == Outcome("wrong", "other numbers than were sent")


@pytest.mark.each_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stuck", "seconds"),
    [
        # All ranks start MPI before the clock of the doctor: on a busy machine that alone may take long.
        ("import mpi4py.MPI\nif rank == 2: import signal; signal.pause()", 5),
        ("if rank == 2: import time; time.sleep(60)", 1),
    ],
    ids=["later", "before MPI"],
)
def test_a_rank_that_does_not_come_is_named_or_the_doctor_ends_all_the_same(
    launch: Launch, stuck: str, seconds: int
) -> None:
    job = launch(3, program(stuck, "--timeout", str(seconds)), timeout=60)
    assert job.returncode != 0, job
    if "MPI" in stuck:
        # Of a busy machine, the start leaves little of the time, and another rank is late, too.
        assert re.search(r"no answer from ranks? (1, )?2 of 3 within \d+ s", job.stdout), job
    else:
        told = re.search(r"mpistrategy doctor: waited 1 s .* in MPI_Init, to which all 3 ranks must come", job.stderr)
        assert told or "2 of 3 within" in job.stdout, job
