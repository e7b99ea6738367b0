"""The programs of scripts/examples: the same numbers on any number of ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest

pytestmark = [pytest.mark.one_rank, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"
Launch = Callable[..., launching.Finished]


def report(launch: Launch, ranks: int, folder: Path, program: str, *arguments: str) -> tuple[Any, str]:
    folder = folder / f"{program} on {ranks}"
    folder.mkdir()
    job = launch(ranks, [EXAMPLES / program, "report.json", *arguments], cwd=folder).check()
    return json.loads((folder / "report.json").read_text()), job.stdout


def test_the_tutorial_gives_the_numbers_of_one_process(launch: Launch, tmp_path: Path) -> None:
    one, _ = report(launch, 1, tmp_path, "fashion.py")
    three, printed = report(launch, 3, tmp_path, "fashion.py")
    for here, there in zip(one, three, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-9)
    assert printed.startswith("Number of ranks: 3\n")
    assert one[4][3] > 0.9
    assert one[5][0] == one[4][3]  # what was restored is what was saved


def test_the_ensemble_gives_the_numbers_of_one_process_and_of_mpi4py_alone(launch: Launch, tmp_path: Path) -> None:
    alone, _ = report(launch, 1, tmp_path, "ensemble_mpi4py.py")
    members, printed = report(launch, 3, tmp_path, "ensemble.py")
    np.testing.assert_allclose(members, alone, rtol=1e-9, atol=1e-12)
    assert printed.startswith("5 members on 3 ranks in 2 groups\n")
    assert np.std(alone, axis=0).min() > 0.01


@pytest.mark.each_mpi
@pytest.mark.parametrize(("ranks", "fails", "leave"), [(3, 2, [0, 2]), (4, 1, [1, 3])])
def test_an_ensemble_goes_on_without_a_group_that_fails(
    launch: Launch, tmp_path: Path, ranks: int, fails: int, leave: list[int]
) -> None:
    """Its ranks catch the error, all ranks meet, and the others fit its members."""
    alone, _ = report(launch, 1, tmp_path, "ensemble_mpi4py.py")
    members, printed = report(launch, ranks, tmp_path, "ensemble.py", str(fails))
    np.testing.assert_allclose(members, alone, rtol=1e-9, atol=1e-12)
    assert f"rank {fails} leaves: FloatingPointError: no gradient" in printed
    assert sorted(map(int, re.findall(r"rank (\d) leaves", printed))) == leave
    assert f"rank {sum(leave) - fails} leaves: RemoteError: rank 1 failed in its with block" in printed or fails == 1


def test_a_network_in_numpy_takes_variables(launch: Launch) -> None:
    right = numbers_of(launch(1, [EXAMPLES / "network_numpy.py"]).check().stdout)
    assert right[-1, 1] > 0.8 * right[-1, 2]
    for ranks in (1, 2, 3):
        lines = launch(ranks, [EXAMPLES / "network.py"]).check().stdout.splitlines()
        found = numbers_of("\n".join(sorted(lines, key=lambda line: int(line.split()[1][:-1]))))
        np.testing.assert_allclose(found, right.repeat(ranks, axis=0), rtol=1e-9)


def numbers_of(printed: str) -> np.ndarray:
    return np.array([re.findall(r"[\d.]+", line.replace(":", "")) for line in printed.splitlines()], float)


def test_conjugate_gradients_solve_on_any_number_of_ranks(launch: Launch, tmp_path: Path) -> None:
    for ranks in (1, 3):
        found, printed = report(launch, ranks, tmp_path, "conjugate_gradient.py", "3000", "80")
        assert max(found["residual"].values()) < 1e-8
        assert abs(found["middle"] - 1 / 0.1) < 1e-9  # far from the borders 2.1 x - x - x = 1
        assert f"80 iterations on {ranks} rank" in printed
