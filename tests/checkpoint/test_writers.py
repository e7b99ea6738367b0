"""Which ranks write a checkpoint: as many as the bytes are worth, whose number does not grow with that of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import many_writers
from replicas import RANK, SIZE, outcomes

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint import collecting
from mpistrategy.checkpoint.collecting import plan

MIB = 2**20


def sized(nbytes: int) -> Any:
    """Return an array of zeros that takes no memory."""
    return np.broadcast_to(np.float32(0), nbytes // 4)


# ------------------------------------------------------------------------------------------------ plans


PLANS = {
    "nothing": (64, 0, 0, 1, 1), "little": (10_000, MIB, 0, 1, 1), "one for some nodes": (1024, 640 * MIB, 0, 10, 10),
    "one a node": (32, 256 * MIB, 0, 4, 4), "some a node": (32, 1000 * MIB, 0, 16, 4),
    "not more of one": (64, 2**40, 0, 64, 8), "nor of the job": (10_000, 2**40, 0, 1250, 1250),
    "states of generators": (10_000, MIB, 6900, 2, 2), "much of each": (32, MIB, 100 * MIB, 32, 4),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANS)
def test_the_bytes_say_how_many_write(what: str) -> None:
    ranks, once, own, count, nodes = PLANS[what]
    node_of = [rank // 8 for rank in range(ranks)]
    writers, *_ = plan(node_of, {"a": sized(once)}, own * ranks)
    assert len(writers) == count
    assert len({node_of[rank] for rank in writers}) == nodes


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.skipif(SIZE == 1, reason="a rank that gathers what others have")
def test_no_memory_on_the_rank_that_gathers(
    strategy: ms.MirroredStrategy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = collecting._parts_of

    def refuse(*_: object) -> Any:  # only rank 0 has parts
        raise MemoryError

    with strategy.scope():
        checkpoint = ms.Checkpoint(mine=np.arange(4.0) + RANK)
    monkeypatch.setattr(collecting, "_parts_of", refuse)
    with pytest.raises(MemoryError if RANK == 0 else errors.RemoteError):
        checkpoint.save(folder / "c")
    monkeypatch.setattr(collecting, "_parts_of", parts)
    checkpoint.save(folder / "c")
    assert ms.Checkpoint.arrays(folder / "c")[f"mine@{SIZE - 1}"].tolist() == [SIZE - 1.0, SIZE, SIZE + 1, SIZE + 2]


@pytest.mark.parametrize("wait", [True, False])
def test_large_arrays_are_split(strategy: ms.MirroredStrategy, folder: Path, wait: bool) -> None:
    arrays = {"large": np.arange(1000.0), "odd": np.arange(7), "empty": np.zeros((0, 3))}
    before = {name: array.tolist() for name, array in arrays.items()}
    with many_writers(), strategy.scope():
        checkpoint = ms.Checkpoint(**arrays)
        checkpoint.save(folder / "c", wait=wait).wait()
    for array in arrays.values():
        array[...] = 0
    checkpoint.restore(folder / "c")
    assert {name: array.tolist() for name, array in arrays.items()} == before
    assert ms.Checkpoint.arrays(folder / "c")["large"].tolist() == before["large"]
    sizes = [path.stat().st_size for path in (folder / "c").iterdir() if path.suffix == ".safetensors"]
    assert len(sizes) == SIZE
    assert min(sizes) > 8 * (1000 // SIZE)


def test_values_that_are_too_long_on_one_rank(
    strategy: ms.MirroredStrategy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SIZE == 1:
        pytest.skip("what one rank has is the same everywhere")
    monkeypatch.setattr("mpistrategy.checkpoint.storage.shards.LONGEST_TEXT", 10_000)
    with strategy.scope():
        checkpoint = ms.Checkpoint(log=list(range(9000 if RANK == SIZE - 1 else 1)))
    assert {outcome.error for outcome in outcomes(checkpoint.save, folder / "c")} == {errors.OptionError}
    strategy.barrier("cleaned up")
    assert os.listdir(folder) == []
