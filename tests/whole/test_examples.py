"""The programs of scripts/examples give the same numbers on any number of ranks; those of bench and soak run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import numpy as np
import pytest
from replicas import long_lane

pytestmark = [pytest.mark.one_rank, pytest.mark.slow]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
EXAMPLES = SCRIPTS / "examples"
Launch = Callable[..., launching.Finished]


@long_lane
def test_digits_are_learnt(launch: Launch, tmp_path: Path) -> None:
    reports = []
    for ranks in (1, 3):
        job = launch(ranks, [EXAMPLES / "train_digits.py", "--json", "report.json"], cwd=tmp_path).check()
        assert f"trained 20 epochs on {ranks} replica" in job.stdout
        assert job.stdout.count("epoch  20: loss") == 1, job  # replica 0 alone tells
        reports.append(json.loads((tmp_path / "report.json").read_text()))
    # The sums differ in their last bit with the number of ranks; training carries that on for 460 steps.
    np.testing.assert_allclose(reports[1]["history"], reports[0]["history"], rtol=1e-9)
    np.testing.assert_allclose(reports[1]["loss"], reports[0]["loss"], rtol=1e-9)
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.each_mpi
def test_conjugate_gradients_solve_on_any_number_of_ranks(launch: Launch) -> None:
    for ranks in (1, 3):
        printed = launch(ranks, [EXAMPLES / "conjugate_gradient.py", "3000", "80"]).check().stdout
        residual, middle = re.findall(r"residual ([\d.e-]+), x\[1500\] = ([\d.]+)", printed)[0]
        assert float(residual) < 1e-8
        assert middle == "10.000000000", "far from the borders 2.1 x - x - x = 1"


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (1, "bench calls --rounds 3"),
        (1, "bench growth 16"),
        (2, "bench sizes 8 --rounds 2"),
        (2, "soak steps --count 40"),
        (2, "soak interruptions --count 100"),
        (2, "soak large_counts --count 100000"),
        (1, "soak faults --count 2 raised"),
        (1, "soak kills --count 2"),
        (1, "soak saves --count 10"),
        (1, "soak hostile_files --count 3"),
    ],
)
def test_measurements_and_soaks_run(launch: Launch, ranks: int, command: str) -> None:
    name, *arguments = command.split()
    if ranks > 1:
        launch(ranks, [SCRIPTS / name, *arguments]).check()
        return
    words = [sys.executable, SCRIPTS / name, *arguments]  # what starts jobs of its own is none itself
    environment = launching.environment()
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done
