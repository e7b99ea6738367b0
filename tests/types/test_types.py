"""The program that the type checkers look at, as a job: what it says of types holds at run time, too.

scripts/lint gives it, and the lines that must be refused, to both checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import launching
import pytest

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_program_of_the_type_checkers_runs(launch: Callable[..., launching.Finished], ranks: int) -> None:
    job = launch(ranks, Path(__file__).with_name("user_program.py")).check()
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: all types hold" in job.stdout
