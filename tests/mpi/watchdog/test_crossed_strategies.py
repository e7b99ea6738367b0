"""Ranks that use their strategies in another order wait for each other: the roll call says where each of them waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

pytestmark = pytest.mark.one_rank
Launch = Callable[..., launching.Finished]

PROGRAM = """
import sys
import numpy as np
import mpistrategy as ms

first, second = ms.MirroredStrategy(), ms.MirroredStrategy()
odd = first.rank == 1
if "one too many" in sys.argv[1] and odd:
    ms.MirroredStrategy()
for strategy in (second, first) if odd else (first, second):
    strategy.reduce("SUM", np.ones(300_000 if "large" in sys.argv[1] else 1))
"""


@pytest.mark.parametrize("what", ["another order", "another order of large arrays", "one too many"])
def test_the_roll_call_shows_where_each_rank_waits(launch: Launch, tmp_path: Path, what: str) -> None:
    path = launching.program(PROGRAM, tmp_path)
    job = launch(3, [path, what], timeout=60, cwd=tmp_path, env={"MPISTRATEGY_TIMEOUT_SECONDS": "2"})
    assert job.returncode == 124, job
    assert "All 3 ranks wait: in different strategies, in calls that do not fit together" in job.stderr, job
    for rank, line in enumerate((11, 9 if "many" in what else 11, 11)):
        assert re.search(rf"  rank {rank}: waits in #\d .* at .*program_\w+\.py:{line} in", job.stderr), job
