"""A Slurm for the tests of job scripts, and its user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_bed import SlurmBed
from slurm_user import User, started


@pytest.fixture(scope="session")
def bed() -> Iterator[SlurmBed]:
    yield from started()


@pytest.fixture
def user(bed: SlurmBed, tmp_path: Path) -> User:
    return User(bed, tmp_path)
