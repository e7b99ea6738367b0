"""What the MPI library in this process says about GPUs, in functions and variables that mpi4py does not know.

They are looked up in the files that the process has mapped: mpi4py's wheel opens the library at run time, out of sight
of ``ctypes.CDLL(None)``.  To be asked after MPI has started.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from typing import Any

from mpistrategy.mpi.gpu import cuda_aware

_MPI = re.compile(r"libmpi(ch)?(_(?!cxx|gtl|mpifh|usempi)\w+)?\.so")
_OPEN_PAL = re.compile(r"libopen-pal\.so")
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


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


def queried(files: Sequence[str]) -> bool | None:
    """Return what the MPI library says about CUDA; None where it has no function for it."""
    libraries = _opened(files, _MPI)
    # The first of the two where there are both: MPICH 4.0's other one ends the process where asserts are compiled in.
    for library in libraries:
        ask = getattr(library, "MPIX_GPU_query_support", None)
        if ask is not None:
            flag = ctypes.c_int(0)
            return ask(_CUDA, ctypes.byref(flag)) == 0 and bool(flag.value)
    for library in libraries:
        ask = getattr(library, "MPIX_Query_cuda_support", None)
        if ask is not None:
            return bool(ask())
    return None


def switched_on(files: Sequence[str]) -> bool | None:
    """Return the state of Open MPI's switch `opal_cuda_support`; None where there is none."""
    for library in _opened(files, _OPEN_PAL):
        try:
            return bool(ctypes.c_bool.in_dll(library, "opal_cuda_support"))
        except ValueError:
            continue
    return None


def _opened(files: Sequence[str], name: re.Pattern[str]) -> list[Any]:
    libraries = []
    for path in files:
        if name.match(os.path.basename(path)):
            try:
                libraries.append(ctypes.CDLL(path))
            except OSError:  # replaced on disk since it was loaded
                continue
    return libraries


def evidence() -> cuda_aware.Evidence:
    """Return what is known of this MPI and GPU memory."""
    from mpi4py import MPI  # here: it starts MPI, which the doctor asks first

    files = mapped_files()
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    return cuda_aware.Evidence(
        MPI.Get_library_version(),
        MPI.Get_version(),
        queried(files),
        switched_on(files),
        kinds or "",
        [os.path.basename(file) for file in files],
        os.environ,
    )
