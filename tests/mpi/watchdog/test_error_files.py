"""An error of several ranks that ends the job is a file of JSON; nothing that goes wrong with it hides the error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest

pytestmark = pytest.mark.one_rank
Launch = Callable[..., launching.Finished]

MISMATCH = """
import mpistrategy as ms
import numpy as np

strategy = ms.MirroredStrategy()
strategy.reduce("SUM", np.ones((2, 3 + (strategy.rank == 1))))
"""
DIVERGED = """
import mpistrategy as ms

strategy = ms.MirroredStrategy()
with strategy.scope():
    weights, bias = ms.Variable([1.0], name="weights"), ms.Variable([1.0], name="bias")
weights.assign([float(strategy.rank == 1)])
strategy.assert_mirrored([weights, bias])
"""
OF_ONE_RANK = """
import mpistrategy as ms

strategy = ms.MirroredStrategy()
ms.CommunicationOptions(bytes_per_pack=-1)
"""


def written(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("mpistrategy-run-*/*")}


@pytest.mark.each_mpi
def test_calls_that_differ_are_told_once_a_node(launch: Launch, tmp_path: Path) -> None:
    job = launch(4, MISMATCH, env={"MPIR_CVAR_NUM_CLIQUES": "2", "SECRET": "a-word-of-the-environment"}, cwd=tmp_path)
    assert job.returncode != 0, job
    files = written(tmp_path)
    assert "error-0.json" in files, job
    assert set(files) <= {"error-0.json", "error-1.json"}
    told = files["error-0.json"]
    assert (told["class"], told["written_by"], told["differ"]) == ("CollectiveMismatchError", 0, ["values"])
    assert [*told["calls"]] == ["0", "1", "2", "3"]
    assert [call["shapes"] for call in told["calls"].values()] == [[[2, 3]], [[2, 4]], [[2, 3]], [[2, 3]]]
    assert told["calls"]["1"]["call"] == "Strategy.reduce"
    assert told["text"] in job.stderr.replace("[rank 0/4] ", "")
    assert "/error-0.json" in job.stderr
    assert "a-word-of-the-environment" not in json.dumps(files)


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_rank_that_is_still_there_writes(launch: Launch, tmp_path: Path, size: int) -> None:
    program = "import mpistrategy as ms\ns = ms.MirroredStrategy()\ns.rank and s.reduce('SUM', 1.0)\n"
    job = launch(size, program, cwd=tmp_path)
    told = written(tmp_path)["error-1.json"]
    assert (told["written_by"], told["calls"]["0"]["left"]) == (1, "its program has ended"), job


def test_copies_that_differ(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, DIVERGED, cwd=tmp_path)
    told = written(tmp_path)["error-0.json"]
    assert (told["class"], told["variables"], told["ranks"]) == ("ReplicasDivergedError", ["weights"], [1]), job


def test_a_mistake_that_concerns_no_other_rank_leaves_no_file(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, OF_ONE_RANK, cwd=tmp_path)
    assert "OptionError" in job.stderr, job
    assert not written(tmp_path)


def test_a_folder_that_cannot_be_written_hides_nothing(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, MISMATCH, env={"MPISTRATEGY_RUN_DIR": "/dev/full"}, cwd=tmp_path)
    assert job.returncode == 1, job
    assert "CollectiveMismatchError: the ranks do not make the same call" in job.stderr
    assert "error-0.json" not in job.stderr
