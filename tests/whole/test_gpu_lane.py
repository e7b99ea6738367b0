"""scripts/gpu_lane where there is no GPU: what it says then, and its own logic, on the double."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pages
import pytest

pytestmark = [pytest.mark.one_rank, pytest.mark.slow]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_lane.py"
HAS_CUPY = importlib.util.find_spec("cupy") is not None


@pytest.fixture(scope="module")
def gpu_lane() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_lane", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_lane"] = module  # its dataclasses look for it
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


@pytest.fixture
def lane(gpu_lane: Any, tmp_path: Path) -> Any:
    logs, work = tmp_path / "logs", tmp_path / "work"
    logs.mkdir()
    work.mkdir()
    return gpu_lane.Lane(True, logs, work, gpu_lane.environment(True), time.monotonic() + 100)


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    file = tmp_path / "lane.json"
    command = [sys.executable, SCRIPT, "--json", file, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    report = json.loads(file.read_text()) if file.exists() else {}
    return ended.returncode, report, ended.stdout + ended.stderr


@pytest.mark.skipif(HAS_CUPY, reason="there may be a GPU")
def test_without_a_gpu_every_row_says_why_and_so_does_the_status(launch: Any, tmp_path: Path, gpu_lane: Any) -> None:
    status, report, said = run(tmp_path)
    assert status == 3, said
    assert [row["name"] for row in report["rows"]] == [name for name, *_ in gpu_lane.STEPS]
    assert {row["result"] for row in report["rows"]} == {"not run"}
    assert all("No module named 'cupy'" in row["text"] for row in report["rows"])
    assert said.count("| not run | no GPU that works with CuPy") == len(gpu_lane.STEPS)
    assert f"{len(gpu_lane.STEPS)} not run" in said


def test_on_the_double_rows_have_figures(launch: Any, tmp_path: Path) -> None:
    status, report, said = run(tmp_path, "--double", "--only", "gpu,staged")
    assert status == 0, said
    rows = {row["name"]: row for row in report["rows"]}
    assert {row["result"] for row in rows.values()} == {"ok"}, said
    assert rows["staged"]["figures"]["path"] == ["staged"]
    assert "| all-reduce, staged through the host, 2 ranks on one GPU | ok | 4096 bytes: " in said
    assert (tmp_path / "lane.logs" / "staged.txt").read_text().startswith("$ ")


@pytest.mark.skipif(HAS_CUPY, reason="then something can")
def test_without_cupy_nothing_can_stand_in_for_a_gpu(launch: Any, tmp_path: Path) -> None:
    status, report, said = run(tmp_path, "--on-cpu", "--only", "gpu,staged")
    assert status == 3, said
    assert {row["result"] for row in report["rows"]} == {"not run"}
    assert said.count("nothing can stand in for a GPU here (no ") == 2


def test_bad_arguments_are_status_2(launch: Any, tmp_path: Path) -> None:
    for arguments, told in ((("--only", "no_row"), "no row no_row"), (("--from", "nowhere"), "no folder nowhere")):
        status, _, said = run(tmp_path, *arguments)
        assert status == 2
        assert told in said


@pytest.mark.parametrize(
    ("results", "status"),
    [(["ok"], 0), (["ok", "waiting"], 0), (["ok", "not run"], 3), (["not run", "WRONG"], 1), (["WRONG", "ok"], 1)],
)
def test_the_status_tells(gpu_lane: Any, results: list[str], status: int) -> None:
    rows = [gpu_lane.Row("a", "what it is", result, "its text") for result in results]
    assert gpu_lane.status_of(rows) == status
    table = gpu_lane.table(rows, {"date": "2026-01-02", "device": "NVIDIA X"}, 12.3)
    assert table.startswith("| on NVIDIA X, 2026-01-02 | | | limit |\n|---|---|---|---|\n")
    unjudged = gpu_lane.table(rows, {"date": "2026-01-02", "is_measured": False}, 12.3)
    assert "| limit; times and rates are a GPU's, and not judged here |\n" in unjudged
    assert table.count("| what it is |") == len(results)
    assert f"{results.count('ok')} ok" in table or "ok" not in results


def test_what_hangs_is_ended_with_all_that_it_started(lane: Any) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time\\n'\n"
        "  'signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(60)'], start_new_session=True)\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    started = time.monotonic()
    ended = lane.job("hangs", [sys.executable, "-c", program], 1)
    assert ended.status is None
    assert time.monotonic() - started < 20
    assert ended.why.startswith("its time was up: child ")
    child = Path("/proc", ended.output.split()[1])
    deadline = time.monotonic() + 10
    while child.exists() and (child / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child lives on"


def test_wheels_and_a_packed_mpi_come_from_a_folder(gpu_lane: Any, lane: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_thing.py", "print('from a wheel')")
        wheel.writestr("tiny_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_thing-1.0.dist-info/RECORD", "")
    packed = tmp_path / "ompi-cuda"
    (packed / "bin").mkdir(parents=True)
    mpiexec = packed / "bin" / "mpiexec"
    mpiexec.write_text('#!/bin/sh\necho "mpiexec (OpenRTE) 4.1.4, $SECRET"\n')
    mpiexec.chmod(0o755)
    (packed / "env.sh").write_text(
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nexport PATH=$here/bin:$PATH SECRET="two\nlines"\n'
    )
    with tarfile.open(folder / "ompi-cuda.tar.xz", "w:xz") as archive:
        archive.add(packed, "ompi-cuda")
    assert gpu_lane.prepare(lane, folder) == ""
    assert lane.mpiexec[0] == str(lane.work / "ompi-cuda" / "bin" / "mpiexec")
    assert "--bind-to" in lane.mpiexec
    assert lane.environment["SECRET"] == "two\nlines"
    settings = (lane.work / "ompi-cuda" / "etc" / "openmpi-mca-params.conf").read_text().splitlines()
    assert "btl = self,vader,smcuda" in settings
    assert lane.job("tiny", [lane.python, "-c", "import tiny_thing"], 20).output == "from a wheel\n"
    (folder / "other.tar.xz").touch()
    assert "holds 2 archives" in gpu_lane.prepare(lane, folder)


def test_operations_over_their_budget_are_named(gpu_lane: Any) -> None:
    budgets = sys.modules["gpu_budgets"]
    found = {name: list(by_path["nccl"]) for name, by_path in budgets.BUDGETS.items()}
    assert budgets.over("nccl", found) == []
    found["Adam, 161 variables"][0] += 1
    assert budgets.over("nccl", found) == ["Adam, 161 variables on nccl: 4 launches, and the budget is 3"]
    assert max(each[0] for each in budgets.BUDGETS["Adam, 161 variables"].values()) <= 4
    assert max(each[0] for each in budgets.BUDGETS["Adam, clipped and checked"].values()) <= 7


def test_counts_are_shown_beside_their_budgets(gpu_lane: Any) -> None:
    shown = sys.modules["gpu_budgets"].table({"nccl": {"SUM of 4 KiB": [9, 8, 7, 6, 5, 4]}})
    assert "| SUM of 4 KiB | 9, 8, 5 (most: 0, 1, 0) | not counted (most: 0, 1, 1) |" in shown


def test_the_guide_has_the_table_of_budgets(gpu_lane: Any) -> None:
    assert sys.modules["gpu_budgets"].table() in pages.TEXTS["gpus"]


def test_the_guide_has_a_row_for_each_figure(gpu_lane: Any) -> None:
    page = pages.TEXTS["gpu-lane"]
    measured = ("limits", "packing", "staged", "mpi", "nccl1", "nccl", "hidden", "nodes", "host", "optimizers")
    assert all(f"| {what} |" in page for name, what, *_ in gpu_lane.STEPS if name in measured)


def test_the_rows_together_have_less_than_the_time_of_the_lane(gpu_lane: Any) -> None:
    assert sum(seconds for *_, seconds in gpu_lane.STEPS) <= gpu_lane.LIMIT <= 8 * 60


def test_the_help_names_every_row(gpu_lane: Any) -> None:
    told = (SCRIPT.parent / "gpu_lane").read_text().partition("set -euo")[0].replace("\n#", "")
    listed = told.partition("each with a time of its own:")[2].partition(".")[0]
    assert [name.strip() for name in listed.split(",")] == [name for name, *_ in gpu_lane.STEPS]


@pytest.mark.parametrize(("at_once", "logs"), [(True, ["row-nccl.txt", "row-staged.txt"]), (False, ["row.txt"])])
def test_a_row_of_tests_runs_on_all_paths_and_one_that_fails_is_wrong(
    gpu_lane: Any, lane: Any, tmp_path: Path, at_once: bool, logs: list[str]
) -> None:
    program = tmp_path / "test_it.py"
    program.write_text("import os\ndef test_it(): assert os.environ['MPISTRATEGY_TEST_PATHS'] != 'nccl'\n")
    lane.paths = ["staged", "nccl"]
    lane.mpiexec = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[3:]))"]
    row = gpu_lane.Row("row", "a row")
    gpu_lane.run_tests(program, ranks=1, at_once=at_once)(lane, row)
    assert row.result == ("WRONG" if at_once else "ok"), row.text
    assert ("AssertionError" if at_once else "1 passed") in row.text
    assert sorted(each.name for each in lane.logs.iterdir()) == logs


@pytest.fixture
def on_one_gpu(lane: Any) -> Any:
    lane.double = False
    lane.facts["gpus"] = 1
    return lane


def measured_as(figures: Any, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(lane: Any, row: Any, *args: Any, **kwargs: Any) -> Any:
        row.result = "ok"
        return found

    monkeypatch.setattr(figures, "figures", read)


@pytest.mark.parametrize(
    ("seconds", "torch", "result"),
    [(1.0e-3, None, "ok"), (1.6e-3, None, "WRONG"), (1.2e-3, 1e-3, "ok"), (1.4e-3, 1e-3, "WRONG")],
)
def test_adam_is_judged_by_torchs_or_by_a_copy(
    on_one_gpu: Any, gpu_lane: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, torch: float | None, result: str
) -> None:
    adam = {"seconds": seconds, "passes": 7, "of a copy": 1e-3 / seconds}
    measured_as(figures := sys.modules["gpu_lane_figures"], {"torch": torch, "Adam": adam}, monkeypatch)
    row = gpu_lane.Row("optimizers", "steps")
    figures.optimizers(on_one_gpu, row)
    assert row.result == result
    assert "1.3 times torch's fused" in row.limit


def test_a_figure_is_judged_on_a_gpu_only_and_a_count_everywhere(
    on_one_gpu: Any, gpu_lane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"us": 50.0, "torch_us": 40.0, "python_calls": 19, "most_python_calls": 24}
    measured_as(figures := sys.modules["gpu_lane_figures"], {"SUM of 4 KiB": slow}, monkeypatch)
    for on_cpu, calls, result in ((True, 19, "ok"), (True, 25, "WRONG"), (False, 19, "WRONG")):
        on_one_gpu.on_cpu, slow["python_calls"] = on_cpu, calls
        row = gpu_lane.Row("host", "time of the host")
        figures.host(on_one_gpu, row)
        assert row.result == result, (on_cpu, calls)


def test_rows_for_two_gpus_and_two_nodes_wait(on_one_gpu: Any, gpu_lane: Any) -> None:
    for name in ("nccl", "hidden", "nodes"):
        row = gpu_lane.Row(name, name)
        next(step for each, _, step, _ in gpu_lane.STEPS if each == name)(on_one_gpu, row)
        assert row.result == "waiting"
