"""The programs of scripts/examples give the same numbers on any number of ranks; those of bench and soak run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

pytestmark = [pytest.mark.one_rank, pytest.mark.slow]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
EXAMPLES = SCRIPTS / "examples"
Launch = Callable[..., launching.Finished]


def test_conjugate_gradients_solve_on_any_number_of_ranks(launch: Launch) -> None:
    for ranks in (1, 2):
        printed = launch(ranks, [EXAMPLES / "conjugate_gradient.py", "600", "80"]).check().stdout
        residual, middle = re.findall(r"residual ([\d.e-]+), x\[300\] = ([\d.]+)", printed)[0]
        assert float(residual) < 1e-8
        assert middle == "10.000000000", "far from the borders 2.1 x - x - x = 1"


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (1, "bench calls --rounds 3"),
        (1, "bench growth 16"),
        (2, "bench sizes 8 --rounds 2"),
        (2, "soak steps --count 2"),
        (2, "soak interruptions --count 100"),
        (2, "soak large_counts --count 100000"),
        (1, "soak faults --count 2 raised"),
        (1, "soak kills --count 1"),
        (1, "soak saves --count 10"),
        (1, "soak hostile_files --count 1"),
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
