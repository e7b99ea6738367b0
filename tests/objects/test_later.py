"""Names of modules that are loaded when they are used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpistrategy.objects import later as objects_later
from mpistrategy.objects.later import later, load_all

pytestmark = pytest.mark.one_rank
MODULE = "module_that_is_loaded_later"
TEXT = """
class Kind:
    made = "here"

def twice(number):
    return 2 * number
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    (tmp_path / f"{MODULE}.py").write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(objects_later, "_unloaded", [])
    found: dict[str, Any] = {}
    later(found, MODULE, "Kind", "twice")
    later(found, MODULE)
    yield found
    sys.modules.pop(MODULE, None)


def test_the_first_call_loads_the_module_and_takes_the_place_of_the_stand_in(names: dict[str, Any]) -> None:
    before = names["twice"]
    assert MODULE not in sys.modules
    assert names["twice"](4) == 8
    assert names["twice"] is sys.modules[MODULE].twice
    assert before(5) == 10  # where it was put elsewhere


def test_nothing_is_of_a_class_that_is_not_loaded(names: dict[str, Any]) -> None:
    assert not isinstance(3, names["Kind"])
    assert not isinstance(3, (str, names["Kind"]))
    assert MODULE not in sys.modules
    made = names[MODULE].Kind()
    assert isinstance(made, names["Kind"])
    assert names["Kind"] is type(made)


def test_a_module_and_its_attributes(names: dict[str, Any]) -> None:
    assert names[MODULE].Kind.made == "here"
    assert names["Kind"].made == "here"
    assert names[MODULE] is sys.modules[MODULE]


def test_what_a_test_has_put_there_stays(names: dict[str, Any]) -> None:
    before, names["twice"] = names["twice"], len
    assert before(4) == 8
    assert names["twice"] is len


def test_all_are_loaded_at_once(names: dict[str, Any]) -> None:
    load_all()
    assert names["twice"] is sys.modules[MODULE].twice
    assert names[MODULE] is sys.modules[MODULE]
