"""Faults that are planted in what a job really meets: the doctor's verdicts and cures are right, none goes unnamed.

Where no machine for tests has the fault (a fast network), a stand-in of what the doctor reads has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import launching
import pytest
from mpi4py import MPI

import mpistrategy

Launch = Callable[..., launching.Finished]
SOURCE = str(Path(mpistrategy.__file__).parents[1])
IS_OPEN_MPI = launching.IS_OPEN_MPI

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts jobs: runs in the session on 1 rank")

PROGRAM = """
import os, sys, time
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
sys.path[:0] = {helpers!r}
{plant}
from mpistrategy.cli import main as cli
status = cli.main(["doctor", "--json", *{options!r}])
sys.exit(status)
"""


@dataclass(frozen=True)
class Fault:
    """What is planted, and what the doctor says.

    Attributes:
        plant: code that each rank runs first.
        check, verdict, found, fix: the check, its verdict, and words of what it says.
        ranks: how many; 0 for a process without a launcher.
        env: variables of the environment.
        options: of the doctor.
    """

    plant: str
    check: str
    verdict: str
    found: str
    fix: str
    ranks: int = 2
    env: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


STEP = {"SLURM_JOB_ID": "6", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
OTHER = (
    {"PMI_SIZE": "2", "PMI_RANK": "0"} if IS_OPEN_MPI else {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
)
NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}
#: MPICH counts two nodes, which have names of their own.
NAMED = "uname = os.uname()\nos.uname = lambda: os.uname_result((uname[0], f'node{rank}', *uname[2:]))\n"

FAULTS = {
    "no MPI": Fault(
        "", "mpi", "bad", "no MPI library", "pip install mpich", 0,
        {"MPI4PY_LIBMPI": "/opt/none/libmpi.so.12"},
    ),
    "launcher of another MPI": Fault("", "launch", "bad", "2 programs of one rank each", "are of two MPIs", 0, OTHER),
    "srun without PMI": Fault("", "launch", "bad", "srun started it as rank 0 of 2", "srun --mpi=pmi", 0, STEP),
    "fewer ranks than wanted": Fault(
        "", "launch", "bad", "2 ranks where 3 were asked for", "mpiexec -n 3", options=("--ranks", "3")
    ),
    "a rank that stops after MPI has started": Fault(
        "if rank: import mpi4py.MPI, signal; os.kill(os.getpid(), signal.SIGSTOP)", "launch", "bad",
        "no answer from rank 1 of 2", "hostname", options=("--timeout", "6"),
    ),
    "too many threads": Fault(
        "", "cores", "bad", "OMP_NUM_THREADS=16", "export OMP_NUM_THREADS=",
        env={"OMP_NUM_THREADS": "16", "OPENBLAS_NUM_THREADS": "16"},
    ),
    "threads that nobody has set": Fault(
        "for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'): os.environ.pop(name)\n"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])",
        "cores", "bad", "no OMP_NUM_THREADS is set", "export OMP_NUM_THREADS=1",
    ),
    "all ranks bound to one core": Fault(
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "cores", "bad", "2 ranks share", "Give each its own"
    ),
    "more ranks than cores": Fault(
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nos.cpu_count = lambda: 1", "cores", "note",
        "they take turns", "at most 1 ranks",
    ),
    "another version of NumPy": Fault(
        "import numpy\nif rank: numpy.__version__ = '1.0.0'", "versions", "bad", "1.0.0 on rank 1", "one environment"
    ),
    "another version of this package": Fault(
        "import mpistrategy\nif rank: mpistrategy.__version__ = '0.0.9'", "versions", "bad", "0.0.9 on rank 1",
        "echo $PYTHONPATH",
    ),
    "MPI for one thread": Fault(
        "", "thread level", "bad", "single", "unset MPI4PY_RC_THREAD_LEVEL", env={"MPI4PY_RC_THREAD_LEVEL": "single"}
    ),
    "other variables on one rank": Fault(
        "if rank: os.environ['MPI4PY_RC_THREAD_LEVEL'] = 'serialized'", "thread level", "bad", "serialized on rank 1",
        "for all ranks alike",
    ),
    "two MPIs in one process": Fault(
        "import mmap, tempfile\nfolder = tempfile.TemporaryDirectory()\n"
        "file = open(f'{folder.name}/libmpi.so.99', 'w+b')\nfile.write(bytes(4096)); file.flush()\n"
        "held = mmap.mmap(file.fileno(), 0)",
        "mpi", "bad", "libmpi.so.99", "LD_DEBUG=libs",
    ),
    "one GPU for two ranks": Fault(
        "from gpu_here import visible\ngpu = visible('GPU-1')\ngpu.__enter__()", "gpus", "bad", "ranks 0, 1",
        "--gpus-per-task=1",
    ),
    "GPUs that a variable hides": Fault(
        "import glob\nfound = glob.glob\n"
        "glob.glob = lambda path, **how: ['/dev/nvidia0'] if 'nvidia' in path else found(path, **how)",
        "gpus", "bad", "hides", "unset CUDA_VISIBLE_DEVICES",
        env={"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "1"},
    ),
    "no memory left in the control group": Fault(
        "from mpistrategy.cli.doctor import facts\nfrom mpistrategy.mpi.shared_memory import memory_limits\n"
        "facts.memory = lambda: memory_limits.Room(2**16, 2**20, 'what memory.max allows')",
        "shared memory", "bad", "what memory.max allows", "--mem=",
    ),
    "a slow file system": Fault(
        "from mpistrategy.cli.doctor import facts\nfacts.seconds_since_start = lambda: 48.0",
        "start", "note", "imports took 48.0 s", "staged_env",
    ),
}  # fmt: skip
OF_MPICH = {
    "a PMI that MPICH does not speak": Fault(
        "", "pmi", "bad", "offers PMIx, which MPICH", "srun --mpi=pmi2", 0, {"PMIX_NAMESPACE": "a", **STEP}
    ),
    "ranks of a host that share no memory": Fault("", "nodes", "bad", "share no memory", "--ipc=host", env=NODES),
    "TCP beside a fast network": Fault(
        f"{NAMED}from mpistrategy.cli.doctor import network\nnetwork.fabric = lambda: 'InfiniBand'",
        "network", "bad", "beside InfiniBand", "FI_PROVIDER", env=NODES | {"FI_PROVIDER": "tcp"},
    ),
}  # fmt: skip


SECRETS = {
    "WANDB_API_KEY": "0f3c9a7be1d2", "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.payload.signature",
    "SLURM_JOB_COMMENT": "token=s3cr3t-of-mine", "MY_SECRET": "hunter2hunter2", "DB_PASSWORD": "correct horse",
}  # fmt: skip
#: Faults that do not hide each other are planted in one job.
TOGETHER = (
    ("too many threads", "another version of NumPy", "a slow file system"),
    ("another version of this package", "MPI for one thread", "two MPIs in one process", "one GPU for two ranks"),
    ("other variables on one rank", "no memory left in the control group", "GPUs that a variable hides"),
)
ALL = FAULTS | ({} if IS_OPEN_MPI else OF_MPICH)  # a fault of MPICH's, or one that MPICH can play
JOBS = [*TOGETHER, *((name,) for name in ALL if not any(name in some for some in TOGETHER))]


def judge(stdout: str, faults: Sequence[Fault]) -> None:
    """Fail unless the doctor has said what it should, and nothing worse of anything else than a note."""
    told = json.loads(stdout[stdout.index("{") :])["findings"]
    allowed = {"pmi", "cuda-aware"} & {{"launch": "pmi", "gpus": "cuda-aware"}.get(fault.check) for fault in faults}
    for fault in faults:
        mine = [each for each in told if each["check"] == fault.check and each["verdict"] == fault.verdict]
        assert any(fault.found in each["found"] and fault.fix in each["fix"] for each in mine), (fault, told)
        allowed.add(fault.check)
    bad = {each["check"] for each in told if each["verdict"] == "bad"}
    assert bad <= allowed, told
    assert all(each["fix"] for each in told if each["verdict"] != "ok"), "no fault without a cure"


@pytest.mark.parametrize("names", JOBS, ids=", ".join)
def test_a_planted_fault_is_named_with_its_cure(launch: Launch, names: Sequence[str], tmp_path: Path) -> None:
    faults = [ALL[name] for name in names]
    if "all ranks bound to one core" in names and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: there is nothing to bind")
    (options,), (ranks,) = {fault.options for fault in faults}, {fault.ranks for fault in faults}
    environment = SECRETS | {name: value for fault in faults for name, value in fault.env.items()}
    plant = "\n".join(fault.plant for fault in faults)
    source = PROGRAM.format(helpers=[SOURCE, *launching.HELPERS], plant=plant, options=list(options))
    if ranks:
        job = launch(ranks, source, env=environment, timeout=50)
        status, stdout = job.returncode, job.stdout
    else:
        done = subprocess.run(
            [sys.executable, str(launching.program(source, tmp_path))],
            env=launching.environment() | environment,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        status, stdout = done.returncode, done.stdout
        if faults[0].check == "mpi" and status == 0:
            pytest.skip("this mpi4py is built for one MPI and takes no other")
    judge(stdout, faults)
    assert [name for name, value in SECRETS.items() if value in stdout] == []
    assert (status != 0) == any(fault.verdict == "bad" for fault in faults)


@pytest.mark.skipif(
    bool(os.geteuid())
    or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="not run: needs root and mount namespaces",
)
def test_no_room_in_dev_shm_is_named_with_its_cure() -> None:
    command = [*launching._mpiexec(), "-n", "2", sys.executable, "-m", "mpistrategy", "doctor", "--json"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh", *command],
        env=launching.environment() | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = "wants 16 MiB for each rank" if IS_OPEN_MPI else "it ends in a Bus error"
    fault = Fault("", "shared memory", "bad", said, "--shm-size")
    judge(done.stdout, [fault])
    # One node has no network, and what is slow there is not slow because of one.
    assert "network" not in "".join(each["fix"] for each in json.loads(done.stdout)["findings"])
