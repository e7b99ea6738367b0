"""Checkpoints of format 1, as 0.1.0 wrote them, are still read: on as many ranks, on fewer and on more.

The folder `of_version_1` was written by `save` below, with three replicas, by the last commit that wrote format 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.one_rank

OLD = Path(__file__).parent / "of_version_1"
RANKS = 3


class Program:
    """One of everything, in a known state; `with_own` has what only as many ranks can restore."""

    def __init__(self, *, is_saved: bool, with_own: bool) -> None:
        self.strategy = ms.MirroredStrategy()
        rank = self.rank = int(self.strategy.replica_id_in_sync_group)
        on = float(is_saved)
        with self.strategy.scope():
            self.weights = ms.Variable(np.arange(6.0).reshape(2, 3) * on, name="weights")
            self.large = ms.Variable(np.arange(100, dtype=np.float32) * np.float32(on), name="large")
            self.total = ms.Variable(np.int64(0), synchronization="ON_READ", aggregation="SUM")
            self.sums = ms.Variable(np.zeros(2, np.float32), synchronization="ON_READ", aggregation="SUM")
            self.mean = ms.Variable(np.zeros(2), synchronization="ON_READ", aggregation="MEAN")
            self.first = ms.Variable(np.zeros(1), synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA")
            self.adam = ms.optimizers.Adam(0.25 if is_saved else 0.5)
        self.accumulator = ms.gradients.GradientAccumulator(3)
        self.streams = self.strategy.rng(5)
        self.shuffle = np.random.default_rng(7)
        self.mine = np.random.Generator(np.random.MT19937(rank))
        self.progress: Any = {"step": 3, "best": 0.5} if is_saved else {}
        if is_saved:
            self.strategy.run(self.fill)
            self.streams.shared.random(2)
            self.streams.replica.random(3)
            self.shuffle.random(4)
            self.mine.random(5)
        with self.strategy.scope():
            self.checkpoint = ms.Checkpoint(
                weights=self.weights, large=self.large, counts=[self.total, (self.sums, self.mean)], first=self.first,
                adam=self.adam, accumulator=self.accumulator, streams=self.streams, shuffle=self.shuffle,
                mine=self.mine, progress=self.progress, kept=np.full(3, on),
            )  # fmt: skip
            if with_own:
                self.own = np.full(2, rank * on)
                self.checkpoint.objects |= {"own": self.own, "words": [f"rank {rank}", rank] if is_saved else []}

    def fill(self) -> None:
        """Give the copies of a rank their values, and make a step."""
        self.total.assign(np.int64(self.rank + 10))
        self.sums.assign(np.array([self.rank, 0.5], np.float32))
        self.mean.assign(np.array([self.rank, 1.0]))
        self.first.assign(np.array([self.rank + 7.0]))
        self.accumulator.add([np.full(2, self.rank + 1.0)])
        self.adam.apply_gradients([(np.ones((2, 3)), self.weights)])


def save(path: Path) -> None:
    """Write it."""
    run_replicas(lambda: Program(is_saved=True, with_own=True).checkpoint.save(path), RANKS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_on_any_number_of_ranks(ranks: int) -> None:
    def restore() -> Any:
        program = Program(is_saved=False, with_own=ranks == RANKS)
        restored = program.checkpoint.restore(OLD, partial=ranks != RANKS)
        assert restored.ranks == RANKS
        assert sorted(restored.left_out) == ([] if ranks == RANKS else ["own", "words"])
        if ranks == RANKS:
            assert program.own.tolist() == [program.rank] * 2
            assert program.checkpoint.objects["words"] == [f"rank {program.rank}", program.rank]
        assert program.weights.numpy().round(6).tolist() == [[-0.25, 0.75, 1.75], [2.75, 3.75, 4.75]]
        assert program.large.numpy().tolist() == list(range(100))
        assert int(program.total) == 33
        np.testing.assert_allclose(np.asarray(program.sums), [3, 1.5], rtol=1e-6)
        np.testing.assert_allclose(np.asarray(program.mean), [1, 1], rtol=1e-12)
        assert np.asarray(program.first).tolist() == [7]
        assert (program.adam.learning_rate, int(np.asarray(program.adam.iterations))) == (0.25, 1)
        assert program.adam.slots_of(program.weights)["m"].numpy().round(6).tolist() == [[0.3] * 3] * 2
        assert program.progress == {"step": 3, "best": 0.5}
        assert program.checkpoint.objects["kept"].tolist() == [1, 1, 1]
        generator = np.random.default_rng(7)
        generator.random(4)
        assert program.shuffle.random() == generator.random()
        (partial_sum,) = program.accumulator._partial_sums
        copies = [program.total, program.sums, program.mean]
        own = [copy.local_copy().tolist() for copy in copies]
        return partial_sum.tolist(), program.streams.shared.random(), program.mine.random(), own

    found = run_replicas(restore, ranks)
    np.testing.assert_allclose(np.sum([sums for sums, *_ in found], axis=0), [6, 6], rtol=1e-12)
    assert len({shared for _, shared, *_ in found}) == 1
    for rank, (_, _, drawn, _) in enumerate(found[:RANKS]):
        generator = np.random.Generator(np.random.MT19937(rank))
        generator.random(5)
        assert drawn == generator.random()
    assert len({drawn for _, _, drawn, _ in found}) == ranks
    if ranks == RANKS:
        assert [own for *_, own in found] == [[rank + 10, [rank, 0.5], [rank, 1.0]] for rank in range(RANKS)]


def test_what_each_rank_had_needs_as_many_ranks() -> None:
    def restore() -> str:
        program = Program(is_saved=False, with_own=True)
        with pytest.raises(errors.CheckpointMismatchError) as caught:
            program.checkpoint.restore(OLD)
        return str(caught.value)

    assert all("own: each of the 3 ranks that saved had" in text for text in run_replicas(restore, 2))


def test_its_arrays() -> None:
    arrays = ms.Checkpoint.arrays(OLD)
    assert arrays["counts/0"] == 33
    assert arrays["large"].tolist() == list(range(100))
    assert [arrays[f"own@{rank}"].tolist() for rank in range(RANKS)] == [[0, 0], [1, 1], [2, 2]]
