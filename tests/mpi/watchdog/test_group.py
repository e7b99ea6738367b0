"""How often a rank reads the files of other nodes while one of them is busy."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mpistrategy.mpi.watchdog.group import Group

pytestmark = pytest.mark.one_rank
LIMIT = 600.0


class Files:
    """A run directory in which node 1 says that it is busy until `until`, seconds of time.time()."""

    def __init__(self, until: float) -> None:
        self.until, self.reads = until, 0

    def read(self, name: str) -> str:
        self.reads += 1
        return json.dumps({"wall": 0.0, "lines": [{"expected": self.until}]}) if name == "node-1.json" else ""


def group_beside(files: Any, nodes: int = 4) -> Group:
    made: Any = SimpleNamespace(expected=lambda: 0.0)
    guard: Any = None
    return Group(guard, made, 0, nodes, files)


def test_a_node_that_is_busy_is_asked_after_growing_pauses() -> None:
    files = Files(time.time() + 10_000)
    group, now = group_beside(files), time.monotonic() + 2 * LIMIT
    asked = [group.is_excused(now + tick, LIMIT) for tick in range(1_000)]
    assert all(asked)
    assert files.reads / 3 <= 7 + 1_000 / (LIMIT / 10), "seven pauses grow to a tenth of the limit"


def test_a_node_that_is_done_early_is_found_out() -> None:
    files = Files(time.time() + 10_000)
    group, now = group_beside(files), time.monotonic() + 2 * LIMIT
    assert group.is_excused(now, LIMIT)
    files.until = 0.0
    late = next(tick for tick in range(1_000) if not group.is_excused(now + tick, LIMIT))
    assert late <= LIMIT / 10
    assert not group.is_excused(now + late + 1, LIMIT)


def test_a_rank_that_nobody_excuses_is_late_at_once() -> None:
    assert not group_beside(Files(0.0)).is_excused(time.monotonic() + 2 * LIMIT, LIMIT)
