"""The README's programs run and print what it shows; the names it promises exist, and those it denies do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

import mpistrategy as ms

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# A program names its file in its first line; what it prints is the next block.
PROGRAMS = re.findall(r"```python\n(# (\S+\.py)\n.*?)```.*?```text\n(.*?)```", README, flags=re.DOTALL)
PORTING = README.partition("## Coming from tf.distribute")[2].partition("### Not there yet")[0]
MISSING = README.partition("### Not there yet")[2].partition("## Which MPI")[0]


def names(text: str) -> list[str]:
    return re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", text)


def exists(name: str) -> bool:
    here: object = ms
    for part in name.split("."):
        if not hasattr(here, part):
            return False
        here = getattr(here, part)
    return True


def test_every_program_says_its_file_and_what_it_prints() -> None:
    assert len(PROGRAMS) == README.count("```python") >= 2


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


def test_names_of_the_porting_table_exist() -> None:
    rows = [row.split("|") for row in PORTING.splitlines() if row.startswith("| `")]
    assert len(rows) > 20
    named = [name for _, _, here, *_ in rows for name in names(here)]
    named += names(PORTING.partition("Not in tf.distribute: ")[2].partition("For unit tests")[0])
    assert [name for name in named if not exists(name)] == []


def test_names_said_to_be_missing_are_missing() -> None:
    assert names(MISSING)
    assert [name for name in names(MISSING) if exists(name)] == [], "these exist now: move them into the porting table"


def test_files_named_in_the_readme_exist() -> None:
    files = re.findall(r"scripts/\w+(?:\.py)?", README) + re.findall(r"\]\(([\w/.]+)\)", README)
    assert len(files) > 8
    for file in files:
        assert (ROOT / file).exists(), file
