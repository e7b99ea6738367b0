"""What is public: a module's `__all__` names it, and `dir()` shows it and no more."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pickle
import typing

import public_names
import pytest
from public_names import MODULES, public_name

import mpistrategy as ms

PUBLIC = [(f"{public_name(module)}.{name}", getattr(module, name)) for module in MODULES for name in module.__all__]
OBJECTS = [
    pytest.param(*each, id=each[0]) for each in PUBLIC if inspect.isclass(each[1]) or inspect.isfunction(each[1])
]


@pytest.mark.one_rank
def test_public_names_and_signatures_are_those_of_the_file() -> None:
    held = public_names.FILE.read_text(encoding="utf-8").splitlines()
    changed = list(
        difflib.unified_diff(held, list(public_names.everything()), "the file", "the package", lineterm="", n=0)
    )
    assert not changed, "\n".join([*changed, f"If this is meant: python {public_names.__file__}"])


@pytest.mark.parametrize(("name", "value"), OBJECTS)
def test_a_public_object_is_found_where_its_module_says(name: str, value: typing.Any) -> None:
    assert getattr(importlib.import_module(value.__module__), value.__qualname__) is value
    assert value.__qualname__ == name.rpartition(".")[2]
    assert pickle.loads(pickle.dumps(value)) is value
    if inspect.isclass(value):
        assert name.rpartition(".")[2] in repr(value)
        typing.get_type_hints(value)  # of fields, where annotations are texts


@pytest.mark.parametrize("module", MODULES[1:], ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_public_module_shows_its_public_names_and_no_more(module: object) -> None:
    names = list(module.__all__)  # type: ignore[attr-defined]
    assert dir(module) == sorted(set(names))
    assert len(names) == len(set(names))
    starred: dict[str, object] = {}
    exec(f"from {module.__name__} import *", starred)  # type: ignore[attr-defined]
    assert starred.keys() - {"__builtins__"} == set(names)
    for name in names:
        found = getattr(module, name)
        assert (inspect.getdoc(found) or "").strip() or isinstance(found, (str, int, tuple)), name


def test_errors_and_warnings_are_all_of_the_tree() -> None:
    for name in ms.errors.__all__:
        kind = getattr(ms.errors, name)
        assert name == "RankCall" or issubclass(kind, (ms.errors.MpiStrategyError, Warning)), name
    module = importlib.import_module("mpistrategy.errors")
    own = {name for name, kind in vars(module).items() if inspect.isclass(kind) and kind.__module__ == module.__name__}
    assert own == set(ms.errors.__all__)
