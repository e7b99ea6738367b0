"""The page for tf.distribute users: the names in its tables are those of the package."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pages
import pytest

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

PORTING = pages.TEXTS["tensorflow"]
MISSING = PORTING.partition("## Not there\n")[2].partition("\n## ")[0]
# Rows of the porting tables: their cells "there" and "here".
ROWS = [tuple(row.split("|")[1:3]) for row in PORTING.splitlines() if row.startswith("| ") and "| here |" not in row]


def names(text: str) -> list[str]:
    return re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", text)


def exists(name: str) -> bool:
    return find(name) is not None


def find(name: str) -> Any:
    """Return what has this name in the package, as it stands in its class; None for what is not there."""
    here: Any = ms
    getattr(ms, name.partition(".")[0], None)  # some names are loaded when they are first used
    for part in name.split("."):
        try:
            here = inspect.getattr_static(here, part)
        except AttributeError:
            return None
    return here


HERE = [name for _, here in ROWS for name in names(here)]
OURS = names(PORTING.partition("## Not in tf.distribute\n")[2])


def test_names_of_the_porting_table_exist() -> None:
    assert len(HERE) > 30
    assert len(OURS) > 4
    assert [name for name in HERE + OURS if not exists(name)] == []


def test_names_said_to_be_missing_are_missing() -> None:
    missing = MISSING.partition("Write `")[0]
    assert names(missing)
    assert [name for name in names(missing) if exists(name)] == [], "these exist now: move them into the porting table"
