"""`mpistrategy bench --devices`: what it measures on GPUs is right and complete; without a GPU it says so."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gpu_here
import pytest
from replicas import RANK, SIZE

from mpistrategy.cli import main

HAS_CUPY = importlib.util.find_spec("cupy") is not None
ARGUMENTS = ["--sizes", "4096", "65536", "--seconds", "0.01"]


@gpu_here.needs_gpu
@pytest.mark.mpi(min_size=2)
def test_every_rank_takes_part_and_the_table_has_nccl_tests_bandwidth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert main.main(["bench", "--devices", "shared", *ARGUMENTS, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    if RANK:
        assert not said
        return
    found = json.loads(file.read_text())
    assert [case["case"] for case in found["cases"]] == ["4 KiB", "64 KiB"]
    for case in found["cases"]:
        assert [row["name"] for row in case["variants"]] == [
            "mpi4py, through the host", "mpistrategy", "mpistrategy out=", "mpistrategy arena",
            "mpistrategy arena, shared result",
        ]  # fmt: skip
        for row in case["variants"]:
            assert row["right"], row
            bandwidth = 2 * (SIZE - 1) / SIZE * case["bytes"] / row["median_us"] / 1e3
            assert row["bus_gb_s"] == pytest.approx(bandwidth, rel=0.1, abs=2e-3)
            assert f"| {row['name']} |" in said


@pytest.mark.skipif(HAS_CUPY, reason="there may be a GPU")
def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "--devices", "gpu", *ARGUMENTS]) == 2
    said = capsys.readouterr().err
    assert ("mpistrategy bench --devices gpu: " in said) == (RANK == 0)
    if RANK:
        return
    assert "expected a GPU for each rank" in said
    assert "Install the CuPy of your driver: pip install cupy-cuda12x" in said
    assert 'for CPUs leave devices out, or give devices="cpu"' in said


def test_what_needs_the_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "--devices", "gpu", "--save"]) == 2
    assert "found --devices gpu with --save" in capsys.readouterr().err
