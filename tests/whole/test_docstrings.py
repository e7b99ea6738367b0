"""The examples in the docstrings (`>>>`) print what they show, and the cells of notebooks run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

#: The files with examples.  Torch and JAX have theirs in folders of their names; `scripts/test --frameworks` has both.
PACKAGE = Path(ms.__file__).parent
ABSENT = [PACKAGE / name for name in ("jax", "torch") if importlib.util.find_spec(name) is None]
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not set(ABSENT) & set(path.parents) and ">>> " in path.read_text(encoding="utf-8")
]


class Finder(doctest.DocTestFinder):
    """Looks into all classes of a file: public ones say another module than the file's."""

    def _from_module(self, module: Any, found: Any) -> bool:
        methods = [each for each in vars(found).values() if inspect.isfunction(each)] if inspect.isclass(found) else []
        here = any(method.__code__.co_filename == module.__file__ for method in methods)
        return here or bool(super()._from_module(module, found))  # type: ignore[misc]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_examples_print_what_they_show(path: Path) -> None:
    parts = [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"]
    module = importlib.import_module(".".join([ms.__name__, *parts]))
    examples = [each for each in Finder(exclude_empty=True).find(module) if each.examples]
    assert examples
    report: list[str] = []
    results = [doctest.DocTestRunner().run(each, out=report.append, clear_globs=False) for each in examples]
    assert not any(result.failed for result in results), "".join(report)


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
