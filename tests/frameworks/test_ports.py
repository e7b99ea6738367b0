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
Launch = Callable[..., launching.Finished]


@pytest.mark.timeout(280)  # five jobs
@pytest.mark.parametrize("port", ["torch_mnist", "torch_imagenet", "jax_mlp"])
def test_as_one_process_and_resumed_elsewhere(launch: Launch, tmp_path: Path, port: str) -> None:
    pytest.importorskip(port.partition("_")[0])
    if port == "jax_mlp":
        pytest.importorskip("optax")

    def train(ranks: int, name: str, *arguments: str) -> None:
        to = ["--checkpoint", str(tmp_path / name), "--double", *arguments]
        job = launch(ranks, [EXAMPLES / f"{port}.py", *to], timeout=100).check()
        assert "steps: loss" in job.stdout

    for ranks in (1, 2, 3):
        train(ranks, f"whole {ranks}", "--steps", "100")
    train(3, "begun", "--steps", "40")
    train(2, "resumed", "--steps", "100", "--restore", str(tmp_path / "begun"))
    wanted = ms.Checkpoint.arrays(tmp_path / "whole 1")
    numbers = [name for name in wanted if wanted[name].dtype == np.float64]
    assert len(numbers) >= 6
    for name in ("whole 2", "whole 3", "resumed"):
        found = ms.Checkpoint.arrays(tmp_path / name)
        assert found.keys() == wanted.keys()
        for key in numbers:
            np.testing.assert_allclose(found[key], wanted[key], rtol=1e-6, atol=1e-9, err_msg=f"{name}: {key}")
    begun = ms.Checkpoint.arrays(tmp_path / "begun")
    assert any(not np.allclose(begun[key], wanted[key], rtol=1e-3) for key in numbers)
