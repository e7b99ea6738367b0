"""Variables of the environment: the page has all that the package reads, and a name that nobody reads is told of."""

from __future__ import annotations

import re
from pathlib import Path

import launching
import pages
import pytest

import mpistrategy
from mpistrategy.mpi.job import launcher
from mpistrategy.options import is_on

TEXTS = [path.read_text(encoding="utf-8") for path in Path(mpistrategy.__file__).parent.rglob("*.py")]


def test_the_tables_have_the_variables_that_the_package_reads() -> None:
    read = {name for text in TEXTS for name in re.findall(r"\bMPISTRATEGY_[A-Z]+(?:_[A-Z]+)*\b", text)}
    read = {name for name in read if not name.startswith(("MPISTRATEGY_TEST", "MPISTRATEGY_GPU_LANE"))}
    shown = set(re.findall(r"(?m)^\| `(MPISTRATEGY_\w+)` \|", pages.TEXTS["environment"]))
    known = {f"MPISTRATEGY_{name}" for name in launcher.NAMES}
    assert read | {"MPISTRATEGY_GPU_MAP"} == shown == known, "slurm/select_gpu.sh reads the map"


@pytest.mark.parametrize(
    ("on", "texts"), [(False, ("", "0", "off", "OFF", "False", "no")), (True, ("1", "yes"))], ids=["off", "on"]
)
def test_switches(on: bool, texts: tuple[str, ...]) -> None:
    assert [is_on(text) for text in texts] == [on] * len(texts)


@pytest.mark.one_rank
def test_a_job_tells_of_a_variable_that_nobody_reads(launch: launching.Launch) -> None:
    program = "import mpistrategy as ms\nms.MirroredStrategy().barrier()\n"
    job = launch(2, program, env={"MPISTRATEGY_CHEKC": "off"}).check()
    told = "OptionWarning: nothing reads the variable MPISTRATEGY_CHEKC of the environment.  "
    assert job.stderr.count(f"{told}After MPISTRATEGY_: Did you mean 'CHECK'?") == 1
