"""`mpistrategy bench --devices`: what it measures on GPUs is right and complete; without a GPU it says so."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import cupy_here
import pytest
from replicas import RANK, SIZE

from mpistrategy.cli import main
from mpistrategy.cli.bench import gpus

HAS_CUPY = importlib.util.find_spec("cupy") is not None
ARGUMENTS = ["--sizes", "4KiB,64KiB", "--lists", "tiny1000", "--seconds", "0.01"]


def test_every_rank_takes_part_and_the_table_has_nccl_tests_bandwidths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    with cupy_here.installed():
        assert main.main(["bench", "--devices", "shared", *ARGUMENTS, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    if RANK:
        assert not said
        return
    found = json.loads(file.read_text())
    rows = {(row["name"], row["bytes"]): row for row in found["rows"]}
    assert found["gpus"] == SIZE
    assert all(row["right"] and row["us"] > 0 and row["host_us"] > 0 for row in rows.values())
    for name, factor in (("all_reduce", 2 * (SIZE - 1) / SIZE), ("broadcast", 1)):
        row = rows[name, 65536]
        assert row["algbw_gb_s"] == pytest.approx(65536 / row["us"] / 1e3, rel=0.1, abs=2e-3)
        assert row["busbw_gb_s"] == pytest.approx(factor * 65536 / row["us"] / 1e3, rel=0.1, abs=2e-3)
    assert all(f"| {row['name']} |" in said for row in found["rows"])


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    factors = {kind: factor(8) for kind, factor in gpus._BUS.items()}
    assert factors == {"all_reduce": 14 / 8, "all_gather": 7 / 8, "broadcast": 1.0}


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
