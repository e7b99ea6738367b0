"""Which ranks write a checkpoint, and who reads it: counts, which do not grow with the number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from checkpoints import many_writers, shared_folder
from hypothesis import given
from hypothesis import strategies as st
from replicas import RANK, SIZE, long_lane, outcomes

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint import collecting
from mpistrategy.checkpoint.collecting import plan
from mpistrategy.checkpoint.storage.manifest import Item, Manifest, Shard, parse
from mpistrategy.testing import run_replicas

Launch = Callable[..., launching.Finished]
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "count_checkpoint"
MIB = 2**20


def sized(nbytes: int) -> Any:
    """Return an array of zeros that takes no memory."""
    return np.broadcast_to(np.float32(0), nbytes // 4)


# ------------------------------------------------------------------------------------------------ plans


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=40),
    st.lists(st.integers(0, 400 * MIB), max_size=6),
    st.integers(0, 4000 * MIB),
)
def test_everything_is_written_once(nodes: list[int], sizes: list[int], own: int) -> None:
    node_of = [list(dict.fromkeys(nodes)).index(node) for node in nodes]
    arrays = {str(number): sized(size) for number, size in enumerate(sizes)}
    found = plan(node_of, arrays, own)
    assert found.writers[0] == 0
    assert sorted(set(found.writers)) == sorted(set(found.writer_of.tolist()))
    assert found.writer_of[found.writers].tolist() == found.writers, "a writer writes what it has itself"
    loads = [0] * len(found.writers)
    for path, shards in found.shards.items():
        item = Item("array", "one", "<f4", arrays[path].shape, shards)
        assert sum(stop - start for _, start, stop in item.parts) == arrays[path].size
        for shard, start, stop in item.parts:
            loads[shard] += 4 * (stop - start)
    assert max(loads) <= sum(sizes) / len(loads) + collecting.BYTES_A_WRITER + max(sizes, default=0) / len(loads)


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
    found = plan(node_of, {"a": sized(once)}, own * ranks)
    assert len(found.writers) == count
    assert len({node_of[rank] for rank in found.writers}) == nodes


def test_the_manifest_does_not_grow_with_the_ranks() -> None:
    def length(ranks: int) -> int:
        writers = plan([rank // 8 for rank in range(ranks)], {}, 6900 * 16).writers
        shards = tuple(Shard(ranks * 6900, "0" * 32, writer) for writer in writers)
        text = Manifest(ranks, shards, {"mine": Item("rng", "own")}, ("mine",), {}, "x").text()
        assert parse(text, "x").ranks == ranks
        return len(text)

    assert length(10_000) < length(16) + 20


# ------------------------------------------------------------------------------------------------ files


def objects(strategy: ms.Strategy, on: float, rank: int) -> dict[str, Any]:
    with strategy.scope():
        total = ms.Variable(np.int64(0), synchronization="ON_READ", aggregation="SUM")
        if on:
            strategy.run(lambda: total.assign(np.int64(rank + 1)))
        return {
            "large": ms.Variable(np.arange(1000.0) * on),
            "odd": ms.Variable(np.arange(7, dtype=np.int16) * np.int16(on)),
            "empty": np.zeros((0, 3)),
            "total": total,
            "words": {"step": on},
        }


@pytest.mark.skipif(SIZE == 1, reason="a rank that gathers what others have")
def test_no_memory_on_the_rank_that_gathers(
    strategy: ms.MirroredStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, parts = shared_folder(tmp_path), collecting._parts_of

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
def test_large_arrays_are_split(strategy: ms.MirroredStrategy, tmp_path: Path, wait: bool) -> None:
    folder = shared_folder(tmp_path)
    with many_writers(), strategy.scope():
        ms.Checkpoint(**objects(strategy, 1, RANK)).save(folder / "c", wait=wait).wait()
    with strategy.scope():
        again = ms.Checkpoint(**objects(strategy, 0, RANK))
    again.restore(folder / "c")
    assert again.objects["large"].numpy().tolist() == list(range(1000))
    assert again.objects["odd"].numpy().tolist() == list(range(7))
    assert int(again.objects["total"]) == sum(range(1, SIZE + 1))
    assert again.objects["words"] == {"step": 1}
    arrays = ms.Checkpoint.arrays(folder / "c")
    assert arrays["large"].tolist() == list(range(1000))
    files = sorted(path for path in (folder / "c").iterdir() if path.suffix == ".safetensors")
    assert len(files) == SIZE
    parts = [(name, array) for path in files for name, array in ms.Checkpoint.arrays(path).items() if "large" in name]
    if SIZE > 1:  # each file can be read by itself
        assert parts[0][0] == "large"
        assert len(parts) == SIZE
    assert np.concatenate([array for _, array in parts]).tolist() == list(range(1000))


@pytest.mark.one_rank
@pytest.mark.parametrize(("p", "q"), [(1, 4), (3, 2), (4, 3), (4, 1)])
@pytest.mark.parametrize("many", [True, False])
def test_on_another_number_of_ranks_and_nodes(tmp_path: Path, p: int, q: int, many: bool) -> None:
    def save() -> None:
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            ms.Checkpoint(**objects(strategy, 1, int(strategy.replica_id_in_sync_group))).save(tmp_path / "c")

    def restore() -> Any:
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            checkpoint = ms.Checkpoint(**objects(strategy, 0, 0))
        checkpoint.restore(tmp_path / "c")
        found = checkpoint.objects
        return found["large"].numpy().tolist(), int(found["total"]), found["words"]

    if many:
        with many_writers():
            run_replicas(save, p, nodes=[rank % 2 for rank in range(p)])
    else:
        run_replicas(save, p)
    assert len(os.listdir(tmp_path / "c")) == 1 + (p if many else 1)
    found = run_replicas(restore, q, nodes=[rank * 2 // q for rank in range(q)])
    assert found == [(list(range(1000)), p * (p + 1) // 2, {"step": 1})] * q


def test_values_that_are_too_long_on_one_rank(
    strategy: ms.MirroredStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SIZE == 1:
        pytest.skip("what one rank has is the same everywhere")
    folder = shared_folder(tmp_path)
    monkeypatch.setattr("mpistrategy.checkpoint.storage.shards.LONGEST_TEXT", 10_000)
    with strategy.scope():
        checkpoint = ms.Checkpoint(log=list(range(9000 if RANK == SIZE - 1 else 1)))
    assert {outcome.error for outcome in outcomes(checkpoint.save, folder / "c")} == {errors.OptionError}
    strategy.barrier("cleaned up")
    assert os.listdir(folder) == []


# ------------------------------------------------------------------------------------------------ counts


def counts_of(job: launching.Finished) -> Any:
    return json.loads(job.check().stdout.splitlines()[-1])


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("ranks", "bytes_a_writer", "shards"),
    [
        (4, 2**26, 1),
        (4, 1, 4),
        pytest.param(2, 2**26, 1, marks=long_lane),
        pytest.param(4, 600_000, 2, marks=long_lane),
    ],
)
@pytest.mark.slow
def test_counts(launch: Launch, tmp_path: Path, ranks: int, bytes_a_writer: int, shards: int) -> None:
    """Opens and fsyncs are those of the writers; each byte is read once, whoever needs it."""
    several = {"MPIR_CVAR_NUM_CLIQUES": "2"} if launching.LIBRARY.startswith("MPICH") and ranks == 4 else {}
    how = ["--json", "--bytes-a-writer", bytes_a_writer]
    found = counts_of(launch(ranks, [SCRIPT, tmp_path, *how], env=several))
    assert found["shards"] == shards
    assert found["nodes"] == (2 if several else 1)
    save, restore = found["save"], found["restore"]
    assert save["opens"] == shards + 4  # the manifest, the folder's lock, and two folders to be synced
    assert save["creates"] == shards + 1
    assert save["fsyncs"] == shards + 3
    assert save["renames"] == 1
    assert save["collectives"] <= 10 + 3 * shards
    assert restore["opens"] == shards + 1
    assert restore["bytes read"] == found["bytes"]
    assert restore["most bytes read by a node"] <= found["bytes"]
    assert restore["collectives"] <= 31 + 4 * shards  # one for each of the 21 arrays that were saved once
    assert found["bytes of the manifest"] < 4000
    other = counts_of(launch(3, [SCRIPT, tmp_path, *how, "--restore"]))["restore"]
    assert other["bytes read"] == found["bytes"]
    assert other["collectives"] <= 32 + 4 * shards  # the sums and means of four variables by one of them


@pytest.mark.one_rank
def test_slots_of_each_rank_are_refused_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Of variables that are no strategy's own, so that each rank has slots of its own."""

    def work(*, save: bool) -> None:
        strategy = ms.MirroredStrategy()
        optimizer = ms.optimizers.SGD(0.1, momentum=0.9)
        with ms.OneDeviceStrategy("CPU:0").scope():
            var = ms.Variable(np.zeros(3))
            optimizer.build([var])
        with strategy.scope():
            checkpoint = ms.Checkpoint(optimizer=optimizer, var=var)
        if save:
            optimizer.slots_of(var)["momentum"].assign(np.full(3, float(strategy.rank)))
            checkpoint.save(tmp_path / "saved")
            return
        with pytest.raises(errors.CheckpointMismatchError, match="Nothing has changed"):
            checkpoint.restore(tmp_path / "saved")

    run_replicas(lambda: work(save=True), 4)
    for count in (2, 6):
        run_replicas(lambda: work(save=False), count)
