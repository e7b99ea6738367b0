"""Finding and reading the recorded cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .values import Json

DEFAULT_ORACLE = Path(__file__).with_name("cases")


def area_files(oracle: Path = DEFAULT_ORACLE) -> list[Path]:
    """Return the area files of a directory in the recordings' format."""
    files = sorted(oracle.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"no *.json in {oracle}")
    return files


def load_cases(oracle: Path = DEFAULT_ORACLE, areas: tuple[str, ...] = (), only: str = "") -> Iterator[Json]:
    """Yield the cases of a directory, each with its `area`.

    Args:
        oracle: the directory of area files.
        areas: the areas wanted; empty for all.
        only: a substring of the ids wanted.
    """
    for path in area_files(oracle):
        content = json.loads(path.read_text())
        if areas and content["area"] not in areas:
            continue
        for case in content["cases"]:
            if only in case["id"]:
                yield {**case, "area": content["area"]}
