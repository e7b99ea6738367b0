"""The ports in scripts/examples: the same parameters on 1, 2 and 3 ranks, and resumed on another number of ranks."""

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
    sys.argv = [str(port), "--double", "--checkpoint", f"{port.stem} {name}", *arguments]
    runpy.run_path(str(port), run_name="__main__")


pair = WORLD.Split(WORLD.rank == 2)
for port in map(Path, sys.argv[1:]):
    train("on 2" if WORLD.rank < 2 else "on 1", "--steps", "100", part=pair)
    train("on 3", "--steps", "100")
    train("begun", "--steps", "40")
    WORLD.Barrier()
    if WORLD.rank < 2:
        train("resumed", "--steps", "100", "--restore", f"{port.stem} begun", part=pair)
"""


@pytest.mark.timeout(280)  # ten trainings
@pytest.mark.parametrize("ports", [["torch_mnist", "torch_imagenet"], ["jax_mlp"]], ids=["torch", "jax"])
def test_as_one_process_and_resumed_elsewhere(
    launch: Callable[..., launching.Finished], tmp_path: Path, ports: list[str]
) -> None:
    pytest.importorskip(ports[0].partition("_")[0])
    if ports == ["jax_mlp"]:
        pytest.importorskip("optax")
    program = launching.program(ON_PARTS, tmp_path)
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    job = launch(3, [program, *(EXAMPLES / f"{port}.py" for port in ports)], timeout=250, env=compiled).check()
    assert job.stdout.count("steps: loss") == 5 * len(ports)
    for port in ports:
        wanted = ms.Checkpoint.arrays(tmp_path / f"{port} on 1")
        numbers = [name for name in wanted if wanted[name].dtype == np.float64]
        assert len(numbers) >= 6
        for name in ("on 2", "on 3", "resumed"):
            found = ms.Checkpoint.arrays(tmp_path / f"{port} {name}")
            assert found.keys() == wanted.keys()
            for key in numbers:
                np.testing.assert_allclose(
                    found[key], wanted[key], rtol=1e-6, atol=1e-9, err_msg=f"{port} {name}: {key}"
                )
        begun = ms.Checkpoint.arrays(tmp_path / f"{port} begun")
        assert any(not np.allclose(begun[key], wanted[key], rtol=1e-3) for key in numbers)
