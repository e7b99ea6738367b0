"""The MPI library in this process: what it calls itself, and its files.

mpi4py's wheel opens the library at run time, out of sight of ``ctypes.CDLL(None)``; the files that the process has
mapped tell which it is.
"""

from __future__ import annotations

import os
import re

_MPI = re.compile(r"libmpi(ch)?(_(?!cxx|gtl|mpifh|usempi)\w+)?\.so")


def mapped_files() -> list[str]:
    """Return the paths of the shared libraries in this process; empty where the system does not tell."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line]
    except OSError:
        return []
    return list(dict.fromkeys(path for path in paths if ".so" in os.path.basename(path)))


def is_mpi(path: str) -> bool:
    """Return whether this is the library of an MPI."""
    return _MPI.match(os.path.basename(path)) is not None


def identity() -> tuple[str, ...]:
    """Return what tells this library from others: its version text, and its files.  MPI must have started.

    Two builds of one version, with CUDA and without, may have the same text.
    """
    from mpi4py import MPI  # here: it starts MPI, which the doctor asks first

    files = [path for path in mapped_files() if is_mpi(path) or "libmpi_gtl" in path]  # Cray's part for GPUs
    return (MPI.Get_library_version(), *sorted(files))
