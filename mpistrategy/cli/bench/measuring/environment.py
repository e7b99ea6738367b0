"""What the figures were measured on, in words."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

#: Variables that set the number of BLAS threads.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """The ranks of a run.

    Attributes:
        library: the MPI library and its version.
        standard: the version of the MPI standard that it says it follows.
        ranks: how many there are.
        ranks_on_node: the most that one node has.
        nodes: how many nodes they are on.
    """

    library: str
    standard: str
    ranks: int
    ranks_on_node: int
    nodes: int


def describe(job: Job) -> dict[str, Any]:
    """Return the environment of a run: what readers need to judge its figures."""
    return {
        "mpi": job.library,
        "mpi_standard": job.standard,
        "ranks": job.ranks,
        "ranks_on_node": job.ranks_on_node,
        "nodes": job.nodes,
        "cores": available_cores(),
        "cpu": cpu_model(),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "blas_threads": next((os.environ[name] for name in THREADS if name in os.environ), "not set"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def in_words(environment: dict[str, Any]) -> str:
    """Return the environment as one line."""
    return (
        "{date}, {mpi} (MPI {mpi_standard}), {ranks} ranks on {nodes} node(s), {cores} cores of {cpu}, "
        "{memory_gib} GiB, {system}, Python {python}, NumPy {numpy}, BLAS threads {blas_threads}"
    ).format_map(environment)


def available_cores() -> int:
    """Return how many cores this process may run on."""
    usable: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


def cpu_model() -> str:
    """Return the processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> int:
    """Return how much memory the machine has."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
