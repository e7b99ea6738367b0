"""Tries MPI, and NCCL beside it, on GPU memory in separate jobs of two ranks: on one node, and on two."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from mpistrategy.cli.doctor.facts.facts import Trial
from mpistrategy.cli.doctor.facts.trial_launch import Start, start
from mpistrategy.mpi.gpu import cuda_trials, loaded_mpi
from mpistrategy.mpi.gpu.cuda_trials import Outcome, Place

#: How NCCL names the network that it chose, and what users call it.
_NETWORK = re.compile(r"NCCL INFO .*Using network (.+)")
_NETWORKS = {"IB": "InfiniBand", "Socket": "sockets"}


def try_all(library: str, hosts: Sequence[str], environment: Mapping[str, str], seconds: float) -> Trial:
    """Try MPI on one node, and on two where the job has several; keep the outcomes for strategies.

    Args:
        library: what the MPI library says about itself.
        hosts: the nodes of the job.
        environment: of this process.
        seconds: how long each trial may take.
    """
    places: list[Place] = ["one node", *(["several nodes"] if len(set(hosts)) > 1 else [])]  # type: ignore[list-item]
    found: dict[Place, Trial] = {}
    for place in places:
        started = start(place, environment, loaded_mpi.mapped_files(), hosts)
        found[place] = trial = attempt(started, seconds)
        if trial.outcome != "unverified":
            with suppress(OSError):  # strategies then go on as if nobody had tried
                cuda_trials.save(library, place, Outcome(**asdict(trial)))
    return _together(found)


def _together(found: Mapping[Place, Trial]) -> Trial:
    """Return the worst outcome, and all of them in words."""
    if len(found) == 1:
        return next(iter(found.values()))
    order = ("right", "unverified", "died", "wrong")
    outcome = max((trial.outcome for trial in found.values()), key=order.index)
    far = found["several nodes"]
    reason = "; ".join(f"{place}: {trial.reason}" for place, trial in found.items())
    return Trial(outcome, reason, far.direct, far.staged, far.nccl, far.network)


def attempt(started: Start | None, seconds: float) -> Trial:
    """Run two ranks and judge the outcome; never raises.

    Args:
        started: how; None where there is no launcher.
        seconds: how long they may take.
    """
    if started is None:
        return Trial("unverified", "nothing here can start two ranks that try it: no mpiexec, srun, flux or jsrun")
    try:
        with subprocess.Popen(
            started.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # NCCL tells its network nowhere else.
            env={**started.environment, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"},
            text=True,
            errors="replace",
            start_new_session=True,
        ) as job:
            try:
                output, errors = job.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                _end(job.pid)
                output, errors = job.communicate()
                if _told(output):
                    return _judged(0, output, errors)
                if "STARTED" not in output:
                    return Trial("unverified", f"the two ranks that try it did not start within {seconds:g} s")
                return Trial("died", f"they did not end within {seconds:g} s")
    except OSError as error:
        return Trial("unverified", f"two ranks that try it cannot be started ({error.strerror or error})")
    return _judged(job.returncode, output, errors)


def _judged(status: int, output: str, errors: str) -> Trial:
    told = _told(output)
    if told:
        with suppress(ValueError, KeyError, TypeError):
            return _measured(json.loads(told), output + errors)
    said = next((line.strip() for line in errors.splitlines() if "Error" in line), "")
    if "ImportError" in said or "ModuleNotFoundError" in said or "not enough slots" in errors:
        return Trial("unverified", f"the two ranks that try it did not start ({said or 'not enough slots'})")
    number = -status if status < 0 else status - 128
    if 0 < number < 64:
        with suppress(ValueError):
            return Trial("died", f"{signal.Signals(number).name}")
    if "STARTED" not in output and status:
        last = next((line.strip() for line in reversed(errors.splitlines()) if re.search("[a-z]", line)), "")
        return Trial("unverified", f"the two ranks that try it did not start (status {status}{last and ', '}{last})")
    return Trial("died", f"status {status}{f', {said}' if said else ''}")


def _told(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.startswith("{")), "")


def _measured(found: dict[str, Any], output: str) -> Trial:
    if not found["right"]:
        return Trial("wrong", "other numbers than were sent")
    direct, staged, nccl = (found["nbytes"] / found[way] if found.get(way) else 0.0 for way in _WAYS)
    reason = f"two ranks, {direct / 1e9:.1f} GB/s; {staged / 1e9:.1f} GB/s staged through the host"
    named = _NETWORK.search(output)
    network = _NETWORKS.get(named[1].strip(), named[1].strip()) if named else ""
    if nccl:
        reason += f"; {nccl / 1e9:.1f} GB/s by NCCL{network and f' over {network}'}"
    return Trial("right", reason, direct, staged, nccl, network)


_WAYS = ("direct", "staged", "nccl")


def _end(process: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
