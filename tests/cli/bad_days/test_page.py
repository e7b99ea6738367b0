"""The page on bad days: each cell names a test that is there, or says that it was not tried."""

from __future__ import annotations

import ast
import re

import pages
import pytest

pytestmark = pytest.mark.one_rank

PAGE = pages.TEXTS["bad-days"]
#: The numbers of tests behind a statement: [7], or [7, 8].
NUMBERS = re.compile(r"\[(\d+(?:, \d+)*)\]")
NAMED = dict(re.findall(r"^\| (\d+) \| `([^`]+)` \|$", PAGE, re.MULTILINE))


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) >= 15
    for named in NAMED.values():
        file, _, name = named.partition("::")
        tree = ast.parse((pages.ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, named


def test_every_cell_has_its_test() -> None:
    rows = PAGE.partition("|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    cells = [cell for row in rows for cell in row.strip("|").split("|")[1:]]
    assert len(cells) == 2 * len(rows) >= 18
    not_tried = [cell for cell in cells if cell.strip().startswith("not tried: ")]
    assert len(not_tried) <= 5
    assert [cell for cell in cells if cell not in not_tried and not NUMBERS.search(cell)] == []
    assert {number for found in NUMBERS.findall(PAGE) for number in found.split(", ")} == set(NAMED)
