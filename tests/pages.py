"""The README and the pages of the guide as the tests see them: their blocks of code, and what marks say of them.

A comment on the line before a block says what a test cannot do with it:
``<!-- not run: needs Slurm -->`` it is only shown; ``<!-- numbers vary -->`` any number stands for those shown.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import launching

import mpistrategy

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "mpistrategy" / "cli" / "guide"
FILES = {"README": ROOT / "README.md", **{path.stem: path for path in sorted(GUIDE.glob("*.md"))}}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}

_BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PROGRAM = re.compile(r"# (\S+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: its page; "README" for that.
        kind: the language that it is of.
        source: what is in it.
        mark: the comment before it; "" for none.
    """

    page: str
    kind: str
    source: str
    mark: str

    @property
    def file(self) -> str:
        """The file that a program names in its first line; "" for an example."""
        found = _PROGRAM.match(self.source)
        return found[1] if found else ""

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith("not run: ")

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the commands of a console, each with the lines that it prints."""
        _, *parts = re.split(r"(?m)^\$ ", self.source)
        assert parts, f"no command in {self}"
        for part in parts:
            command, *lines = part.splitlines()
            yield command, lines

    def missing(self, lines: list[str], said: str) -> str | None:
        """Return the first of the lines shown that was not said, in order; `...` stands for anything."""
        place = 0
        for line in lines:
            pattern = ".*".join(map(re.escape, line.split("...")))
            if self.mark == "numbers vary":
                pattern = re.sub(r"\d+(?:\\\.\d+)?", r"[\\d.]+", pattern)
            found = re.compile(pattern).search(said, place)
            if not found:
                return line
            place = found.end()
        return None


def blocks() -> Iterator[Block]:
    for page, text in TEXTS.items():
        for mark, kind, source in _BLOCK.findall(text):
            yield Block(page, kind, source, mark)


BLOCKS = list(blocks())
PYTHON = [block for block in BLOCKS if block.kind == "python" and block.is_run]
PROGRAMS = [block for block in PYTHON if block.file]
PREAMBLE = next(block for block in PYTHON if block.mark == "what every example begins with").source
EXAMPLES = [block for block in PYTHON if not block.file and block.source != PREAMBLE]

# Runs the examples one after the other; rank 0 writes what each printed, and which functions of the package it called.
_RUN_EXAMPLES = """
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


@dataclass(frozen=True)
class Ran:
    """What the examples printed on replica 0, and the functions they called: (file, first line)."""

    printed: list[str]
    called: set[tuple[str, int]]


@functools.cache
def _examples_job() -> tuple[launching.Finished, str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, example in enumerate(EXAMPLES):
            source = f"{PREAMBLE}\n{example.source}"
            (folder / f"example_{number:03}.py").write_text(source, encoding="utf-8")
        program = folder / "run_examples.py"
        program.write_text(_RUN_EXAMPLES, encoding="utf-8")
        package = os.path.join(os.path.dirname(inspect.getfile(mpistrategy)), "")
        job = launching.launch(2, [program, folder, package], cwd=folder)
        written = folder / "report.json"
        return job, written.read_text(encoding="utf-8") if written.exists() else ""


def run_examples() -> Ran:
    """Run all examples in one job of 2 ranks; it serves all tests, and fails them all."""
    job, text = _examples_job()
    job.check()
    report = json.loads(text)
    return Ran(report["printed"], {(file, line) for file, line in report["called"]})
