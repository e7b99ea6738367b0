"""The forecast of `mpistrategy bench`: its tables, what it says was measured, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import launching
import pytest

from mpistrategy.cli.bench.forecast import tables, units
from mpistrategy.cli.bench.forecast.units import LinkRates, Shape
from mpistrategy.cli.main import main
from mpistrategy.mpi.tuning import costs, files
from mpistrategy.mpi.tuning.files import VARIABLE, Machine
from mpistrategy.mpi.tuning.thresholds import DEFAULT, CostName, Rates, Thresholds

pytestmark = pytest.mark.one_rank  # or starts jobs

Launch = Callable[..., launching.Finished]
CORRECTIONS: tuple[tuple[CostName, int, float], ...] = (
    *(("flat", 2**20, 2.0), ("flat", 2**13, 1.0), ("counterparts", 2**12, 1.0), ("pairwise", 2**20, 1.0)),
)
MEASURED = Rates(latency_seconds=3e-6, measured_over_estimated=CORRECTIONS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI", "SLURM")):
            monkeypatch.delenv(name)
    return tmp_path / "cache"


@pytest.fixture
def forecast(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert main(["bench", "--forecast", *arguments]) == 0
        return capsys.readouterr().out

    return run


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \**[0-9]", line)]


def kept(thresholds: Thresholds, nodes: int, ranks: int = 2) -> Path:
    return files.save(thresholds, Machine("MPICH 5.0.2", ranks, nodes))


def test_a_row_for_2_to_1024_nodes_and_those_asked_for(forecast: Callable[..., str]) -> None:
    found = rows(forecast("128x8", "1250x8", "3x1", "--sizes", "100000000", "--link", "25GB/s,2us"))
    powers = [str(2**power) for power in range(1, 11)]
    of_eight = ["**128**" if each == "128" else each for each in powers] + ["**1250**"]
    assert [row[0] for row in found] == [*of_eight, "2", "**3**", *powers[1:]]
    assert found[6] == ["**128**", "1024", "34.1 ms, 75 %", "29.2 ms, 77 %", "64.7 ms, 61 %", "lanes"]
    assert [row[3] for row in found[11:]] == ["-"] * 11
    assert {row[5] for row in found[11:]} == {"flat"}


def test_the_figures_are_those_of_the_formulas_and_a_first_message(forecast: Callable[..., str]) -> None:
    [table] = tables.tables([Shape(4, 2)], [2**20], DEFAULT)
    first = costs.flat_seconds(8, 2, 256, DEFAULT)
    assert table.rows[2].seconds == {
        route: first + seconds(8, 2, 2**20, DEFAULT) for route, seconds in costs.SECONDS.items()
    }
    assert table.rows[2].taken == costs.between_nodes(8, 2, 2**20, DEFAULT)
    text = forecast("4x2", "--sizes", "1MiB", "--compute", "1s")
    assert f"{100 / (1 + table.rows[2].seconds['flat']):.0f} %" in rows(text)[2][2]
    assert "computes for 1 s" in text


def test_a_route_that_may_not_be_taken_is_in_brackets(forecast: Callable[..., str]) -> None:
    [_, small, *_] = rows(forecast("2x8", "--sizes", "32KiB"))
    assert [cell.startswith("(") for cell in small[2:5]] == [False, True, True]
    assert small[5] == "flat"


def test_without_a_file_all_rates_are_assumed(forecast: Callable[..., str]) -> None:
    text = forecast("2x8")
    assert "Measured: nothing.\nAssumed (the default): link of a node 118 MB/s, latency" in text


def test_measured_and_assumed_rates_are_told_apart(forecast: Callable[..., str]) -> None:
    file = kept(replace(DEFAULT, rates=MEASURED), 4)
    os.utime(file, (1e9, 1e9))
    kept(replace(DEFAULT, rates=Rates(link_bytes_per_second=1.0)), 1)  # newer, but not about several nodes
    text = forecast("2x8")
    assert f"Measured ({file}): link of a node 118 MB/s, latency of a message 3 us, copy" in text
    assert "MPI's Allreduce 8 KiB to 1 MiB, the pairwise exchange 1 MiB" in text
    assert "Assumed" not in text
    text = forecast("2x8", "--link", "100Gbit/s")
    assert f"Measured ({file}): latency of a message 3 us, copy" in text
    assert "Assumed (--link): link of a node 12.5 GB/s.\nAssumed: MPI's Allreduce takes as long as" in text


def test_a_file_from_before_the_formulas_measured_the_link_alone(forecast: Callable[..., str]) -> None:
    file = kept(replace(DEFAULT, rates=Rates(link_bytes_per_second=5e9)), 4)
    text = forecast("2x8")
    assert f"Measured ({file}): link of a node 5 GB/s.\nAssumed (the default): latency" in text


def test_the_newest_file_and_a_named_one(forecast: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    named = files.save(replace(DEFAULT, rates=MEASURED), Machine("x", 1, 1), Path("named.json").absolute())
    for number, nodes in enumerate((4, 2, 16)):
        file = kept(replace(DEFAULT, rates=MEASURED), nodes)
        os.utime(file, (1e9 - number, 1e9 - number))
    assert "-2x4.json)" in forecast("2x8")
    monkeypatch.setenv(VARIABLE, str(named))
    assert f"Measured ({named})" in forecast("2x8")
    monkeypatch.setenv(VARIABLE, "")
    assert "Measured: nothing" in forecast("2x8")
    named.unlink()


def test_a_file_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    assert main(["bench", "--forecast", "2x8"]) == 2
    assert "none.json" in (text := capsys.readouterr().err)
    assert "expected a file of `mpistrategy bench --save`" in text
    (tmp_path / "none.json").write_text("{}")
    assert main(["bench", "--forecast", "2x8"]) == 2
    assert "does not have the thresholds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--forecast", "0x4"], "found '0x4'; expected NODESxRANKS of 2 to"),
        (["--forecast", "1x4"], "found '1x4'"),
        (["--forecast", "2x"], "found '2x'; expected NODESxRANKS"),
        (["--forecast", "2x0"], "found '2x0'"),
        (["--forecast", "2x9999"], "with 1 to 1024 ranks each, such as 128x8"),
        (["--forecast", "9" * 40 + "x1"], "expected NODESxRANKS"),
        (["--forecast", "-2x4"], "expected at least one argument"),
        (["--forecast"], "expected at least one argument"),
        (["--forecast", "2x4", "--link", "25"], "found '25'; expected bytes or bits a second"),
        (["--forecast", "2x4", "--link", "25GB"], "such as 25GB/s,2us"),
        (["--forecast", "2x4", "--link", "3furlongs/s"], "found '3furlongs/s'"),
        (["--forecast", "2x4", "--link", "0GB/s"], "found '0GB/s'"),
        (["--forecast", "2x4", "--link", "1GB/s,2us,3us"], "expected one speed and one latency"),
        (["--forecast", "2x4", "--link", "1GB/s,"], "found ''"),
        (["--forecast", "2x4", "--compute", "100"], "found '100'; expected a time with its unit, such as 100ms"),
        (["--forecast", "2x4", "--sizes", "5"], "'5' is not a size"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], what: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--forecast", "2x4", "--save"], "found --save and --forecast; expected one"),
        (["--link", "2us"], "found --link without a forecast"),
        (["--compute", "2us"], "found --compute without a forecast"),
    ],
)
def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str], arguments: list[str], what: str) -> None:
    assert main(["bench", *arguments]) == 2
    assert what in capsys.readouterr().err


def test_units() -> None:
    assert units.link("25GB/s, 2us") == units.link("2 us,200gbit/s") == LinkRates(25e9, 2e-6)
    assert units.link("1.5MB/s") == LinkRates(1.5e6)
    assert units.link("10ns") == LinkRates(latency_seconds=1e-8)
    assert units.duration(".5ms") == 5e-4
    assert units.shape("128X8") == Shape(128, 8)
    assert [units.speed_in_words(each) for each in (25e9, 1.18e8, 999)] == ["25 GB/s", "118 MB/s", "999 B/s"]


def test_a_picture_where_asked(forecast: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    forecast("2x8", "4x1", "--sizes", "1MiB", "--plot", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_no_picture_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "--forecast", "2x8", "--plot", str(tmp_path / "p.png")]) == 0
    out, err = capsys.readouterr()
    assert "matplotlib is not installed" in err
    assert rows(out)


def test_it_starts_no_mpi_and_only_the_first_rank_prints(tmp_path: Path) -> None:
    source = """
        import sys
        from mpistrategy.cli.main import main
        assert main(["bench", "--forecast", "2x8"]) == 0
        assert "mpi4py.MPI" not in sys.modules
        """
    printed = []
    for rank in range(2):
        environment = {**launching.environment(), VARIABLE: "", "PMI_RANK": str(rank), "PMI_SIZE": "2"}
        job = subprocess.run(
            [sys.executable, launching.program(source, tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert job.returncode == 0, job.stderr
        printed.append(job.stdout)
    assert len(rows(printed[0])) == 3 * 10
    assert printed[1] == ""


# ------------------------------------------------------------------------------------------- what --save measures

NODE_RATES = """
    import json, sys
    from dataclasses import asdict
    import mpistrategy as ms
    from mpistrategy.cli.bench.cases import rates
    from mpistrategy.cli.bench.measuring.raw import RawRanks
    from mpistrategy.cli.bench.measuring.timing import Effort
    from mpistrategy.mpi.tuning.thresholds import DEFAULT

    rates.SIZES, rates.PAIRWISE_SIZES, rates.LARGE, rates.TRIALS = (8, 2**16), (2**16,), 2**18, 3
    strategy, ranks, told = ms.MirroredStrategy(), RawRanks(), []
    between = rates.NodeRates(ranks, strategy.extended.communicator, told.append, Effort(0.01, 3, 3))
    found = between.measured(DEFAULT)
    cases = [[row["right"] for row in case["variants"]] for case in between.cases]
    between.close()
    with open(f"{sys.argv[1]}/rank-{ranks.rank}.json", "w") as file:
        json.dump([asdict(found), cases, between.nodes, between.lanes, told], file)
    ranks.close()
    strategy.close()
    """


@pytest.mark.skipif(launching.IS_OPEN_MPI, reason="MPICH alone can pretend to be several nodes")
@pytest.mark.parametrize(("ranks", "nodes", "lanes"), [(2, 2, 1), (3, 2, 1), (4, 2, 2)])
def test_the_rates_of_the_nodes(launch: Launch, tmp_path: Path, ranks: int, nodes: int, lanes: int) -> None:
    """On uneven nodes, too; all ranks come to the same."""
    job = [launching.program(NODE_RATES, tmp_path), tmp_path]
    launch(ranks, job, env={"MPIR_CVAR_NUM_CLIQUES": str(nodes)}).check()
    found: list[Any] = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    assert all(each[0] == found[0][0] for each in found)
    rates, cases, *shape, told = found[0]
    assert shape == [nodes, lanes]
    assert cases == [[True, True], [True, True, True]]
    corrections = rates.pop("measured_over_estimated")
    assert [each[:2] for each in corrections] == [
        *[["flat", 8], ["counterparts", max(8 // lanes, 4)]],
        *[["flat", 2**16], ["counterparts", 2**16 // lanes], ["pairwise", 2**16]],
    ]
    assert all(ratio > 0 for *_, ratio in corrections)
    assert {name for name in tables.RATES if rates[name] <= 0} == set()
    assert {name for name in tables.RATES if rates[name] == getattr(Rates(), name)} == set()
    for what in tables.RATES.values():
        assert any(line.startswith(f"{what}: ") for line in told), what
