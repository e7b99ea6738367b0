"""What device code asks of CuPy exists in CuPy, and the lane of scripts/gpu has the tests that ask for a GPU.

CuPy can be imported without a GPU: tests are skipped only where it is not installed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import runpy
import warnings
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

PACKAGE = Path(ms.__file__).parent
#: How files of ours call the package and its parts.
ROOTS = {"cupy": "cupy", "_cupy": "cupy", "cuda": "cupy.cuda"}


def dotted(node: ast.AST) -> str:
    """Return ``cupy.cuda.Event`` for the expression that says so; "" for others."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        if "torch" in ast.unparse(node):
            return ""  # torch.cuda
        if node.attr in ROOTS:
            return ".".join([ROOTS[node.attr], *names]) if node.attr == "_cupy" or names else ""
        names.insert(0, node.attr)
        node = node.value
    return ".".join([ROOTS[node.id], *names]) if isinstance(node, ast.Name) and node.id in ROOTS and names else ""


def asked_for() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "cupy" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("cupy", "cupyx"):
                yield from ((path.name, f"{node.module}.{alias.name}") for alias in node.names)
            name = dotted(node)
            if name.startswith("cupy."):
                yield path.name, name


def test_names_are_found_in_our_files() -> None:
    names = {name for _, name in asked_for()}
    assert {"cupy.cuda.Event", "cupy.RawModule", "cupyx.empty_pinned", "cupy.cuda.runtime.memcpyAsync"} <= names


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


def test_all_names_exist_in_cupy(cupy: Any) -> None:
    missing = []
    for file, name in sorted(set(asked_for())):
        root, *rest = name.split(".")
        module = pytest.importorskip("cupyx") if root == "cupyx" else cupy
        if name == "cupy.cuda.nccl":  # imported when somebody asks for it; warns where NCCL itself is not installed
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(name)
        try:
            reduce(getattr, rest, module)
        except AttributeError:
            missing.append(f"{file}: {name}")
    assert missing == []


def test_arguments_by_name_are_those_of_cupy(cupy: Any) -> None:
    described = {
        cupy.cuda.Event: ("disable_timing",),
        cupy.cuda.Stream: ("non_blocking",),
        cupy.RawModule: ("code", "options"),
        cupy.ndarray: ("memptr",),
    }
    for kind, arguments in described.items():
        text = f"{kind.__doc__}\n{kind.__init__.__doc__}"
        assert all(re.search(rf"\b{argument}\b", text) for argument in arguments), kind


def test_the_extras_ask_for_a_cupy_that_was_looked_at(cupy: Any) -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    extras = [Requirement(found) for found in re.findall(r'cuda1[23] = \["([^"]+)"\]', text)]
    assert sorted(extra.name for extra in extras) == ["cupy-cuda12x", "cupy-cuda13x"]
    version = importlib.metadata.version(next(name for name in importlib.metadata.packages_distributions()["cupy"]))
    assert all(version in extra.specifier for extra in extras)


def test_no_test_that_asks_for_a_gpu_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU it is skipped: what no row of the lane runs, nobody runs."""
    tests, lane = Path(__file__).parents[1], Path(__file__).parents[2] / "scripts" / "gpu"
    monkeypatch.syspath_prepend(str(lane))
    run = {file for row in runpy.run_path(str(lane / "__main__.py"))["BESIDE"] for file in row.files}
    forgotten = []
    for path in sorted(tests.rglob("test_*.py")):
        file, text = str(path.relative_to(tests)), path.read_text(encoding="utf-8")
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        asking = {
            f"{file}::{test.name}"
            for test in functions
            if test.name[:4] == "test"
            and (
                "cupy" in {argument.arg for argument in test.args.args}
                or "needs_gpu" in ast.unparse(test.decorator_list)
            )
        }
        if "cupy_or_skip" in text and not asking and not any(name.startswith(file) for name in run):
            asking.add(file)
        forgotten += [name for name in asking if {name, file}.isdisjoint(run)]
    assert forgotten == []
