"""A Slurm for the tests of job scripts, and its user."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import launching
import pytest
from slurm_bed import SlurmBed
from slurm_user import User


@pytest.fixture(scope="session")
def bed() -> Iterator[SlurmBed]:
    if not launching.LIBRARY.startswith(("Open MPI", "MPICH")):
        pytest.skip("not run: tried with MPICH and Open MPI only")
    # The folder's path must be short, for sockets.
    with TemporaryDirectory(prefix="ms-slurm-", ignore_cleanup_errors=True) as folder, closing(SlurmBed(folder)) as bed:
        try:
            bed.start()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            # Or there are namespaces, but no bridges or devices in them, as in some containers.
            pytest.skip(
                "not run: Slurm does not start on this machine (it needs root, namespaces, and of Debian slurm-wlm, "
                f"munge, libpmix2 and iproute2): {str(error)[:1000]}"
            )
        yield bed


@pytest.fixture
def user(bed: SlurmBed, tmp_path: Path) -> User:
    return User(bed, tmp_path)
