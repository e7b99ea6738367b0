"""scripts/hops counts what every case goes through."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import launching
import pytest

pytestmark = pytest.mark.one_rank

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "hops"
CASES = (
    *("small array", "large array", "nest", "general", "assign_add", "apply_gradients"),
    *("save", "restore"),
)

#: How many files a repeated call goes through at most.
MOST_FILES = {
    "small array": 5,
    "large array": 6,
    "nest": 6,
    "general": 11,
    "assign_add": 10,
    "apply_gradients": 11,
    "save": 17,
    "restore": 16,
}

#: The same for the first call, which makes the plan.
MOST_FILES_AT_FIRST = {
    "small array": 11,
    "large array": 12,
    "nest": 11,
    "general": 16,
    "assign_add": 12,
    "apply_gradients": 30,
    "save": 21,
    "restore": 16,
}


def counts(*arguments: str) -> tuple[dict[str, tuple[int, int, int]], str]:
    """Run it on simulated replicas; return (files, calls, switches) by case and turn, and what it printed."""
    command = [sys.executable, str(SCRIPT), *arguments]
    ended = subprocess.run(
        command, env=launching.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = re.findall(r"(?m)^(\S.*?) +(\d+) files +(\d+) calls +(\d+) switches$", ended.stdout)
    return {name: (int(files), int(calls), int(switches)) for name, files, calls, switches in lines}, ended.stdout


def test_every_case_is_counted_and_one_can_be_listed() -> None:
    found, printed = counts("nest", "repeated")
    assert found.keys() >= {f"{case} {turn}" for case in CASES for turn in ("first", "repeated")}
    for files, calls, switches in found.values():
        assert 0 < files <= calls
        assert files - 1 <= switches < calls
    for case, most in MOST_FILES.items():
        assert found[f"{case} repeated"][0] <= most, case
    for case, most in MOST_FILES_AT_FIRST.items():
        assert found[f"{case} first"][0] <= most, case
    listed = re.findall(r"(?m)^    (\S+\.py) \S+$", printed)
    assert len(listed) == found["nest repeated"][1]
    assert len(set(listed)) == found["nest repeated"][0]
