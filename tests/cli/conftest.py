"""The user of the module's Slurm: each module that needs one has a fixture `bed`."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_bed import SlurmBed
from slurm_user import User


@pytest.fixture
def user(bed: SlurmBed, tmp_path: Path) -> User:
    return User(bed, tmp_path)
