"""Variables of the environment: all are in the table, and one that nobody reads is told of."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import launching
import pages
import pytest

import mpistrategy
from mpistrategy.mpi.job import environment
from mpistrategy.options import is_on

Launch = Callable[..., launching.Finished]
ROOT = Path(mpistrategy.__file__).parent
TEXTS = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


def test_the_tables_have_the_variables_that_the_package_reads() -> None:
    read = {name for text in TEXTS.values() for name in re.findall(r"\bMPISTRATEGY_[A-Z]+(?:_[A-Z]+)*\b", text)}
    assert {name for name in read if not name.startswith(("MPISTRATEGY_TEST", "MPISTRATEGY_GPU_LANE"))} == {
        *environment.VARIABLES,
    }
    page = pages.TEXTS["environment"]
    assert set(re.findall(r"(?m)^\| `(MPISTRATEGY_\w+)` \|", page)) == {*environment.VARIABLES}


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("", False),
        ("0", False),
        ("off", False),
        ("OFF", False),
        ("False", False),
        ("no", False),
        ("1", True),
        ("yes", True),
    ],
)
def test_switches(text: str, on: bool) -> None:
    assert is_on(text) is on


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("MPISTRATEGY_TIMEOUT_SECOND", "Did you mean 'MPISTRATEGY_TIMEOUT_SECONDS'"),
        ("MPISTRATEGY_ZZZ", "There are MPISTRATEGY_ALONE, MPISTRATEGY_CHECK"),
        ("MPISTRATEGY_\x1b[2J\udcf6", r"MPISTRATEGY_\x1b[2J\udcf6"),
    ],
)
def test_a_variable_that_nobody_reads_is_told_of_once(name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_warned", set())
    monkeypatch.setenv(name, "60")
    with pytest.warns(mpistrategy.errors.OptionWarning, match=re.escape(told)) as caught:
        environment.warn_of_unknown()
    assert [warning.filename for warning in caught] == [__file__]
    assert "\x1b" not in str(caught[0].message)
    environment.warn_of_unknown()  # not again: a warning would be an error here


@pytest.mark.each_mpi
@pytest.mark.one_rank
def test_a_job_tells_of_it_on_rank_0(launch: Launch) -> None:
    program = "import mpistrategy as ms\nms.MirroredStrategy().barrier()\n"
    job = launch(2, program, env={"MPISTRATEGY_CHEKC": "off"}).check()
    told = "nothing reads the variable MPISTRATEGY_CHEKC of the environment.  Did you mean 'MPISTRATEGY_CHECK'?"
    assert job.stderr.count(told) == 1
    assert "OptionWarning" in job.stderr
