"""The ports in scripts/examples: the same parameters on 1 rank and on 2, and resumed on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import launching
import numpy as np
import pytest
from replicas import SIZE

import mpistrategy as ms

pytestmark = pytest.mark.skipif(SIZE > 1, reason="starts jobs of its own: runs in the session on 1 rank")
EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"

#: Runs the programs on parts of the ranks: to start a process for each would take most of the time, for its imports.
ON_PARTS = """
import functools
import runpy
import sys
from pathlib import Path

from mpi4py import MPI

import mpistrategy as ms

WORLD = MPI.COMM_WORLD
strategy_of = ms.MirroredStrategy


def train(name, *arguments, part=WORLD):
    ms.MirroredStrategy = functools.partial(strategy_of, communicator=part)
    sys.argv = [str(port), "--double", "--checkpoint", name, *arguments]
    runpy.run_path(str(port), run_name="__main__")


port, alone = Path(sys.argv[1]), WORLD.Split(WORLD.rank)
train("on 2", "--steps", "8")
train("begun", "--steps", "3")
WORLD.Barrier()
if WORLD.rank == 0:
    train("on 1", "--steps", "8", part=alone)
else:
    train("resumed", "--steps", "8", "--restore", "begun", part=alone)
"""


@pytest.mark.timeout(280)  # four trainings
@pytest.mark.parametrize("port", ["torch_mnist", "jax_mlp"])
def test_as_one_process_and_resumed_elsewhere(
    launch: Callable[..., launching.Finished], tmp_path: Path, port: str
) -> None:
    for name in ("torch",) if port == "torch_mnist" else ("jax", "optax"):
        pytest.importorskip(name)
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    program = launching.program(ON_PARTS, tmp_path)
    job = launch(2, [program, EXAMPLES / f"{port}.py"], timeout=250, env=compiled, cwd=tmp_path).check()
    assert job.stdout.count("steps: loss") == 4
    wanted = ms.Checkpoint.arrays(tmp_path / "on 1")
    numbers = [name for name in wanted if wanted[name].dtype == np.float64]
    assert len(numbers) >= 6
    for name in ("on 2", "resumed"):
        found = ms.Checkpoint.arrays(tmp_path / name)
        assert found.keys() == wanted.keys()
        for key in numbers:
            np.testing.assert_allclose(found[key], wanted[key], rtol=1e-6, atol=1e-9, err_msg=f"{name}: {key}")
    begun = ms.Checkpoint.arrays(tmp_path / "begun")
    assert any(not np.allclose(begun[key], wanted[key], rtol=1e-3) for key in numbers)
