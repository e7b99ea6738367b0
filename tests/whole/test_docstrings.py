"""The examples in the docstrings (`>>>`) print what they show, and the cells of notebooks run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import json
import pkgutil
from pathlib import Path
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


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_prints_what_it_shows(example: doctest.DocTest) -> None:
    report: list[str] = []
    result = doctest.DocTestRunner().run(example, out=report.append, clear_globs=False)
    assert result.failed == 0, "".join(report)


NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "scripts" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as one program; the file holds no outputs."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4
    for cell in code:
        assert cell["outputs"] == []
        exec(compile("".join(cell["source"]), str(notebook), "exec"), names)
