"""Gives GPU memory to MPI in a job of two ranks of its own, and says what came of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mpistrategy.doctor.facts import Trial

#: What a launcher told this rank; a launcher of the child's own would take it for its own affairs.
_LAUNCHERS = ("PMI", "OMPI_", "OPAL_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_", "PALS_", "MV2_COMM_", "JSM_")
_KEPT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_opal_cuda_support")
#: More ranks than cores, on this machine alone.
_HERE = {
    "HYDRA_LAUNCHER": "fork",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def command() -> list[str] | None:
    """Return what starts the two ranks; None where there is no mpiexec."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    mpiexec = beside if os.path.exists(beside) else shutil.which("mpiexec")
    return [mpiexec, "-n", "2", sys.executable, "-m", "mpistrategy.doctor.cuda_child"] if mpiexec else None


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a launcher told this process."""
    kept = {key: value for key, value in environment.items() if key.startswith(_KEPT) or not key.startswith(_LAUNCHERS)}
    return kept | _HERE


def attempt(started: Sequence[str] | None, environment: Mapping[str, str], seconds: float) -> Trial:
    """Run the two ranks and judge what came of it; never raises.

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
