"""The examples in the docstrings (`>>>`) print what they show, on every rank."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
from typing import Any

import pytest

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

#: Folders that need a library of the same name; `scripts/test --frameworks` has both.
ABSENT = tuple(f"mpistrategy.{name}" for name in ("jax", "torch") if importlib.util.find_spec(name) is None)
MODULES = [
    "mpistrategy",
    *(
        module.name
        for module in pkgutil.walk_packages(ms.__path__, "mpistrategy.")
        if not f"{module.name}.".startswith(tuple(f"{name}." for name in ABSENT))
    ),
]


class Finder(doctest.DocTestFinder):
    """Looks into all classes of a file: public ones say another module than the file's."""

    def _from_module(self, module: Any, found: Any) -> bool:
        methods = [each for each in vars(found).values() if inspect.isfunction(each)] if inspect.isclass(found) else []
        here = any(method.__code__.co_filename == module.__file__ for method in methods)
        return here or bool(super()._from_module(module, found))  # type: ignore[misc]


EXAMPLES = [
    pytest.param(example, id=example.name)
    for name in MODULES
    for example in Finder(exclude_empty=True).find(importlib.import_module(name))
    if example.examples
]


def test_there_are_examples_and_no_module_is_left_out() -> None:
    assert len(EXAMPLES) >= 7
    assert {
        "mpistrategy.strategy.strategy",
        "mpistrategy.mpi.contract.guard",
        "mpistrategy.cross_device_ops.base",
    } <= set(MODULES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_prints_what_it_shows(example: doctest.DocTest) -> None:
    report: list[str] = []
    result = doctest.DocTestRunner().run(example, out=report.append, clear_globs=False)
    assert result.failed == 0, "".join(report)
