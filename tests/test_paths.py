"""Measured thresholds: kept in files, read back, and the same on every rank whatever the files say."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi import path_files
from mpistrategy.mpi.path_files import VARIABLE, Machine
from mpistrategy.mpi.paths import DEFAULT, Paths, Rates, default_for

pytestmark = pytest.mark.one_rank

MEASURED = Paths(64, 2**16, 2**17, 2**12, 2**21, 2**17, 2**19, (("float64", 4096),), "a test")
VERSION = "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11"


class Ranks:
    """This rank, and what the others say."""

    def __init__(self, *others: str, rank: int = 0) -> None:
        self.rank = rank
        self.others = others
        self.node_of = (0,) * (1 + len(others))

    def allgather_text(self, text: str) -> list[str]:
        return [text, *(text if other == "same" else other for other in self.others)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("version", "name", "file"),
    [
        (VERSION, "Open MPI v5.0.11", "open-mpi-v5.0.11-2x1.json"),
        ("MPICH Version:      5.0.2\nMPICH Release date: x\n", "MPICH 5.0.2", "mpich-5.0.2-2x1.json"),
        (
            "Intel(R) MPI Library 2021.18 for Linux* OS\n\0",
            "Intel MPI Library 2021.18",
            "intel-mpi-library-2021.18-2x1.json",
        ),
        ("", "unknown", "unknown-2x1.json"),
    ],
)
def test_a_file_for_each_mpi(cache: Path, version: str, name: str, file: str) -> None:
    machine = Machine.of(version, (0, 0))
    assert machine == Machine(name, 2, 1)
    assert machine.file == cache / "mpistrategy" / file


def test_nodes_count() -> None:
    assert Machine.of(VERSION, (0, 0, 0, 1, 1)) == Machine("Open MPI v5.0.11", 3, 2)


def test_what_is_saved_is_found_by_the_next_strategy() -> None:
    file = path_files.save(MEASURED, Machine.of(VERSION, (0, 0)))
    found = path_files.agreed(VERSION, Ranks("same"))
    assert found == replace(MEASURED, source=str(file))
    assert path_files.agreed(VERSION, Ranks("same", "same")) == DEFAULT  # three ranks were not measured
    assert path_files.agreed("MPICH Version: 5.0.2", Ranks("same")) == DEFAULT
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_dtype_may_have_its_own_threshold() -> None:
    window_bytes = [MEASURED.window_bytes_for(np.dtype(name)) for name in ("float64", "float32", "int64")]
    assert window_bytes == [4096, 2**16, 2**16]
    assert DEFAULT.window_bytes_for(np.dtype("float64")) == DEFAULT.window_bytes
    assert json.loads(json.dumps(MEASURED.thresholds()))["window_bytes_by_dtype"] == {"float64": 4096}


def test_defaults_of_a_library() -> None:
    intel = path_files.agreed("Intel(R) MPI Library 2021.18 for Linux* OS\n", Ranks("same"))
    assert intel.window_bytes > DEFAULT.window_bytes
    assert intel == replace(DEFAULT, window_bytes=intel.window_bytes)
    assert intel.source == "the defaults"
    assert path_files.agreed("some other MPI", Ranks("same")) == DEFAULT


def test_a_named_file_goes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path_files.save(MEASURED, Machine.of(VERSION, (0, 0)))
    other = path_files.save(replace(MEASURED, pack_bytes=128), Machine.of(VERSION, (0, 0)), cache / "other.json")
    monkeypatch.setenv(VARIABLE, str(other))
    assert path_files.agreed(VERSION, Ranks("same")).pack_bytes == 128
    monkeypatch.setenv(VARIABLE, "")
    assert path_files.agreed(VERSION, Ranks("same")) == DEFAULT


def spoiled(file: Path, **changes: object) -> str:
    content = json.loads(file.read_text())
    content["paths"].update(changes)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "does not have the thresholds"),
        ('{"format": 1}', "does not have the thresholds"),
        ('{"format": 2}', "does not have the thresholds"),
        ({"chunk_bytes": "many"}, "chunk_bytes is 'many'"),
        ({"chunk_bytes": True}, "chunk_bytes is True"),
        ({"chunk_bytes": 2**50}, "chunk_bytes"),
        ({"cell_bytes": 0}, "cell_bytes is 0"),
        ({"piece_bytes": 4097}, "piece_bytes is 4097, expected a multiple of 64"),
        ({"extra": 64}, "does not have the thresholds"),
        ({"window_bytes_by_dtype": ["float64"]}, "window_bytes_by_dtype is ['float64'], expected names of dtypes"),
        ({"window_bytes_by_dtype": {"float65": 64}}, "window_bytes_by_dtype is {'float65': 64}"),
        ({"window_bytes_by_dtype": {"float64": 63}}, "window_bytes of float64 is 63, expected a multiple of 64"),
    ],
)
def test_a_spoiled_file_means_the_defaults_and_one_warning(content: str | dict[str, object], what: str) -> None:
    file = path_files.save(MEASURED, Machine.of(VERSION, (0, 0)))
    file.write_text(spoiled(file, **content) if isinstance(content, dict) else content)
    with pytest.warns(FallbackWarning) as caught:
        assert path_files.agreed(VERSION, Ranks("same")) == DEFAULT
    assert len(caught) == 1
    text = str(caught[0].message)
    assert str(file) in text
    assert what in text
    assert "mpistrategy bench --save" in text


@pytest.mark.parametrize(
    ("rates", "what"),
    [
        ([], "its rates are"),
        ({"extra": 1.0}, "its rates are"),
        ({"cell_seconds": 0}, "cell_seconds is 0, expected a positive number"),
        ({"cell_seconds": float("nan")}, "cell_seconds is nan"),
        ({"link_bytes_per_second": "fast"}, "link_bytes_per_second is 'fast'"),
    ],
)
def test_spoiled_rates_mean_the_defaults(rates: object, what: str) -> None:
    file = path_files.save(MEASURED, Machine.of(VERSION, (0, 0)))
    file.write_text(json.dumps({**json.loads(file.read_text()), "rates": rates}))
    with pytest.warns(FallbackWarning, match=what):
        assert path_files.agreed(VERSION, Ranks("same")) == DEFAULT


def test_rates_are_kept_and_may_be_missing() -> None:
    measured = replace(MEASURED, rates=Rates(cell_seconds=1e-6))
    file = path_files.save(measured, Machine.of(VERSION, (0, 0)))
    assert path_files.load(file) == replace(measured, source=str(file))
    content = json.loads(file.read_text())
    del content["rates"]
    file.write_text(json.dumps(content))
    assert path_files.load(file) == replace(MEASURED, source=str(file))


def test_a_named_file_that_is_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(cache / "none.json"))
    with pytest.warns(FallbackWarning, match="No such file") as caught:
        assert path_files.agreed(VERSION, Ranks("same")) == DEFAULT
    assert caught[0].filename == __file__  # where the user's program is, not where we warn


@pytest.mark.parametrize(
    "other", ['["", [1, 2, 3, 4, 5]]', '["the thresholds in x cannot be used: y", [1, 2, 3, 4, 5]]']
)
def test_ranks_that_see_different_files_fall_back_alike(other: str) -> None:
    path_files.save(MEASURED, Machine.of(VERSION, (0, 0)))
    with pytest.warns(FallbackWarning, match="all ranks use the defaults"):
        assert path_files.agreed(VERSION, Ranks(other)) == DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rank 0 alone tells
        assert path_files.agreed(VERSION, Ranks(other, rank=1)) == DEFAULT


@pytest.mark.mpi(min_size=2)
def test_a_strategy_takes_what_was_measured_and_sums_the_same(
    comm: MPI.Intracomm, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache / f"{comm.rank}.json"
    machine = Machine.of(MPI.Get_library_version(), (0,) * comm.size)
    path_files.save(replace(MEASURED, chunk_bytes=4096), machine, file)
    monkeypatch.setenv(VARIABLE, str(file))
    with ms.MirroredStrategy() as strategy:
        communicator = strategy.extended.communicator
        assert communicator.paths.chunk_bytes == 4096
        if communicator.window is not None:
            ways = [communicator.way(2**15, np.dtype(name), "SUM") for name in ("float64", "float32")]
            assert ways == ["window", "mpi"]
        total = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.arange(50_000.0)))
        np.testing.assert_array_equal(total, comm.size * np.arange(50_000.0))


@pytest.mark.mpi(min_size=2)
def test_a_strategy_of_ranks_with_different_files(
    comm: MPI.Intracomm, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache / f"{comm.rank}.json"
    path_files.save(replace(MEASURED, pack_bytes=64 * (1 + comm.rank)), Machine("any", 1, 1), file)
    monkeypatch.setenv(VARIABLE, str(file))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ms.MirroredStrategy() as strategy:
            communicator = strategy.extended.communicator
            assert communicator.paths == default_for(communicator.library)
            assert strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1)) == comm.size
    assert len([one for one in caught if "different thresholds" in str(one.message)]) == (comm.rank == 0)
