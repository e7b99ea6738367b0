"""Tries MPI on GPU memory in a separate job of two ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mpistrategy.cli.doctor.facts.facts import Trial
from mpistrategy.mpi.gpu.loaded_mpi import is_mpi

#: Variables by which a launcher tells a rank who it is; they would confuse the launcher of the separate job.
_LAUNCHERS = (
    *("PMI", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_", "PALS_", "MV2_COMM_", "JSM_", "OMPI_"),
    *("OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir", "OMPI_MCA_mpi_oversubscribe"),
    *("OMPI_MCA_shmem_RUNTIME_", "OMPI_MCA_rmaps_", "OMPI_MCA_plm", "OMPI_MCA_ras", "OMPI_MCA_hwloc_base_binding"),
)
#: Set by a user or a module for Open MPI, and kept.  (OPAL_PREFIX, its location, matches nothing above.)
_KEPT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_")
#: More ranks than cores, on this machine alone.
_HERE = {
    "HYDRA_LAUNCHER": "fork",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def command(files: Sequence[str] = ()) -> list[str] | None:
    """Return what starts the two ranks; None where there is no mpiexec.

    Args:
        files: the libraries in this process; the mpiexec that came with its MPI goes before all others.
    """
    own = [os.path.dirname(os.path.dirname(path)) for path in files if is_mpi(path)]
    folders = [*(os.path.join(root, "bin") for root in own), os.path.dirname(sys.executable)]
    beside = [os.path.join(folder, "mpiexec") for folder in folders]
    mpiexec = next((path for path in beside if os.access(path, os.X_OK)), None) or shutil.which("mpiexec")
    return [mpiexec, "-n", "2", sys.executable, "-m", "mpistrategy.cli.doctor.facts.cuda_child"] if mpiexec else None


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a launcher."""
    return {key: value for key, value in environment.items() if not _is_told(key)} | _HERE


def _is_told(key: str) -> bool:
    longest = max((len(start) for start in _LAUNCHERS if key.startswith(start)), default=0)
    return longest > max((len(start) for start in _KEPT if key.startswith(start)), default=0)


def attempt(started: Sequence[str] | None, environment: Mapping[str, str], seconds: float) -> Trial:
    """Run the two ranks and judge the outcome; never raises.

    Args:
        started: the command; None where there is no launcher.
        environment: of this process.
        seconds: how long they may take.
    """
    if started is None:
        return Trial("unverified", "no mpiexec is here to start two ranks that try it")
    try:
        with subprocess.Popen(
            started,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=without_launcher(environment),
            text=True,
            errors="replace",
            start_new_session=True,
        ) as job:
            try:
                output, errors = job.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                _end(job.pid)
                job.communicate()
                return Trial("died", f"they did not end within {seconds:g} s")
    except OSError as error:
        return Trial("unverified", f"two ranks that try it cannot be started ({error.strerror or error})")
    return _judged(job.returncode, output, errors)


def _judged(status: int, output: str, errors: str) -> Trial:
    told = next((line for line in reversed(output.splitlines()) if line.startswith("{")), "")
    if told:
        with suppress(ValueError, KeyError, TypeError):
            found = json.loads(told)
            direct, staged = (found["nbytes"] / found[way] / 1e9 for way in ("direct", "staged"))
            if found["right"]:
                return Trial("right", f"two ranks, {direct:.1f} GB/s; {staged:.1f} GB/s staged through the host")
            return Trial("wrong", "other numbers than were sent")
    said = next((line.strip() for line in errors.splitlines() if "Error" in line), "")
    if "ImportError" in said or "ModuleNotFoundError" in said or "not enough slots" in errors:
        return Trial("unverified", f"the two ranks that try it did not start ({said or 'not enough slots'})")
    number = -status if status < 0 else status - 128
    if 0 < number < 64:
        with suppress(ValueError):
            return Trial("died", f"{signal.Signals(number).name}")
    return Trial("died", f"status {status}{f', {said}' if said else ''}")


def _end(process: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
