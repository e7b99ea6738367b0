"""What the rows of the GPU lane share: jobs that end whatever hangs, and getting an MPI and packages."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAME, MARK = "mpistrategy", "MPISTRATEGY_GPU_LANE"
RIGHT, WRONG, NOT_RUN, ELSEWHERE = "ok", "WRONG", "not run", "waiting"
SOON = 3  # seconds that a job has to end when it is asked to

PROBE = """
import json, importlib
found = {"missing": [], "python": __import__("platform").python_version()}
for name in ("numpy", "mpi4py", "pytest", "pytest_mpi", "pytest_timeout", "hypothesis", "ml_dtypes"):
    try:
        importlib.import_module(name)
    except Exception as error:
        found["missing"].append(f"{name} ({error})")
try:
    import cupy
    runtime = cupy.cuda.runtime
    found["cupy"] = cupy.__version__
    found["driver"] = runtime.driverGetVersion()
    found["device"] = runtime.getDeviceProperties(0)["name"].decode()
    found["gpus"] = runtime.getDeviceCount()
    assert float(cupy.ones(3).sum()) == 3
except Exception as error:
    found["gpu_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("PROBE " + json.dumps(found))
"""


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: what `--only` calls it.
        what: in words.
        result: "ok", "WRONG", "not run" (something is missing) or "waiting" (for another machine, say with two GPUs).
        text: figures, or why there are none.
        limit: what the figures are measured by, in words.
        figures: the same for programs.
        seconds: how long it took.
    """

    name: str
    what: str
    result: str = NOT_RUN
    text: str = ""
    limit: str = ""
    figures: Any = None
    seconds: float = 0.0


@dataclass
class Ended:
    """A job that is over.

    Attributes:
        status: its exit status; None if its time was up.
        output: what it said.
    """

    status: int | None
    output: str

    @property
    def why(self) -> str:
        """What to tell somebody who asks why it failed."""
        said = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in said if "Error" in line or line.startswith("E  ")]
        last = (errors or said or ["it said nothing"])[-1]
        return f"{'its time was up' if self.status is None else f'exit status {self.status}'}: {last[:160]}"


@dataclass
class Lane:
    """What the steps share.

    Attributes:
        on_cpu: whether a processor stands in for the GPU of the real CuPy.
        logs: the folder of what the steps say.
        work: a folder for what nobody wants to keep.
        environment: of all jobs.
        until: when the row that runs must be over.
        mpiexec: the command that starts ranks; empty where there is none.
        facts: of machine and packages.
        python: the Python of all jobs.
        paths: those that arrays in GPU memory can take here.
    """

    on_cpu: bool
    logs: Path
    work: Path
    environment: dict[str, str]
    until: float
    mpiexec: list[str] = field(default_factory=list)
    python: str = sys.executable
    facts: dict[str, Any] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        return int(self.facts.get("gpus", 0))

    @property
    def patience(self) -> int:
        """How many times a row's own time it may take: beside others, or where a processor does a GPU's work."""
        return 10 if self.on_cpu else 3

    @property
    def seconds_left(self) -> float:
        """How long the row that runs may still take."""
        return max(1.0, self.until - time.monotonic())

    def job(self, name: str, command: Sequence[object], limit: float, **environment: str) -> Ended:
        """Run a command; whatever it has started is gone afterwards."""
        mark = uuid.uuid4().hex
        log = self.logs / f"{name}.txt"
        limit = min(limit * self.patience, self.seconds_left)
        status: int | None
        with log.open("a") as output:
            output.write(f"$ {shlex.join(map(str, command))}\n")
            output.flush()
            started = log.stat().st_size
            job = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.environment, **environment, MARK: mark},
                cwd=self.work,
                start_new_session=True,
            )
            try:
                status = job.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(job, mark)
        with log.open("rb") as file:
            file.seek(started)
            return Ended(status, file.read().decode(errors="replace"))

    def ranks(self, name: str, ranks: int, arguments: Sequence[object], limit: float, **environment: str) -> Ended:
        """Run ``python ARGUMENTS...`` on so many ranks."""
        command = [*self.mpiexec, "-n", str(ranks), self.python, *arguments]
        return self.job(name, command, limit, **environment)


def _end(job: subprocess.Popen[bytes], mark: str) -> None:
    """End a job and what it has started, which carries its mark, and nothing else."""
    for number, patience in ((signal.SIGTERM, SOON), (signal.SIGKILL, SOON)):
        if job.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, number)
            with suppress(subprocess.TimeoutExpired):
                job.wait(patience)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ getting ready


def environment() -> dict[str, str]:
    """Return the environment of the jobs: no launcher's words, one thread a rank."""
    launchers = ("PMI", "PMIX", "OMPI_", "PRTE_", "HYDRA", "HYDI_", "MPI_LOCAL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    kept |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    kept |= {"PYTHONUNBUFFERED": "1", "MPISTRATEGY_TEST_GPU": "1"}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return kept


def prepare(lane: Lane, folder: Path | None) -> str:
    """Install the wheels and unpack the MPI of `folder`; return what is wrong, or ""."""
    trouble = _stand_in(lane) if lane.on_cpu else ""
    if trouble:
        return trouble
    archives = sorted(folder.glob("*.tar.*")) if folder else []
    if len(archives) > 1:
        return f"{folder} holds {len(archives)} archives, and one MPI is wanted"
    helpers = [str(ROOT / "tests" / folder) for folder in ("", "doubles", "jobs")]
    paths = [str(ROOT), *helpers, lane.environment.get("PYTHONPATH", "")]
    # This tree is what is tried, and no wheel of it.
    wheels = [wheel for wheel in sorted(folder.glob("*.whl")) if wheel.name.split("-")[0] != NAME] if folder else []
    if wheels and (trouble := _install(lane, wheels)):
        return trouble
    # Neither measurements nor a GPU's kernels of other runs; and this one leaves none.
    lane.environment.setdefault("CUPY_CACHE_DIR", str(lane.work / "cupy"))
    lane.environment["XDG_CACHE_HOME"] = str(lane.work / "cache")
    lane.environment["PYTHONPYCACHEPREFIX"] = str(lane.work / "bytecode")
    lane.environment["PYTHONPATH"] = ":".join(filter(None, paths))
    if archives:
        trouble = _unpack(lane, archives[0])
        if trouble:
            return trouble
    return _find_mpiexec(lane)


def _install(lane: Lane, wheels: Sequence[Path]) -> str:
    """Install wheels into a virtual environment, where an MPI finds its files; return what is wrong, or ""."""
    made = lane.work / "site"
    ended = lane.job("wheels", [sys.executable, "-m", "venv", made], 60)
    if ended.status != 0:
        return f"no virtual environment can be made for the wheels ({ended.why})"
    lane.python = str(made / "bin" / "python")
    # What this Python has counts, too, behind the wheels.
    (packages,) = made.glob("lib/python*/site-packages")
    (packages / "of_the_python_that_runs_the_lane.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = [lane.python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    ended = lane.job("wheels", [*install, "--force-reinstall", *wheels], 120)
    if ended.status != 0:
        return f"pip could not install the wheels of {wheels[0].parent} ({ended.why})"
    lane.environment["PATH"] = f"{made / 'bin'}:{lane.environment['PATH']}"
    return ""


def _stand_in(lane: Lane) -> str:
    """Let the real CuPy find GPUs, which are this processor, and whose memory every MPI takes."""
    sys.path.insert(0, str(ROOT / "tests"))
    from cuda_on_cpu.build import CannotBuildError, build_once

    try:
        lane.environment |= {"MPISTRATEGY_CUDA_AWARE": "1", **build_once(Path(sys.prefix))}
    except CannotBuildError as error:
        return f"nothing can stand in for a GPU here ({error})"
    lane.environment = {"STANDIN_DEVICES": "2", "STANDIN_DELAY_US": "50", **lane.environment}
    return ""


def _unpack(lane: Lane, archive: Path) -> str:
    ended = lane.job("mpi", ["tar", "-xf", archive, "-C", lane.work], 60)
    found = sorted(lane.work.glob("*/env.sh"))
    if ended.status != 0 or not found:
        return f"{archive} could not be unpacked, or has no env.sh ({ended.why})"
    script = f"source {shlex.quote(str(found[0]))} && env -0 > {shlex.quote(str(lane.work / 'environment'))}"
    ended = lane.job("mpi", ["bash", "-c", script], 20)
    if ended.status != 0:
        return f"{found[0]} failed ({ended.why})"
    for line in (lane.work / "environment").read_bytes().split(b"\0"):
        name, _, value = line.decode(errors="replace").partition("=")
        if name and name != MARK:
            lane.environment[name] = value
    if (found[0].parent / "bin" / "ompi_info").exists() or "ompi" in found[0].parent.name:
        # A file, which the jobs of tests read, too. CUDA's own inter-process memory between ranks of a node, since pml
        # ucx would want a network to start; and no ssh, which machines without other ones do not have.
        settings = ("pml = ob1", "btl = self,vader,smcuda", "opal_warn_on_missing_libcuda = 0", "plm_rsh_agent = true")
        folder = found[0].parent / "etc"
        folder.mkdir(exist_ok=True)
        with (folder / "openmpi-mca-params.conf").open("a") as file:
            file.writelines(f"{setting}\n" for setting in settings)
    lane.facts["mpi from"] = archive.name
    return ""


def _find_mpiexec(lane: Lane) -> str:
    beside = Path(lane.python).parent
    path = lane.environment["PATH"] if "mpi from" in lane.facts else f"{beside}:{lane.environment['PATH']}"
    found = shutil.which("mpiexec", path=path)
    if found is None:
        return "there is no mpiexec: neither in the folder, nor beside Python, nor on PATH"
    ended = lane.job("mpi", [found, "--version"], 20)
    is_open_mpi = any(word in ended.output for word in ("Open MPI", "OpenRTE", "prterun", "PRRTE"))
    lane.mpiexec = [found, *(["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if is_open_mpi else [])]
    return ""


def probe(lane: Lane) -> str:
    """Look at packages and the GPU; return what is missing, or ""."""
    ended = lane.job("probe", [lane.python, "-c", PROBE], 90)
    line = next((line for line in ended.output.splitlines() if line.startswith("PROBE ")), None)
    if line is None:
        return f"Python could not look for packages ({ended.why})"
    found = json.loads(line.removeprefix("PROBE "))
    lane.facts |= {name: value for name, value in found.items() if name != "missing"}
    if found["missing"]:
        return f"packages are missing: {', '.join(found['missing'])}"
    if "gpu_error" in found:
        return f"no GPU that works with CuPy ({found['gpu_error']})"
    return ""
