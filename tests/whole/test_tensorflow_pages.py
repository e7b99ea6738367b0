"""The pages for tf.distribute users: the names in their tables are those of the package, and are used in examples."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pages
import pytest
from conformance.cases import DEFAULT_ORACLE, load_cases
from conformance.programs_api import CLASSES, OLD_NAMES
from pages import EXAMPLES, PREAMBLE

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

PORTING = "".join(pages.TEXTS[page] for page in ("tensorflow", "tensorflow-steps", "tensorflow-training"))
MISSING = PORTING.partition("## Not there\n")[2].partition("\n# ")[0]
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


def test_every_name_of_the_documents_is_in_the_porting_table() -> None:
    recorded = {case["program"]: case["outcome"]["observed"] for case in load_cases(DEFAULT_ORACLE, ("api_surface",))}
    wanted = {f"{kind}.{name}" for kind, old_names in OLD_NAMES.items() for name in old_names}
    for kind, members in recorded["classes"]["members"].items():
        if kind.rpartition(".")[2] in ("Strategy", "StrategyExtended", "ReplicaContext", "ReductionToOneDevice"):
            assert kind in CLASSES
            wanted |= {f"{kind.rpartition('.')[2]}.{name}" for name in members}
    told = {name for there, _ in ROWS for name in names(there)} | set(names(MISSING))
    assert sorted(wanted - told) == []


def test_names_of_the_porting_table_exist() -> None:
    assert len(HERE) > 80
    assert len(OURS) > 4
    assert [name for name in HERE + OURS if not exists(name)] == []


@pytest.mark.slow
def test_every_name_of_the_porting_table_is_used_in_an_example() -> None:
    """A function or property must have been called by an example; anything else, and what one overrides, written."""
    sources = [PREAMBLE, *(example.source for example in EXAMPLES)]
    trees = [ast.walk(ast.parse(source)) for source in sources]
    nodes = [node for tree in trees for node in tree]
    written = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    overridden = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    called, unused = pages.run_examples().called, []
    for name in HERE + OURS:
        found = find(name)
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        code = getattr(found, "__code__", None)
        last = name.rpartition(".")[2]
        if code is None:
            is_used = last in written
        else:
            is_used = (code.co_filename, code.co_firstlineno) in called
            is_used |= last.endswith("_implementation") and last in overridden
        if not is_used:
            unused.append(name)
    assert unused == []


def test_names_said_to_be_missing_are_missing() -> None:
    missing = MISSING.partition("Write `")[0]
    assert names(missing)
    assert [name for name in names(missing) if exists(name)] == [], "these exist now: move them into the porting table"
