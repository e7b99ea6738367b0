"""The README's programs and examples run and print what it shows; the names in its tables are those of the package."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launching
import pytest
from conformance.cases import DEFAULT_ORACLE, load_cases
from conformance.programs_api import CLASSES, OLD_NAMES

import mpistrategy as ms
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.one_rank

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PORTING = README.partition("## Coming from tf.distribute")[2].partition("### Not there yet")[0]
MISSING = README.partition("### Not there yet")[2].partition("\n## ")[0]
WORDS = README.partition("\n## Words\n")[2].partition("\n## ")[0]
# A program names its file in its first line; what it prints is the next block.
PROGRAMS = re.findall(r"```python\n(# (\S+\.py)\n.*?)```.*?```text\n(.*?)```", README, flags=re.DOTALL)
PREAMBLE, *EXAMPLES = re.findall(r"```python\n(.*?)```", PORTING, flags=re.DOTALL)
# Rows of the porting tables: their cells "there" and "here".
ROWS = [tuple(row.split("|")[1:3]) for row in PORTING.splitlines() if row.startswith("| ") and "| here |" not in row]

# Runs the examples one after the other; rank 0 writes what each printed, and which functions of the package it called.
RUN_EXAMPLES = """
import contextlib, io, json, sys
from pathlib import Path

folder, package = Path(sys.argv[1]), sys.argv[2]
called, printed = set(), []


def watch(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        if not caller.startswith(package):
            called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))


for file in sorted(folder.glob("example_*.py")):
    program = compile(file.read_text(encoding="utf-8"), file, "exec")
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        sys.setprofile(watch)
        exec(program, names)
        sys.setprofile(None)
    printed.append(shown.getvalue())
if names["rank"] == 0:
    report = {"printed": printed, "called": sorted(called)}
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
"""


@dataclass
class Ran:
    """What the examples printed on replica 0, and the functions they called: (file, first line)."""

    printed: list[str]
    called: set[tuple[str, int]]


#: The job of the examples once it has run, and what it wrote: one serves all tests, and fails them all.
_JOB: list[tuple[launching.Finished, str]] = []


@pytest.fixture
def ran(launch: Callable[..., launching.Finished], tmp_path: Path) -> Ran:
    """One job of 2 ranks for all examples."""
    if not _JOB:
        for number, example in enumerate(EXAMPLES):
            source = f"{PREAMBLE}\n{example}"
            (tmp_path / f"example_{number:02}.py").write_text(source, encoding="utf-8")
        program = tmp_path / "run_examples.py"
        program.write_text(RUN_EXAMPLES, encoding="utf-8")
        job = launch(2, [program, tmp_path, _package_folder()])
        written = tmp_path / "report.json"
        _JOB.append((job, written.read_text(encoding="utf-8") if written.exists() else ""))
    job, text = _JOB[0]
    job.check()
    report = json.loads(text)
    return Ran(report["printed"], {(file, line) for file, line in report["called"]})


def _package_folder() -> str:
    return os.path.join(os.path.dirname(inspect.getfile(ms)), "")


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


def shown_in(example: str) -> list[str]:
    """Return what an example's comments say that it prints."""
    return re.findall(r"^ *say\(.*\)  # (.*)$", example, flags=re.MULTILINE)


HERE = [name for _, here in ROWS for name in names(here)]
OURS = names(PORTING.partition("Not in tf.distribute: ")[2])


def test_every_block_of_python_is_a_program_or_an_example() -> None:
    assert len(PROGRAMS) >= 2
    assert len(EXAMPLES) > 10
    assert len(PROGRAMS) + len(EXAMPLES) + 1 == README.count("```python")


@pytest.mark.parametrize(("source", "file", "shown"), PROGRAMS, ids=[file for _, file, _ in PROGRAMS])
def test_programs_print_what_the_readme_shows(
    launch: Callable[..., launching.Finished], tmp_path: Path, source: str, file: str, shown: str
) -> None:
    program = tmp_path / file
    program.write_text(source, encoding="utf-8")
    job = launch(2, program, cwd=tmp_path)
    printed = (job.stdout + job.stderr).replace(str(tmp_path), "/home/you")
    for line in shown.splitlines():
        assert line in printed, job
    assert job.returncode == ("the whole job ends here" in shown), job


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_prints_what_its_comments_say(ran: Ran, number: int) -> None:
    shown = shown_in(EXAMPLES[number])
    assert len(shown) == EXAMPLES[number].count("say("), "every say(...) has its output behind it"
    assert ran.printed[number].splitlines() == shown


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_prints_the_same_on_simulated_replicas(number: int) -> None:
    program = compile(f"{PREAMBLE}\n{EXAMPLES[number]}", f"example_{number:02}.py", "exec")

    def replica() -> list[str]:
        said: list[str] = []
        exec(program, {"__name__": "__main__", "print": lambda *words: said.append(" ".join(map(str, words)))})
        return said

    assert "\n".join(run_replicas(replica, 2)[0]).splitlines() == shown_in(EXAMPLES[number])


def test_the_words_of_tf_distribute_are_explained() -> None:
    explained = "".join(re.findall(r"^\| ([^|]+) \|", WORDS, flags=re.MULTILINE))
    wanted = ("replica", "cross-replica", "update context", "mirrored", "per-replica", "ON_READ", "destination")
    assert [word for word in wanted if word not in explained] == []


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


def test_every_name_of_the_porting_table_is_used_in_an_example(ran: Ran) -> None:
    """A function or property must have been called by an example; anything else, and what one overrides, written."""
    trees = [ast.walk(ast.parse(example)) for example in (PREAMBLE, *EXAMPLES)]
    nodes = [node for tree in trees for node in tree]
    written = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    overridden = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    unused = []
    for name in HERE + OURS:
        found = find(name)
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        code = getattr(found, "__code__", None)
        last = name.rpartition(".")[2]
        if code is None:
            is_used = last in written
        else:
            is_used = (code.co_filename, code.co_firstlineno) in ran.called
            is_used |= last.endswith("_implementation") and last in overridden
        if not is_used:
            unused.append(name)
    assert unused == []


def test_names_said_to_be_missing_are_missing() -> None:
    missing = MISSING.partition("Write `")[0]
    assert names(missing)
    assert [name for name in names(missing) if exists(name)] == [], "these exist now: move them into the porting table"


def test_files_named_in_the_readme_exist() -> None:
    files = re.findall(r"scripts/\w+(?:\.py)?", README) + re.findall(r"\]\(([\w/.]+)\)", README)
    assert len(files) > 8
    for file in files:
        assert (ROOT / file).exists(), file
