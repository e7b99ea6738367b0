"""Strategies whose ranks sit on nodes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replicas import SIZE, OnNodes

import mpistrategy as ms


@pytest.fixture
def apart() -> Iterator[ms.Strategy]:
    """Each rank on a node of its own."""
    made = OnNodes(range(SIZE), ms.MpiAllReduce())
    yield made
    made.close()
