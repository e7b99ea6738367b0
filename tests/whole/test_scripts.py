"""The example programs, as a person runs them: right on any number of ranks, and honest in their exit status."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from replicas import ALL, long_lane

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RANKS = (1, 2, 3, 4) if ALL else (1, 3)

Launch = Callable[..., launching.Finished]


def numbers(
    launch: Launch, ranks: int, folder: Path, script: str, *arguments: str, status: int = 0
) -> tuple[dict[str, Any], launching.Finished]:
    """Run a script; return what it wrote to its JSON file, and the job."""
    report = folder / f"{ranks}.json"
    job = launch(ranks, [SCRIPTS / "examples" / script, "--json", report, *arguments], cwd=folder)
    assert job.returncode == status, job
    return json.loads(report.read_text()), job


def same_up_to_rounding(some: Any, others: Any) -> None:
    # The sums differ in their last bit with the number of ranks; training carries that on for 460 steps.
    np.testing.assert_allclose(some, others, rtol=1e-9, atol=0)


@long_lane
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_digits_are_learnt_with_the_same_numbers_on_any_number_of_ranks(
    launch: Launch, tmp_path: Path, optimizer: str
) -> None:
    runs = []
    for ranks in RANKS:
        report, job = numbers(launch, ranks, tmp_path, "train_digits.py", "--optimizer", optimizer)
        printed = job.stdout
        assert report["accuracy"] >= 0.97, printed
        assert report["weights_equal"], printed
        assert f"trained 20 epochs on {ranks} replica" in printed
        assert "weights: identical on all replicas, bit for bit" in printed
        assert printed.count("epoch  20: loss") == 1, printed  # replica 0 alone tells
        image = (tmp_path / "digits.png").read_bytes()
        assert image.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(image) > 10_000
        (tmp_path / "digits.png").unlink()
        runs.append(report)
    for report in runs[1:]:
        assert report["accuracy"] == runs[0]["accuracy"]
        same_up_to_rounding(report["loss"], runs[0]["loss"])
        same_up_to_rounding(report["history"], runs[0]["history"])


def test_digits_with_batches_that_leave_ranks_without_images(launch: Launch, tmp_path: Path) -> None:
    # 1437 images: 4 batches of 359 and one of 1, of which 2 of 3 ranks get nothing.
    arguments = ("--batch", "359", "--epochs", "2", "--no-plot")
    runs = []
    for ranks, progress in ((1, "lines"), (3, "bar")):
        report, job = numbers(launch, ranks, tmp_path, "train_digits.py", *arguments, "--progress", progress, status=1)
        assert "wanted: at least 0.97" in job.stdout, "learnt badly, which is a failure"
        runs.append(report)
    same_up_to_rounding(runs[0]["history"], runs[1]["history"])
    assert runs[1]["weights_equal"]
    assert not (tmp_path / "digits.png").exists()
    assert "| 2/2 [" in job.stderr, job
    assert job.stderr.count("| 0/2 [00:00<?, ?it/s]") == 1, job  # replica 0's, none of replicas 1 and 2
    assert "epoch" not in job.stdout.replace("2 epochs", ""), job


@pytest.mark.each_mpi
def test_heat_conduction_agrees_with_the_exact_solution_on_any_number_of_ranks(launch: Launch, tmp_path: Path) -> None:
    runs = []
    for ranks in RANKS:
        report, job = numbers(launch, ranks, tmp_path, "heat_equation.py")
        assert job.stdout.count("mean temperature") == 1, job
        assert report["error"] < 1e-3
        runs.append([report["mean"], report["energy"], report["error"]])
    same_up_to_rounding(runs[1:], runs[:1] * (len(runs) - 1))


def test_heat_conduction_on_a_grid_too_coarse_is_a_failure(launch: Launch, tmp_path: Path) -> None:
    assert launch(2, [SCRIPTS / "examples" / "heat_equation.py", "--cells", "4"], cwd=tmp_path).returncode == 1


SLOW_PYTHON = """#!/bin/bash
case "$*" in
    -c*) exec %s "$@" ;;
    *venv*--clear*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" && cp "$0" "${@: -1}/bin/mpiexec" ;;
    *pip*) echo "Collecting numpy" && sleep 1.5 && [[ -z ${BROKEN-} ]] || { echo "ERROR: no network" && exit 1; } ;;
    *) echo "trained" ;;
esac
"""


@pytest.mark.parametrize("broken", [False, True])
def test_the_demo_says_what_it_installs_when_that_takes_long(tmp_path: Path, broken: bool) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/demo", "scripts/environment.sh", "pyproject.toml"):
        shutil.copy(SCRIPTS.parent / name, tmp_path / name)
    python = tmp_path / "slow_python"
    python.write_text(SLOW_PYTHON % sys.executable)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "SAY_EVERY": "0.2", "BROKEN": "yes" if broken else ""}
    command = [tmp_path / "scripts" / "demo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert re.search(r"(?m)^== still installing after \d+ s: Collecting numpy$", done.stdout), done
    assert done.returncode == (2 if broken else 0), done
    assert ("ERROR: no network\nerror: pip could not install" in done.stderr) is broken, done
    assert ("trained" in done.stdout) is not broken, done


@pytest.mark.parametrize(
    ("ranks", "arguments", "printed"),
    [
        (1, ("imports", "--runs", "3"), "wall clock: import mpistrategy "),
        (1, ("calls", "--rounds", "3"), "HierarchicalCopyAllReduce"),
        (1, ("forecast", "2", "128"), "     128   1710.164   1700.937"),
        (
            2,
            ("training_steps", "--widths", "64", "128", "10", "--rounds", "2"),
            "mpistrategy SGD, gradients in an arena",
        ),
        (2, ("between_nodes", "8", "--pairs", "2"), "is hidden behind computation"),
    ],
)
def test_measurements_run(launch: Launch, tmp_path: Path, ranks: int, arguments: tuple[str, ...], printed: str) -> None:
    job = launch(ranks, [SCRIPTS / "bench", *arguments], cwd=tmp_path).check()
    assert printed in job.stdout, job


@pytest.mark.parametrize(
    ("ranks", "arguments", "printed"),
    [
        (2, ("steps", "--steps", "100", "--strategies", "5"), ": fine"),
        (2, ("late_ranks", "--seconds", "2"), "no alarm in "),
        (2, ("interruptions", "--calls", "100"), "100 calls on 2 ranks:"),
        (2, ("large_counts", "--elements", "100000", "wire"), "elements on 2 ranks are right"),
        (1, ("checkpoints", "--kills", "10"), "0 unrecoverable, 0 torn"),
        (1, ("hostile_files", "--files", "20", "--no-jobs"), "0 errors that are not ours, 0 hangs"),
    ],
)
def test_soaks_run(launch: Launch, tmp_path: Path, ranks: int, arguments: tuple[str, ...], printed: str) -> None:
    job = launch(ranks, [SCRIPTS / "soak", *arguments], cwd=tmp_path).check()
    assert printed in job.stdout, job


def test_growth_prints_its_tables(launch: Launch) -> None:
    command = [
        sys.executable,
        str(SCRIPTS / "bench"),
        "growth",
        "mismatch",
        "watchdog",
        "--real",
        "--pretended",
        "16",
        "64",
    ]
    environment = launching.environment()
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    printed = done.stdout
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if re.match(r"\| \d", line)]
    lines, files = [row[1] for row in rows[:2]], [row[3] for row in rows[2:]]
    assert (lines, files) == (["5", "5"], ["3", "9"]), printed
