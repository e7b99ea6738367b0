"""The program that prints which MPI library mpi4py loads, and ``PMIx`` where that speaks it; MPI is not started.

``python -m mpistrategy.cli.doctor.facts.mpi_child``; in a process of its own, since MPI starts where it is imported.
"""

from __future__ import annotations

import ctypes

import mpi4py

from mpistrategy.mpi.gpu import loaded_mpi
from mpistrategy.mpi.tuning.files import library_name


def main() -> None:
    """Print the name and the version of the library, and what it speaks."""
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    files = loaded_mpi.mapped_files()
    speaks = any("/libpmix.so" in path for path in files) or any(
        hasattr(ctypes.CDLL(path), "PMIx_Init") for path in files if loaded_mpi.is_mpi(path)
    )
    print(library_name(MPI.Get_library_version()), "PMIx" if speaks else "", sep="\n")


if __name__ == "__main__":
    main()
