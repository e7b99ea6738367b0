"""What the README and the guide show is so: their programs and examples run, their commands print what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import pages
import pytest
from pages import BLOCKS, EXAMPLES, PREAMBLE, PROGRAMS

from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.one_rank

NUMBERED = [pytest.param(number, id=f"{block.page}-{number}") for number, block in enumerate(EXAMPLES)]


def shown_in(example: str) -> list[str]:
    """Return what an example's comments say that it prints."""
    return re.findall(r"^ *say\(.*\)  # (.*)$", example, flags=re.MULTILINE)


def shown_by(program: pages.Block) -> str:
    """Return the block of text after a program; "" where none follows."""
    place = BLOCKS.index(program) + 1
    after = BLOCKS[place] if place < len(BLOCKS) else program
    return after.source if after.kind == "text" and after.page == program.page else ""


def is_run_by_a_command(program: pages.Block) -> bool:
    """Return whether a command of the page runs a program, and no text says what two ranks print."""
    consoles = [block for block in BLOCKS if block.kind == "console" and block.page == program.page and block.is_run]
    return any(program.file in console.source for console in consoles) and not shown_by(program)


@pytest.mark.parametrize(
    "program",
    [program for program in PROGRAMS if not is_run_by_a_command(program)],
    ids=lambda block: f"{block.page}-{block.file}",
)
def test_a_program_prints_what_is_shown(
    launch: Callable[..., launching.Finished], tmp_path: Path, program: pages.Block
) -> None:
    path = tmp_path / program.file
    path.write_text(program.source, encoding="utf-8")
    job = launch(2, path, cwd=tmp_path)
    said = (job.stdout + job.stderr).replace(str(tmp_path), "/home/you")
    shown = shown_by(program)
    for line in shown.splitlines():
        assert line in said, job
    assert job.returncode == ("the whole job ends here" in shown), job


@pytest.mark.parametrize("number", NUMBERED)
def test_an_example_prints_what_its_comments_say(number: int) -> None:
    source = EXAMPLES[number].source
    assert len(shown_in(source)) == source.count("say("), "every say(...) has its output behind it"
    assert pages.run_examples().printed[number].splitlines() == shown_in(source)


@pytest.mark.parametrize("number", NUMBERED)
def test_an_example_prints_the_same_on_simulated_replicas(number: int) -> None:
    program = compile(f"{PREAMBLE}\n{EXAMPLES[number].source}", f"example_{number:03}.py", "exec")

    def replica() -> list[str]:
        said: list[str] = []
        exec(program, {"__name__": "__main__", "print": lambda *words: said.append(" ".join(map(str, words)))})
        return said

    assert "\n".join(run_replicas(replica, 2)[0]).splitlines() == shown_in(EXAMPLES[number].source)


def console_environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**launching.environment(), "PATH": path, **launching.files_in(folder / ".mpi")}
    if launching.IS_OPEN_MPI:
        (folder / ".mpi").mkdir()
        environment |= {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        }
    return environment


#: The README's commands run in a clone: test_readme.
CONSOLES = sorted({block.page for block in BLOCKS if block.kind == "console" and block.is_run} - {"README"})


@pytest.mark.parametrize("page", CONSOLES)
@pytest.mark.slow
def test_the_commands_of_a_page_print_what_is_shown(tmp_path: Path, page: str) -> None:
    """In order, in one folder, where the programs of the page are."""
    environment = console_environment(tmp_path)
    for program in PROGRAMS:
        if program.page == page:
            (tmp_path / program.file).write_text(program.source, encoding="utf-8")
    for block in BLOCKS:
        if (block.page, block.kind) != (page, "console") or not block.is_run:
            continue
        for command, lines in block.commands():
            done = subprocess.run(
                ["bash", "-c", command],
                env=environment,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=100,
                check=False,
            )
            said = done.stdout.replace(str(tmp_path), "/home/you")
            missing = block.missing(lines, said)
            assert missing is None, f"$ {command}\n{said}\n--- has not: {missing}"
            assert lines or done.returncode == 0, f"$ {command}\n{said}"


def test_files_that_are_named_exist() -> None:
    """Links between pages are checked where the site is built."""
    named = {name for text in pages.TEXTS.values() for name in re.findall(r"`(scripts/\w+(?:/\w+)*(?:\.py)?)", text)}
    assert len(named) > 4
    named.update(re.findall(r"\]\((?!https:|#)([^)#\s]+)", pages.TEXTS["README"]))
    assert [name for name in sorted(named) if not (pages.ROOT / name).exists()] == []


def test_no_index_has_this_package_yet() -> None:
    """Installing it by name is not what a page may tell to do."""
    assert not [page for page, text in pages.TEXTS.items() if re.search(r"pip install '?mpistrategy", text)]
