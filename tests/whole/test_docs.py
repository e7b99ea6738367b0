"""Docstrings say what public names and their arguments are; the cells of notebooks run."""

from __future__ import annotations

import enum
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from public_names import members

from mpistrategy.cli.guide import reference

pytestmark = pytest.mark.one_rank

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "scripts" / "notebooks").glob("*.ipynb"))
#: Only the library makes the first three; the last takes what its base in Python takes.
OTHERS_MAKE = ("AllReduceHandle", "Dataset", "DistributedIterator", "RankFormatter")
#: A docstring that leaves the arguments to that of another function.
REFERS = re.compile(r"\b(?:[Aa]s|as by|Do|what|Return) `[\w.]+`|Return `\w+\(")


def public_objects() -> Iterator[tuple[str, Any, str]]:
    """Yield the public classes, functions, methods and properties, each with its words."""
    for names in reference.public().values():
        for name, value in names.items():
            if inspect.isroutine(value):
                yield name, value, inspect.getdoc(value) or ""
            elif inspect.isclass(value):
                yield name, value, "\n".join(inspect.getdoc(base) or "" for base in value.__mro__[:-1])
                for member in sorted(members(value)):
                    found = getattr(value, member, None)
                    if inspect.isfunction(found) or inspect.ismethod(found) or isinstance(found, property):
                        yield f"{name}.{member}", found, inspect.getdoc(found) or ""


def arguments(value: Any) -> list[str]:
    """Return the arguments that a user gives."""
    is_given = inspect.isroutine(value) or (
        inspect.isclass(value)
        and not issubclass(value, (BaseException, enum.Enum))
        and value.__name__ not in OTHERS_MAKE
    )
    parameters = inspect.signature(value).parameters.values() if is_given else ()
    starred = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [each.name for each in parameters if each.kind not in starred and not each.name.startswith(("_", "self"))]


def test_every_public_name_and_argument_has_words() -> None:
    objects = list(public_objects())
    assert len(objects) > 300
    assert [name for name, _, words in objects if not words] == []
    silent = [
        f"{name}({argument})"
        for name, value, words in objects
        if inspect.isclass(value) or not REFERS.search(words)
        for argument in arguments(value)
        if not re.search(rf"\b{argument}\b", words)
    ]
    assert silent == []


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
