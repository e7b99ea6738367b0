"""Saved on P ranks, restored on Q: totals to the unit, streams and data go on, and a resumed run is the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from checkpoints import Training
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import SIZE

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.skipif(SIZE > 1, reason="starts ranks of its own: runs in the session on 1 rank")
Launch = Callable[..., launching.Finished]
COUNTS = [(p, q) for p in range(1, 5) for q in range(1, 5)]


def replicas(program: Callable[[ms.Strategy], Any], ranks: int) -> list[Any]:
    return run_replicas(lambda: program(ms.MirroredStrategy()), ranks)


@pytest.mark.parametrize(("p", "q"), COUNTS)
def test_everything_on_another_number_of_ranks(tmp_path: Path, p: int, q: int) -> None:
    def save(strategy: ms.Strategy) -> Any:
        training = Training(strategy)
        for _ in range(3):
            training.step()
        training.checkpoint.save(tmp_path / "c")
        return training.shared()

    def restore(strategy: ms.Strategy) -> Any:
        training = Training(strategy)
        notes = training.checkpoint.restore(tmp_path / "c").notes
        assert bool(notes) == (p != q)
        found = training.shared()
        training.step()
        return found

    ((weights, totals, *others), *_), found = replicas(save, p), replicas(restore, q)
    for rank, (weights_there, totals_there, *others_there) in enumerate(found):
        assert weights_there == weights, rank
        assert others_there == others, rank
        assert totals_there[0] == totals[0]
        np.testing.assert_allclose(totals_there[1], totals[1], rtol=1e-15)
        np.testing.assert_allclose(totals_there[2], totals[2], rtol=1e-15)


@settings(max_examples=60)
@given(
    st.integers(1, 4),
    st.sampled_from(["int8", "uint8", "int32", "int64", "uint64", "bool", "float32", "float64", "float16"]),
    st.sampled_from(["SUM", "MEAN", "ONLY_FIRST_REPLICA"]),
    st.data(),
)
def test_totals_of_on_read_variables(p: int, dtype: str, how: str, data: st.DataObject) -> None:
    kind = np.dtype(dtype).kind
    if kind != "f" and how == "MEAN":
        how = "SUM"
    if kind in "iu":
        limits = np.iinfo(dtype)
        numbers: Any = st.integers(int(limits.min), int(limits.max))
    else:
        numbers = st.booleans() if kind == "b" else st.integers(-1000, 1000).map(lambda number: number / 8)
    copies = [np.array(data.draw(st.lists(numbers, min_size=3, max_size=3)), dtype) for _ in range(p)]

    def make(strategy: ms.Strategy) -> ms.Variable:
        with strategy.scope():
            return ms.Variable(np.zeros(3, dtype), synchronization="ON_READ", aggregation=how)

    def save(strategy: ms.Strategy) -> None:
        var = make(strategy)
        strategy.run(lambda: var.assign(copies[strategy.replica_id_in_sync_group]))
        ms.Checkpoint(v=var).save(folder / "c")

    def restore(strategy: ms.Strategy) -> Any:
        var = make(strategy)
        ms.Checkpoint(v=var).restore(folder / "c")
        return var.local_copy()

    with np.errstate(all="ignore"), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        replicas(save, p)
        total = copies[0] if how == "ONLY_FIRST_REPLICA" else np.sum(copies, axis=0, dtype=dtype)
        mean = np.mean(np.array(copies, np.float64), axis=0)
        for q in (1, 2, 3, 4):
            found = replicas(restore, q)
            if p == q:
                assert [copy.tolist() for copy in found] == [copy.tolist() for copy in copies]
            elif how == "SUM":
                summed = np.sum(found, axis=0, dtype=dtype)
                np.testing.assert_allclose(summed, total, rtol=0, atol=0 if kind != "f" else 4e3 * np.finfo(dtype).eps)
            else:
                wanted = mean if how == "MEAN" else total
                for copy in found:
                    np.testing.assert_allclose(copy, wanted, rtol=0 if kind != "f" else np.finfo(dtype).eps)
        arrays = ms.Checkpoint.arrays(folder / "c")
        assert arrays["v"].dtype == dtype


def test_values_of_a_ranks_own_need_as_many_ranks(tmp_path: Path) -> None:
    def save(strategy: ms.Strategy) -> None:
        with strategy.scope():
            ms.Checkpoint(own=np.full(2, strategy.replica_id_in_sync_group), same=[1]).save(tmp_path / "c")

    def restore(strategy: ms.Strategy) -> str:
        with strategy.scope():
            checkpoint = ms.Checkpoint(own=np.zeros(2, int), same=[0])
            try:
                checkpoint.restore(tmp_path / "c")
            except errors.CheckpointMismatchError as error:
                return str(error)
            return str(checkpoint.objects)

    replicas(save, 2)
    assert replicas(restore, 2)[1] == "{'own': array([1, 1]), 'same': [1]}"
    assert all(
        "each of the 2 ranks that saved had a array of its own; now there are 3" in t for t in replicas(restore, 3)
    )


@pytest.mark.parametrize(("p", "q"), COUNTS)
def test_streams_of_more_ranks_are_all_different(tmp_path: Path, p: int, q: int) -> None:
    def save(strategy: ms.Strategy) -> Any:
        streams, generator = strategy.rng(5), np.random.default_rng(strategy.replica_id_in_sync_group)
        streams.replica.random(10)
        with strategy.scope():
            ms.Checkpoint(streams=streams, generator=generator).save(tmp_path / "c")
        return streams.replica.random(), generator.random()

    def restore(strategy: ms.Strategy) -> Any:
        streams, generator = strategy.rng(5), np.random.default_rng()
        with strategy.scope():
            ms.Checkpoint(streams=streams, generator=generator).restore(tmp_path / "c")
        return streams.replica.random(), generator.random()

    before, after = replicas(save, p), replicas(restore, q)
    assert [pair[0] for pair in after[:p]] == [pair[0] for pair in before[:q]]
    assert len({pair[0] for pair in after}) == q
    if p > 1:  # on one rank nothing tells whether the generator is everybody's
        assert [pair[1] for pair in after[:p]] == [pair[1] for pair in before[:q]]
        assert len({pair[1] for pair in after}) == q


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    steps, stops = 8, np.random.default_rng(ranks).integers(1, 8, 7)

    def run(strategy: ms.Strategy, until: int, start: Path | None = None, end: Path | None = None) -> Any:
        training = Training(strategy)
        if start is not None:
            training.checkpoint.restore(start)
        while training.progress["step"] < until:
            training.step()
        if end is not None:
            training.checkpoint.save(end, wait=bool(until % 2))
            training.checkpoint.wait()
        return training.everything()

    golden = replicas(lambda strategy: run(strategy, steps), ranks)
    for number, stop in enumerate(stops.tolist()):
        path = tmp_path / f"{number}"
        replicas(lambda strategy, s=stop, p=path: run(strategy, s, None, p), ranks)
        resumed = replicas(lambda strategy, p=path: run(strategy, steps, p), ranks)
        assert resumed == golden, stop


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import mpistrategy as ms
from checkpoints import Training

strategy = ms.MirroredStrategy()
training = Training(strategy)
if {save}:
    for _ in range(2):
        training.step()
    training.checkpoint.save({path!r}, wait=False).wait()
else:
    training.checkpoint.restore({path!r})
found = training.shared()
if strategy.replica_id_in_sync_group == 0:
    print(repr(found[0]), found[1][0], found[2:])
"""


@pytest.mark.parametrize(("p", "q"), [(1, 3), (3, 2), (4, 1), (2, 4)])
def test_jobs_of_real_ranks(launch: Launch, tmp_path: Path, p: int, q: int) -> None:
    tests = str(Path(__file__).parent)
    path = str(tmp_path / "with a space")
    printed = [
        launch(ranks, PROGRAM.format(tests=tests, save=save, path=path)).check().stdout
        for ranks, save in ((p, True), (q, False))
    ]
    assert printed[0] == printed[1] != ""
