"""`mpistrategy guide`: pages, errors, words, and what it says about names that are none."""

from __future__ import annotations

import builtins
import copy
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from pages import GUIDE

import mpistrategy as ms
from mpistrategy.cli import main
from mpistrategy.cli.guide import pages

pytestmark = pytest.mark.one_rank

PACKAGE = Path(ms.__file__).parent


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main.main(["guide", *arguments]) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_the_list_has_every_page_with_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    listed = said(capsys, "--list")
    assert re.search(r"(?m)^Reference\n(?:  .*\n)*  errors +Errors and warnings$", listed)
    for path in GUIDE.glob("*.md"):
        title = path.read_text(encoding="utf-8").splitlines()[0]
        assert title.startswith("# ")
        assert re.search(rf"(?m)^  {path.stem} +{re.escape(title[2:])}$", listed)
    assert said(capsys) == listed
    parts = re.findall(r"(?m)^\w.*$", listed.partition("\n\n")[0])
    assert parts == list(pages.PARTS) == ["Start", "How to", "Explain", "Reference", "For developers"]


def test_pages_made_from_the_package_have_names_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"(?m)^\| `ReduceOp` \| \w.+ \|$", said(capsys, "names"))
    assert re.search(r"(?m)^  --timeout SECONDS +how long .*$", said(capsys, "command-line"))


def test_a_page_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "concepts")
    assert shown.startswith("# Concepts and words\n")
    assert "[when ranks disagree](disagreement.md)" in shown
    assert "<!--" not in shown
    assert "strategy = ms.MirroredStrategy()" in shown
    assert said(capsys, "Concepts.md") == shown
    assert said(capsys, "mpistrategy.errors.ShapeError") == said(capsys, "ShapeError")


def test_every_error_and_warning_tells_its_cause_and_cure(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "errors")
    for name, kind in pages.classes().items():
        shown = said(capsys, name.lower())
        assert shown.startswith(f"# {name}\n\nIs also: ")
        assert (kind.__doc__ or "?").splitlines()[0] in shown
        if name not in ("MpiStrategyError", "CheckpointError"):  # bases
            assert "\nCause: " in shown
            assert "\nCure: " in shown
        assert f"## {name}\n" in page


def test_the_package_names_pages_that_exist() -> None:
    """In errors and docstrings, also where the name stands in the next line."""
    texts = [" ".join(path.read_text(encoding="utf-8").split()) for path in PACKAGE.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"`mpistrategy guide ([a-z-]+)`", text)}
    assert len(named) > 5
    assert sorted(named - pages.pages().keys()) == []


def test_a_word_is_found_with_page_and_section(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--search", "EXPECT_LONG")
    assert re.search(r"(?m)^errors: ", found)
    assert re.search(r"(?m)^  CollectiveTimeoutError: .*expect_long", found)
    assert re.search(r"(?m)^  and \d+ more$", said(capsys, "--search", "collective"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["consepts"],
            "found the page 'consepts'; expected a page of mpistrategy guide --list, an error or a warning. ",
        ),
        (["consepts"], "Did you mean 'concepts'?"),
        (["CollectiveMismatch"], "Did you mean 'CollectiveMismatchError'?"),
        (["--search", "  "], "found the word '  '; expected a word of some page"),
        (["--search", "qqqqqq"], "found the word 'qqqqqq'"),
    ],
)
def test_what_is_nowhere(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert told in said(capsys, *arguments, status=2)


def test_the_guide_starts_no_mpi_and_needs_no_network_and_other_commands_load_no_pages() -> None:
    """`mpistrategy run` imports the command on every rank."""
    program = (
        "import socket, sys\n"
        "socket.socket = None\n"
        "from mpistrategy.cli.main import main\n"
        "assert 'mpistrategy.cli.guide.pages' not in sys.modules\n"
        "status = main(['guide', 'LaunchError'])\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
        "sys.exit(status)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_an_error_names_its_entry_below_its_text() -> None:
    class Mine(ms.errors.ShapeError):
        pass

    for name, kind in (*pages.classes().items(), ("ShapeError", Mine)):
        if not issubclass(kind, ms.errors.MpiStrategyError):
            continue
        error = kind("what happened")
        for one in (error, copy.copy(error), *([] if kind is Mine else [pickle.loads(pickle.dumps(error))])):
            assert str(one) == "what happened"
            lines = traceback.format_exception_only(one)
            assert lines[1:] == [f"More about it: mpistrategy guide {name}\n"]


def test_an_error_in_a_structure_of_the_operating_system_keeps_its_text() -> None:
    error: Any = ms.errors.CheckpointWriteError.at("save", found="a full disk", expected="room")
    assert isinstance(error, builtins.OSError)
    assert (error.where, str(error)) == ("save", "save: found a full disk; expected room.")
