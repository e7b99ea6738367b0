"""A folder that all ranks share, for the checkpoints of a test."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import shared_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shared_folder(tmp_path)
