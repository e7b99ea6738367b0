"""Before MPI starts: what would abort or crash is refused in words, and a rank that waits says who has not come."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import pytest
from mpi4py import MPI
from replicas import long_lane

import mpistrategy
from mpistrategy.mpi.job import before_mpi, launcher

Launch = Callable[..., launching.Finished]

MPICH, OPEN_MPI = "MPICH 5.0.2", "Open MPI v5.0.11"
PMIX = {"PMIX_NAMESPACE": "a", "PMIX_RANK": "1"}
OMPI = PMIX | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
STEP = PMIX | {"SLURM_JOB_ID": "6", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALNRANKS": "2"}
SOURCE = Path(mpistrategy.__file__).parents[1]
FREE = 2**40

one_rank = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts processes: runs in the session on 1 rank")
small_shm = pytest.mark.skipif(
    bool(os.geteuid())
    or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="not run: needs root and mount namespaces",
)


def told(library: str, environment: dict[str, str]) -> str:
    """Return why a library would not start; "" where nothing is known against it."""
    claim = launcher.claim_in(environment)
    return str(before_mpi.refusal("here", library, environment, claim) or "")


# ------------------------------------------------------------------------------------- the decisions


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("environment", "found", "cure"),
    [
        (STEP, "srun; SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=1", "srun --mpi=pmi2"),
        (OMPI, "the mpirun of Open MPI; OMPI_COMM_WORLD_SIZE=4", "mpiexec of MPICH 5.0.2"),
        (PMIX, "PMIX_NAMESPACE in the environment", "env -u PMIX_NAMESPACE"),
        (PMIX | HYDRA, "variables of two launchers", "env -u PMIX_NAMESPACE"),
    ],
)
def test_an_mpich_without_pmix_is_refused_where_pmix_is_offered(
    environment: dict[str, str], found: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before_mpi, "_speaks_pmix", lambda: False)
    text = told(MPICH, environment)
    assert found in text
    assert cure in text.partition("; expected ")[2]
    assert told(OPEN_MPI, environment) == ""
    assert told(MPICH, environment | {"MPIR_CVAR_PMI_VERSION": "1"}) == "", "the user has chosen"
    monkeypatch.setattr(before_mpi, "_speaks_pmix", lambda: True)
    assert told(MPICH, environment) == "", "one that was built with PMIx"


@pytest.mark.one_rank
def test_one_process_of_an_older_mpich_starts_beside_pmix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_mpi, "_speaks_pmix", lambda: False)
    assert told("MPICH 4.0.2", PMIX) == ""
    assert "would abort" in told("MPICH 4.0.2", STEP)


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        (HYDRA, 2),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, 2),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 1),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "0"}, 3),
        (HYDRA | {"MPI_LOCALNRANKS": "nonsense"}, 1),
        ({"JSM_NAMESPACE_SIZE": "9", "JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_LOCAL_SIZE": "4"}, 4),
        ({"FLUX_JOB_SIZE": "9", "FLUX_TASK_RANK": "0", "FLUX_JOB_NNODES": "2"}, 5),
    ],
)
def test_the_need_is_that_of_the_ranks_of_the_node(
    environment: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2**20 - 1  # a single rank of MPICH needs a little more
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 1, FREE, free, free, 0, 0, 0, 0, 255)))
    monkeypatch.setattr(os, "listdir", lambda path: [])
    text = told(MPICH, {name: value for name, value in environment.items() if name != "PMIX_NAMESPACE"})
    assert f"takes {ranks * 1.0078 + 0.0078:.1f} MiB for {ranks} rank" in text
    assert told(OPEN_MPI, environment) == "", "it takes another way where there is no room"
    assert told(MPICH, HYDRA | {"MPIR_CVAR_NOLOCAL": "1"}) == ""
    assert told(MPICH, HYDRA | {"MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS": "16"}) == ""


# ------------------------------------------------------------------------------------- real processes


def start(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        arguments,
        env=launching.environment() | {"PYTHONPATH": path} | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@one_rank
@pytest.mark.skipif(launching.IS_OPEN_MPI, reason="Open MPI speaks PMIx")
@pytest.mark.parametrize(
    "arguments",
    [["-m", "mpistrategy", "run", "-c", "print('on')"], ["-c", "import mpistrategy as ms; ms.MirroredStrategy()"]],
    ids=["run", "strategy"],
)
def test_mpich_under_pmix_is_refused_before_it_aborts(arguments: list[str]) -> None:
    done = start(sys.executable, *arguments, env=STEP)
    assert done.returncode in (1, 2), done
    assert "srun --mpi=pmi2" in done.stderr, done
    assert "Fatal error" not in done.stderr, done


@one_rank
@small_shm
@pytest.mark.skipif(launching.IS_OPEN_MPI, reason="Open MPI takes another way where there is no room")
@pytest.mark.slow
def test_mpich_without_room_is_refused_and_the_cure_works() -> None:
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    program = [sys.executable, "-c", "import mpistrategy as ms; print(ms.MirroredStrategy().num_replicas_in_sync)"]
    job = [*mount, *launching._mpiexec(), "-n", "2", *program]
    done = start(*job)
    assert done.returncode == 1, done
    assert "1.0 MiB free in /dev/shm, where MPICH" in done.stderr, done
    cure = re.search(r"export (\w+)=(\d+)", done.stderr)
    assert cure is not None, done
    cured = start(*job, env={cure[1]: cure[2]})
    assert (cured.returncode, cured.stdout.split()) == (0, ["2", "2"]), cured


@pytest.mark.each_mpi
def test_mpi_is_started_as_mpi4py_starts_it(launch: Launch) -> None:
    """Also where its library is looked at first: the level of threads, errors as exceptions, the end."""
    job = launch(
        2,
        """
        import os, mpi4py
        from mpistrategy.mpi.job import before_mpi, launcher
        before_mpi._start_checked("here", os.environ, launcher.claim_in(os.environ))
        from mpi4py import MPI
        assert MPI.Query_thread() == MPI.THREAD_MULTIPLE and MPI.COMM_WORLD.size == 2
        assert (mpi4py.rc.initialize, mpi4py.rc.finalize) == (True, None)
        try:
            MPI.COMM_WORLD.Send(b"", 17)
        except MPI.Exception:
            print("raised")
        """,
    ).check()
    assert job.stdout.split() == ["raised"] * 2, job


STOPPED = """
import os, signal, sys, time
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 2:
    time.sleep(60)
{start}
"""
STARTS = {
    "MirroredStrategy": "import mpistrategy as ms\nms.MirroredStrategy()",
    "mpistrategy run": "from mpistrategy.cli import main\nsys.exit(main.main(['run', '-c', 'pass']))",
}


@pytest.mark.each_mpi
@pytest.mark.parametrize("where", [pytest.param("MirroredStrategy", marks=long_lane), "mpistrategy run"])
def test_who_is_stopped_before_the_first_strategy_is_told_by_those_that_wait(launch: Launch, where: str) -> None:
    job = launch(4, STOPPED.format(start=STARTS[where]), env={"MPISTRATEGY_TIMEOUT_SECONDS": "2"}, timeout=40)
    assert job.returncode != 0, job
    assert job.stderr.count("MPI has not started") == 1, job
    assert re.search(
        rf"\[rank [03]/4\] {where}: MPI has not started after 2 s\. On \S+, rank 1 is stopped \(SIGSTOP.*\): kill "
        r"-CONT \d+; rank 2 is alive, and has not come to the start of MPI \(process \d+\)\.",
        job.stderr,
    ), job


HOLDS = """
import ctypes, sys
from mpistrategy.mpi.job.start_alarm import alarm
with alarm({seconds}, "echo said >&2", 7):
    ctypes.PyDLL(None).sleep({held})  # as MPI does: the interpreter is held
print("done")
"""


@one_rank
def test_an_alarm_speaks_and_ends_a_process_whose_interpreter_is_held() -> None:
    late = start(sys.executable, "-c", HOLDS.format(seconds=0.2, held=50))
    assert (late.returncode, late.stdout, late.stderr) == (7, "", "said\n"), late
    in_time = start(sys.executable, "-c", HOLDS.format(seconds=30, held=0))
    assert (in_time.returncode, in_time.stdout, in_time.stderr) == (0, "done\n", ""), in_time
