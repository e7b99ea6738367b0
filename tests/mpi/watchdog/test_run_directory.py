"""What a job leaves in its folder stays; a job that ends well leaves nothing there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import launching
import pytest

Launch = Callable[..., launching.Finished]

HANGS = """
import time
import mpistrategy as ms

strategy = ms.MirroredStrategy()
if strategy.rank == 1:
    time.sleep(60)
strategy.barrier("late")
"""
WELL = "import mpistrategy as ms\nms.MirroredStrategy().barrier('x')\n"


@pytest.mark.slow
def test_reports_of_other_starts_stay_and_are_not_spoken_of(launch: Launch, tmp_path: Path) -> None:
    late = launch(2, HANGS, env={"MPISTRATEGY_TIMEOUT_SECONDS": "1.5"}, cwd=tmp_path)
    assert late.returncode != 0
    (left,) = tmp_path.glob("mpistrategy-*")
    files = {path.name: path.read_bytes() for path in left.iterdir()}
    assert "roll-call.txt" in files
    after = launch(2, WELL, cwd=tmp_path).check()
    assert (after.stderr, [*tmp_path.glob("mpistrategy-*")]) == ("", [left])
    assert {path.name: path.read_bytes() for path in left.iterdir()} == files
