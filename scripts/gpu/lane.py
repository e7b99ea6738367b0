"""What the rows of the GPU lane share: facts of the machine, and jobs that end whatever hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "MPISTRATEGY_GPU_LANE"
SOON = 3  # seconds that a job has to end when it is asked to
HELPERS = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "doubles", "jobs"))]
PROBE = """
import json, platform
import cupy, hypothesis, ml_dtypes, pytest, pytest_mpi, pytest_timeout
from mpi4py import MPI

runtime = cupy.cuda.runtime
assert float(cupy.ones(3).sum()) == 3
facts = {"python": platform.python_version(), "cupy": cupy.__version__, "driver": runtime.driverGetVersion()}
facts |= {"device": runtime.getDeviceProperties(0)["name"].decode(), "gpus": runtime.getDeviceCount()}
facts |= {"mpi": MPI.Get_library_version().splitlines()[0], "torch with CUDA": False}
try:
    import torch
    facts["torch with CUDA"] = torch.cuda.is_available()
except ImportError:
    pass
print("PROBE " + json.dumps(facts))
"""


@dataclass(frozen=True)
class Ended:
    """A job that is over: its exit status, None if its time was up, and what it has printed."""

    status: int | None
    output: str

    @property
    def why(self) -> str:
        """What to say of a job that has failed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or line.startswith("E  ")]
        last = (errors or lines or ["it printed nothing"])[-1]
        return f"{'its time was up' if self.status is None else f'exit status {self.status}'}: {last[:160]}"


@dataclass
class Lane:
    """The machine, and how jobs are started on it.

    Attributes:
        on_cpu: whether a processor stands in for the GPU of the real CuPy.
        logs: the folder of what the rows print.
        work: a folder for what nobody wants to keep.
        environment: of all jobs.
        facts: of machine and packages.
        paths: those that arrays in GPU memory can take here, so far.
    """

    on_cpu: bool
    logs: Path
    work: Path
    environment: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)

    @property
    def patience(self) -> int:
        """How many times as long as on a quiet machine jobs may take, beside others or where a processor is the GPU."""
        return 30 if self.on_cpu else 3

    def job(self, name: str, command: Sequence[object], seconds: float, **environment: str) -> Ended:
        """Run a command; whatever it has started is gone afterwards."""
        mark, log = uuid.uuid4().hex, self.logs / f"{name}-{len(list(self.logs.iterdir()))}.txt"
        status: int | None = None
        with log.open("w") as output:
            job = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.environment, **environment, MARK: mark},
                cwd=self.work,
                start_new_session=True,
            )
            with suppress(subprocess.TimeoutExpired):
                status = job.wait(seconds * self.patience)
            _end(job, mark)
        return Ended(status, log.read_text(errors="replace"))

    def ranks(self, name: str, ranks: int, arguments: Sequence[object], seconds: float, **environment: str) -> Ended:
        """Run ``python ARGUMENTS...`` on so many ranks."""
        mpiexec = shutil.which("mpiexec") or Path(sys.executable).with_name("mpiexec")
        flags = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if "Open MPI" in self.facts["mpi"] else []
        return self.job(name, [mpiexec, *flags, "-n", ranks, sys.executable, *arguments], seconds, **environment)

    def prepare(self) -> str:
        """Look for GPU, packages and MPI; return what is wrong, or ""."""
        if self.on_cpu:
            sys.path.insert(0, str(ROOT / "tests"))
            from cuda_on_cpu.build import CannotBuildError, build_once

            try:
                self.environment |= build_once(Path(sys.prefix))
            except CannotBuildError as error:
                return f"nothing can stand in for a GPU here ({error})"
        self.environment["PYTHONPATH"] = ":".join([*HELPERS, self.environment.get("PYTHONPATH", "")])
        ended = self.job("probe", [sys.executable, "-c", PROBE], 90)
        if ended.status != 0:
            return f"no GPU that works with CuPy, or a package or MPI is missing ({ended.why})"
        self.facts |= json.loads(ended.output.partition("PROBE ")[2].splitlines()[0])
        return ""


def _end(job: subprocess.Popen[bytes], mark: str) -> None:
    """End a job and what it has started, which carries its mark, and nothing else."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, number)
            with suppress(subprocess.TimeoutExpired):
                job.wait(SOON)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def environment(on_cpu: bool, work: Path) -> dict[str, str]:
    """Return the environment of the jobs: no launcher's words, one thread a rank, and caches of this run alone."""
    launchers = ("PMI", "PMIX", "OMPI_", "PRTE_", "HYDRA", "HYDI_", "MPI_LOCAL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    kept |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    kept |= {"CUPY_CACHE_DIR": str(work / "cupy"), "XDG_CACHE_HOME": str(work / "cache")}
    kept |= {"PYTHONUNBUFFERED": "1", "MPISTRATEGY_TEST_GPU": "1"}
    if on_cpu:
        return kept | {"STANDIN_DEVICES": "2", "STANDIN_DELAY_US": "50", "MPISTRATEGY_CUDA_AWARE": "1"}
    return kept | {"PYTHONPYCACHEPREFIX": str(work / "bytecode")}
