"""The benchmark: what it measures is right, what it writes is complete, and it says what it cannot do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import launching
import numpy as np
import pytest
from replicas import long_lane

from mpistrategy.cli.bench import command
from mpistrategy.cli.bench.cases import Case, Variant
from mpistrategy.cli.bench.timing import is_right, measure, summary
from mpistrategy.cli.ranks import Ranks

pytestmark = pytest.mark.one_rank  # or starts jobs

Launch = Callable[..., launching.Finished]
BENCH = ["-m", "mpistrategy", "bench"]


@pytest.mark.slow
def test_one_array(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    launch(3, [*BENCH, "--quick", "--seconds", "0.02", "--sizes", "4", "4096", "2097152", "--json", file]).check()
    report = json.loads(file.read_text())
    assert [(case["suite"], case["case"], case["reference"]) for case in report["cases"]] == [
        ("all_reduce", size, "mpi4py") for size in ("4 B", "4 KiB", "2 MiB")
    ]
    for case in report["cases"]:
        reference, *others = case["variants"]
        names = ["mpistrategy", "mpistrategy out=", "mpistrategy arena", "mpistrategy arena, shared result"]
        assert [row["name"] for row in others] == names
        for row in case["variants"]:
            assert row["right"], row
            assert 0 < row["fastest_us"] <= row["quartile_1_us"] <= row["median_us"] <= row["quartile_3_us"]
            assert row["ratio_quartile_1"] <= row["ratio_quartile_3"]
            assert row["ratio"] == pytest.approx(row["median_us"] / reference["median_us"], rel=0.01, abs=2e-4)
    assert report["environment"].items() >= {"ranks": 3, "ranks_on_node": 3, "nodes": 1, "blas_threads": "1"}.items()
    assert report["environment"]["mpi"].split()[0] in ("MPICH", "Open", "Intel")


pretends = pytest.mark.skipif(launching.IS_OPEN_MPI, reason="MPICH alone can pretend to be several nodes")


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=long_lane), pytest.param(2, marks=pretends)])
def test_save_measures_thresholds_that_the_next_strategy_takes(launch: Launch, tmp_path: Path, nodes: int) -> None:
    file = tmp_path / "paths.json"
    where = {"MPISTRATEGY_PATHS": str(file), "MPIR_CVAR_NUM_CLIQUES": str(nodes)}
    job = launch(2, [*BENCH, "--quick", "--save"], env=where).check()
    assert f"saved {file}" in job.stderr
    for name in ("pack_bytes", *(("chunk_bytes", "window_bytes", "cell_bytes") if nodes == 1 else ())):
        assert re.search(rf"(?m)^{name}: .* .default ", job.stderr), (name, job)
    saved = json.loads(file.read_text())
    del saved["source"]
    source = """
        import json, sys
        import mpistrategy as ms
        strategy = ms.MirroredStrategy()
        with open(f"{sys.argv[1]}/rank-{strategy.replica_id_in_sync_group}.json", "w") as told:
            json.dump(strategy.layout()["thresholds"], told)
        strategy.explain(1.0)
    """
    job = launch(2, [launching.program(source, tmp_path), tmp_path], env=where).check()
    assert [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)] == [saved] * 2
    assert f"thresholds: {file}" in job.stdout


# ---------------------------------------------------------------------------------------------- without ranks


def test_a_wrong_result_is_found() -> None:
    mine = np.zeros(10)
    assert is_right(Variant("right", lambda: mine.copy(), [mine]), Ranks())
    assert not is_right(Variant("wrong", lambda: mine + (np.arange(10) == 7), [mine]), Ranks())
    case = measure(Case("suite", "case", 80, [Variant("wrong", lambda: mine + 1, [mine])]), Ranks(), 0.01)
    assert not case["variants"][0]["right"]
    assert "WRONG RESULT" in command.rows(case)[0]
    own, reference = np.array([1e-6, 2e-6, 9e-6]), np.array([2e-6, 2e-6, 2e-6])
    found = summary(own, reference)
    assert (found["median_us"], found["ratio"], found["fastest_us"]) == (2, 1, 1)
    assert (found["ratio_quartile_1"], found["ratio_quartile_3"]) == (0.75, 2.75)
