"""Measured thresholds: kept in files, read back, and the same on every rank whatever the files say."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import launching
import pytest
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.tuning import thresholds as files
from mpistrategy.mpi.tuning.thresholds import DEFAULT, VARIABLE, Thresholds, default_for, file_for, library_name

pytestmark = pytest.mark.one_rank

MEASURED = Thresholds(64, 2**16, 2**17, 2**12, source="a test")
VERSION = "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11"
SHIPPED = default_for("Open MPI v5.0.11")


def agreed(version: str = VERSION, ranks: int = 2) -> Thresholds:
    """Return what rank 0 of so many on a node finds, which is what all take."""
    return files.agreed(version, 0, (0,) * ranks, lambda text: [text] * ranks)


def saved() -> Path:
    """Save what was measured for two ranks on a node; return where."""
    file = file_for(library_name(VERSION), 2, 1)
    files.save(MEASURED, file)
    return file


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
    assert library_name(version) == name
    assert file_for(name, 2, 1) == cache / "mpistrategy" / file


def test_what_is_saved_is_found_by_the_next_strategy() -> None:
    file = saved()
    found = agreed()
    assert found == replace(MEASURED, source=str(file))
    assert agreed(ranks=3) == SHIPPED  # three ranks were not measured
    assert files.agreed(VERSION, 0, (0, 0, 1), lambda text: [text]) == SHIPPED  # nor two nodes
    assert agreed("MPICH Version: 5.0.2") == DEFAULT
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_named_file_goes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved()
    other = cache / "other.json"
    files.save(replace(MEASURED, pack_bytes=128), other)
    monkeypatch.setenv(VARIABLE, str(other))
    assert agreed().pack_bytes == 128
    monkeypatch.setenv(VARIABLE, "")
    assert agreed() == SHIPPED


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "no file of thresholds"),
        ("{", "no file of thresholds"),
        pytest.param("[" * 10**5, "no file of thresholds", id="deep"),
        pytest.param("9" * 10**4, "no file of thresholds", id="many digits"),
        pytest.param(" " * 2**20 + "{}", "more than 1048576 bytes", id="large"),
        ("[]", "no file of thresholds"),
        ({"chunk_bytes": "many"}, "chunk_bytes is 'many'"),
        ({"chunk_bytes": True}, "chunk_bytes is True"),
        ({"chunk_bytes": 2**50}, "chunk_bytes"),
        ({"cell_bytes": 0}, "cell_bytes is 0"),
        ({"lanes_bytes": 4097}, "lanes_bytes is 4097, expected a multiple of 64"),
        ({"extra": 64}, "no file of thresholds"),
    ],
)
def test_a_spoiled_file_means_the_defaults_and_one_warning(content: str | dict[str, object], what: str) -> None:
    file = saved()
    file.write_text(content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content))
    with pytest.warns(FallbackWarning) as caught:
        assert agreed() == SHIPPED
    assert len(caught) == 1
    text = str(caught[0].message)
    assert str(file) in text
    assert what in text
    assert "mpistrategy bench --save" in text


def test_a_named_file_that_is_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(cache / "none.json"))
    with pytest.warns(FallbackWarning, match="No such file") as caught:
        assert agreed() == SHIPPED
    assert caught[0].filename == __file__  # where the user's program is, not where we warn


@pytest.mark.mpi(min_size=2)
def test_all_ranks_take_what_rank_0_finds(comm: MPI.Intracomm, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache / f"{comm.rank}.json"
    files.save(replace(MEASURED, pack_bytes=64 * (1 + comm.rank)), file)
    monkeypatch.setenv(VARIABLE, str(file) if comm.rank < 2 else str(cache / "none.json"))
    with ms.MirroredStrategy() as strategy:
        communicator = strategy.extended.communicator
        assert communicator.thresholds.pack_bytes == 64
        assert strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1)) == comm.size


# ------------------------------------------------------------------------------------------- no home folder


WITHOUT_HOME = """
import os, sys

if os.getuid() == 0:
    for name in ("HOME", "XDG_CACHE_HOME", "MPISTRATEGY_PATHS"):
        os.environ.pop(name, None)
    rights = "+dac_override,+dac_read_search"  # Python may be where only root can read it
    os.execvp("setpriv", [
        "setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", f"--inh-caps={rights}",
        f"--ambient-caps={rights}", sys.executable, *sys.argv])

import numpy as np
import mpistrategy as ms

strategy = ms.MirroredStrategy()
with strategy.scope():
    weights = ms.Variable(np.ones(3))
    sgd = ms.optimizers.SGD(0.5)
for batch in strategy.experimental_distribute_dataset([np.ones(4)] * 2):
    strategy.run(lambda: sgd.apply_gradients([(np.ones(3), weights)]))
ms.Checkpoint(weights=weights).save(sys.argv[1])
print(f"without a home: {os.getuid()} {os.environ.get('HOME')} {weights.numpy().tolist()}")  # in one write
"""


@pytest.mark.each_mpi
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="not run: needs root and setpriv")
@pytest.mark.skipif(launching.IS_OPEN_MPI, reason="Open MPI itself does not start without a home folder")
@pytest.mark.slow
def test_a_job_without_home_and_passwd_entry_works(launch: launching.Launch, tmp_path: Path) -> None:
    program = launching.program(WITHOUT_HOME, tmp_path)
    done = launch(2, [program, tmp_path / "saved"]).check()
    assert done.stdout.splitlines() == ["without a home: 54321 None [-1.0, -1.0, -1.0]"] * 2
    assert "Warning" not in done.stderr
