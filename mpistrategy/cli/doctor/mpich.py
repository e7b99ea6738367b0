"""Can MPICH start here?  Looked at before MPI starts: MPICH aborts where it cannot speak the PMI of its launcher.

As a program it prints which MPI library mpi4py loads, and ``PMIx`` where that speaks it, without starting MPI: in a
process of its own, since MPI starts where mpi4py.MPI is imported.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping

from mpistrategy.cli.doctor.findings import BAD, Facts, Finding
from mpistrategy.mpi.gpu import loaded_mpi
from mpistrategy.mpi.job import launcher
from mpistrategy.mpi.tuning.thresholds import library_name

_SECONDS = 30.0


def refusal(facts: Facts, environment: Mapping[str, str]) -> Finding | None:
    """Return why MPICH would not start; None where nothing is known against it, or it is another MPI.

    Args:
        facts: what is known of this process without MPI.
        environment: its variables.
    """
    if "PMIX_NAMESPACE" not in environment or "MPIR_CVAR_PMI_VERSION" in environment:  # the latter says which PMI it is
        return None
    library, spoken = _library()
    if spoken or not library.startswith("MPICH "):
        return None
    found = f"{facts['launcher'] or 'the environment (PMIX_NAMESPACE)'} offers PMIx, which {library} does not speak: "
    fix = "Take away what an outer launcher has set: env -u PMIX_NAMESPACE ..."
    if facts["launcher"] and "PMI_SIZE" not in environment:
        fix = launcher.cure(facts["launcher"], library)
    return Finding("pmi", BAD, f"{found}it aborts (unsupported PMI version PMIx)", fix)


def _library() -> tuple[str, str]:
    """Return the MPI library and what it speaks, as this program prints them; empty where that cannot be known."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return "", ""
    library, spoken, *_ = [*done.stdout.split("\n"), "", ""]
    return library, spoken


def main() -> None:
    """Print the name and the version of the library, and what it speaks."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    files = loaded_mpi.mapped_files()
    speaks = any("/libpmix.so" in path for path in files) or any(
        hasattr(ctypes.CDLL(path), "PMIx_Init") for path in files if loaded_mpi.is_mpi(path)
    )
    print(library_name(MPI.Get_library_version()), "PMIx" if speaks else "", sep="\n")


if __name__ == "__main__":
    main()
