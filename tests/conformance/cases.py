"""Finding and reading the recorded cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .values import Json

DEFAULT_ORACLE = Path(__file__).with_name("cases")


def load_cases(oracle: Path = DEFAULT_ORACLE, only: str = "") -> Iterator[Json]:
    """Yield the cases of a directory, each with its `area`.

    Args:
        oracle: the directory of area files: a case a line (.jsonl), or one object with the area's cases (.json).
        only: a substring of the ids wanted.
    """
    files = sorted([*oracle.glob("*.jsonl"), *oracle.glob("*.json")])
    if not files:
        raise FileNotFoundError(f"no *.jsonl and no *.json in {oracle}")
    for path in files:
        yield from (case for case in _cases_of(path) if only in case["id"])


def _cases_of(path: Path) -> Iterator[Json]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)
    else:
        content = json.loads(path.read_text(encoding="utf-8"))
        yield from ({**case, "area": content["area"]} for case in content["cases"])
