"""Saved on P ranks, restored on Q: totals to the unit, streams and data go on, and a resumed run is the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from checkpoints import Training, checkpoint_of, many_writers
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import SIZE, new_variable, part_of

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.skipif(SIZE > 1, reason="starts ranks of its own: runs in the session on 1 rank")
Launch = Callable[..., launching.Finished]
COUNTS = [(p, q) for p in range(1, 5) for q in range(1, 5)]


def replicas(program: Callable[[ms.Strategy], Any], ranks: int, **options: Any) -> list[Any]:
    return run_replicas(lambda: program(ms.MirroredStrategy()), ranks, **options)


@pytest.mark.parametrize(("p", "q"), COUNTS)
def test_everything_on_another_number_of_ranks(tmp_path: Path, p: int, q: int) -> None:
    def save(strategy: ms.Strategy) -> Any:
        training = Training(strategy)
        for _ in range(4):  # into a group of steps, and not to the end of an epoch
            training.step()
        training.checkpoint.objects["own"] = own = np.random.default_rng(strategy.rank)
        training.checkpoint.save(tmp_path / "c")
        return looked_at(training), training.streams.replica.random(), own.random()

    def restore(strategy: ms.Strategy) -> Any:
        training = Training(strategy)
        training.checkpoint.objects["own"] = own = np.random.default_rng()
        notes = training.checkpoint.restore(tmp_path / "c").notes
        assert bool(notes) == (p != q)
        found = looked_at(training), training.streams.replica.random(), own.random()
        training.step()
        return found

    def looked_at(training: Training) -> list[Any]:
        weights, totals, *others = training.shared()
        return [weights, [*totals, *training.strategy.reduce("SUM", training.accumulator.take())], *others]

    with many_writers(p % 2):
        before = replicas(save, p, nodes=[rank * 2 // p for rank in range(p)])
    weights, totals, *others = before[0][0]
    found = replicas(restore, q, nodes=[rank * 2 // q for rank in range(q)])
    for place in (1, 2) if p > 1 else (1,):  # on one rank nothing tells whether the generator is everybody's
        drawn = [each[place] for each in found]
        assert drawn[:p] == [each[place] for each in before[:q]]
        assert len({*drawn}) == q
    for rank, ((weights_there, totals_there, *others_there), *_) in enumerate(found):
        assert weights_there == weights, rank
        assert others_there == others, rank
        assert totals_there[0] == totals[0]
        for there, total in zip(totals_there, totals, strict=True):
            np.testing.assert_allclose(there, total, rtol=1e-15)


@settings(max_examples=part_of(60))
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
        return new_variable(strategy, np.zeros(3, dtype), synchronization="ON_READ", aggregation=how)

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
        array = ms.Checkpoint.arrays(folder / "c")["v"]
        assert array.dtype == dtype
        rounding = 0 if kind != "f" else 4 * np.finfo(dtype).eps
        np.testing.assert_allclose(array, mean if how == "MEAN" else total, rtol=rounding, atol=1e3 * rounding)


def test_values_of_a_ranks_own_need_as_many_ranks(tmp_path: Path) -> None:
    def run(strategy: ms.Strategy, *, save: bool) -> tuple[Any, ...]:
        fill, text, optimizer = float(strategy.rank) if save else 7.0, "", ms.optimizers.SGD(0.1, momentum=0.9)
        with ms.OneDeviceStrategy("CPU:0").scope():  # of no strategy of the job, so that each rank has slots of its own
            weights = ms.Variable(np.zeros(2))
            optimizer.build([weights])
        slot, array = optimizer.slots_of(weights)["momentum"], np.full(strategy.rank, fill)
        slot.assign(np.full(2, fill))
        copies = new_variable(strategy, np.zeros(2), synchronization="ON_READ")  # with aggregation NONE
        strategy.run(lambda: copies.assign(np.full(2, fill)))
        checkpoint = checkpoint_of(strategy, array=array, copies=copies, optimizer=optimizer, weights=weights)
        try:
            checkpoint.save(tmp_path / "c") if save else checkpoint.restore(tmp_path / "c")
        except errors.CheckpointMismatchError as error:
            text = str(error)
        return text, array.tolist(), copies.local_copy().tolist(), slot.numpy().tolist()

    replicas(lambda strategy: run(strategy, save=True), 3)
    found = replicas(lambda strategy: run(strategy, save=False), 3)
    assert found == [("", [rank] * rank, [rank] * 2, [rank] * 2) for rank in range(3)]
    for ranks in (2, 4):
        for rank, (text, *unchanged) in enumerate(replicas(lambda strategy: run(strategy, save=False), ranks)):
            assert text.count("each of the 3 ranks that saved had a") == 3, text
            assert f"now there are {ranks}" in text
            assert "ms.Rows" in text
            assert unchanged == [[7] * rank, [7, 7], [7, 7]]


#: On two and three ranks: save, or restore what another job has saved, and print all that does not depend on ranks.
PROGRAM = """
import sys
sys.path[:0] = {tests!r}
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


@pytest.mark.slow
def test_jobs_of_real_ranks(launch: Launch, tmp_path: Path) -> None:
    path = str(tmp_path / "with a space")
    printed = [
        launch(ranks, PROGRAM.format(tests=launching.HELPERS, save=save, path=path)).check().stdout
        for ranks, save in ((3, True), (2, False))
    ]
    assert printed[0] == printed[1] != ""
