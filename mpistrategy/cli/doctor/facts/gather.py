"""Gathers the facts of this process.  Nothing here raises, waits for another rank, or shows variables at large."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from mpistrategy.cli.doctor.checks.finding import mebibytes
from mpistrategy.cli.doctor.checks.gpu import parts_of
from mpistrategy.cli.doctor.facts import fabric, network
from mpistrategy.cli.doctor.facts.c_libraries import blas_threads
from mpistrategy.cli.doctor.facts.facts import Facts
from mpistrategy.errors import LaunchError
from mpistrategy.mpi.gpu import loaded_mpi
from mpistrategy.mpi.job import introductions, launcher
from mpistrategy.mpi.shared_memory.memory_limits import file_system, memory
from mpistrategy.mpi.shared_memory.spin_wait import cores
from mpistrategy.mpi.tuning.files import library_name
from mpistrategy.mpi.watchdog.local_process import stat_of

if TYPE_CHECKING:
    from mpistrategy.cli.doctor.facts.ranks import Ranks

#: Variables for the local rank; programs often choose a GPU by them.
_LOCAL = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
_VISIBLE = re.compile(r"(?:NoDevFiles|-?\d+|(?:GPU|MIG)-[\w/-]+)?(?:,(?:-?\d+|(?:GPU|MIG)-[\w/-]+))*")
_PATH = re.compile(r"[\w./+-]{1,400}")


def seconds_since_start() -> float:
    """Return how long ago this process began; 0.0 if unknown."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(stat_of(os.getpid())[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


def of_this_process(environment: Mapping[str, str], start_seconds: float) -> Facts:
    """Return what is known without MPI.

    Args:
        environment: the variables of the process.
        start_seconds: what `seconds_since_start` said when the command began.
    """
    import numpy

    mine = sorted(cores())
    threads, source = blas_threads(environment, len(mine))
    claim = launcher.claim_in(environment)
    shared = memory()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return Facts(
        host=os.uname().nodename,
        python=".".join(map(str, sys.version_info[:3])),
        mpistrategy=introductions.version(),
        numpy=numpy.__version__,
        launcher=claim.launcher if claim else "",
        tasks=claim.tasks if claim else 0,
        place=claim.rank if claim else 0,
        said=", ".join(f"{name}={environment[name]}" for name in claim.variables) if claim else "",
        pmi=offered(environment),
        local_hints={name: int(environment[name]) for name in _LOCAL if environment.get(name, "").isdigit()},
        cores=mine,
        machine_cores=os.cpu_count() or 1,
        threads=threads,
        threads_source=source,
        room_free=shared.free if shared else 0,
        room_of=f"{shared.of}, {mebibytes(shared.total)}" if shared else "",
        start_seconds=round(start_seconds, 3),
        home=str(Path(__file__).parents[3]),
        gpu_devices=len(glob("/dev/nvidia[0-9]*")),
        amd=os.path.exists("/dev/kfd"),
        fabric=fabric.fabric(),
        has_net_plugin=fabric.has_plugin(environment),
        gpus_promised=_number(environment, "SLURM_GPUS_ON_NODE"),
        visible=visible if visible is None or _VISIBLE.fullmatch(visible) else "(something else)",
        wanted=_library_wanted(environment.get("MPI4PY_LIBMPI", "")),
    )


def with_mpi(facts: Facts, ranks: Ranks, seconds: float) -> Facts:
    """Return the facts of a rank whose MPI has started.

    Args:
        facts: what was known before.
        ranks: all of them.
        seconds: how long MPI took to start.
    """
    library = library_name(ranks.library)
    refusal: tuple[str, ...] = ()
    try:
        launcher.check_world(ranks.size, library, "mpistrategy doctor")
    except LaunchError as error:
        refusal = parts_of(error)
    mapped = [path for path in loaded_mpi.mapped_files() if loaded_mpi.is_mpi(path)]
    return replace(
        facts,
        rank=ranks.rank,
        size=ranks.size,
        mpi4py=ranks.mpi4py,
        library=library,
        built_for=ranks.built_for,
        libraries=mapped,
        thread_level=ranks.thread_level,
        mpi_seconds=round(seconds, 3),
        refusal=refusal,
        network=network.network(),
        carrier=network.carrier(ranks.library, loaded_mpi.mapped_files()),
        from_pip=network.from_pip(mapped),
        shm_free=shm.free if (shm := file_system("/dev/shm")) else -1,
    )


def on_node(facts: Facts, place: tuple[int, int, int]) -> Facts:
    """Return the facts of a rank that knows its node.

    Args:
        facts: what was known before.
        place: `Ranks.place_on_node`.
    """
    from mpistrategy.mpi.gpu.inventory import look
    from mpistrategy.mpi.shared_memory import setup
    from mpistrategy.mpi.tuning.thresholds import DEFAULT
    from mpistrategy.mpi.watchdog import status_board

    leader, local_rank, local_size = place
    sight = look()
    each = status_board.BYTES + setup.bytes_for(local_size, DEFAULT)
    found = replace(
        facts,
        leader=leader,
        local_rank=local_rank,
        local_size=local_size,
        sight=sight.text(),
        room_needed=local_size * each if local_size > 1 else 0,
        leftovers=_leftovers() if local_rank == 0 else "",
    )
    if not sight.gpus:
        return found
    from mpistrategy.cli.doctor.facts import cuda_trial

    return replace(found, cuda_refused=cuda_trial.obstacle())


def offered(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a launcher offers for its processes to meet."""
    kinds = []
    if "PMIX_NAMESPACE" in environment and "PMIX_RANK" in environment:
        kinds.append("PMIx")
    if "PMI_RANK" in environment and not {"PMI_FD", "PMI_PORT", "PMI_CONTROL_PORT", "PMI_SIZE"}.isdisjoint(environment):
        kinds.append("PMI")
    return tuple(kinds)


def _leftovers() -> str:
    from mpistrategy.cli.doctor import leftovers

    with suppress(OSError):
        return leftovers.in_words(leftovers.found(*leftovers.folders()))
    return ""


def _library_wanted(path: str) -> str:
    if not _PATH.fullmatch(path):
        return ""
    return os.path.realpath(path) if "/" in path else path


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0
