"""Saved on P ranks, restored on Q: totals to the unit, streams and data go on, and a resumed run is the same run.

Per-rank arrays of any shape come back on as many ranks; `Rows` of a global array on any number of ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_here
import launching
import numpy as np
import pytest
from checkpoints import Training, checkpoint_of, many_writers
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, all_raise, new_variable, part_of

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.testing import run_replicas

Launch = Callable[..., launching.Finished]
RANKS = (1, 2, 3, 4, 6)
COUNTS = [(p, q) for p in range(1, 5) for q in range(1, 5)]


def replicas(program: Callable[[ms.Strategy], Any], ranks: int, **options: Any) -> list[Any]:
    return run_replicas(lambda: program(ms.MirroredStrategy()), ranks, **options)


@pytest.mark.one_rank
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
        restored = training.checkpoint.restore(max(tmp_path.iterdir()))
        assert bool(restored.notes) == (restored.ranks != strategy.num_replicas_in_sync)
        training.checkpoint.save(tmp_path / f"d{strategy.num_replicas_in_sync}")
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
    later = replicas(restore, q + 1)
    for place in (1, 2) if p > 1 else (1,):  # on one rank nothing tells whether the generator is everybody's
        drawn = [each[place] for each in found]
        assert drawn[:p] == [each[place] for each in before[:q]]
        assert len({*drawn}) == q
        assert place > min(p, q) or len({each[place] for each in later}) == q + 1
    for rank, ((weights_there, totals_there, *others_there), *_) in enumerate(found):
        assert weights_there == weights, rank
        assert others_there == others, rank
        assert totals_there[0] == totals[0]
        for there, total in zip(totals_there, totals, strict=True):
            np.testing.assert_allclose(there, total, rtol=1e-15)


@pytest.mark.one_rank
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
        numbers = (
            st.booleans() if kind == "b" else st.integers(-1000, 1000).map(lambda number: number / 8) | st.just(-0.0)
        )
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
                    assert how == "MEAN" or copy.tobytes() == wanted.tobytes()  # -0.0 too
        array = ms.Checkpoint.arrays(folder / "c")["v"]
        assert array.dtype == dtype
        rounding = 0 if kind != "f" else 4 * np.finfo(dtype).eps
        np.testing.assert_allclose(array, mean if how == "MEAN" else total, rtol=rounding, atol=1e3 * rounding)


@pytest.mark.one_rank
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


# ------------------------------------------------------------------------------------------------ arrays of a rank


class Domain:
    """A solver's own state, whose length may change."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def state_dict(self) -> Any:
        return {"rows": self.rows, "like": [ms.Rows(self.rows)]}

    def load_state_dict(self, state: Any) -> None:
        assert isinstance(state["like"][0], ms.Rows)
        self.rows = state["rows"]


class Swapped(Domain):
    """One that has rows where the other has an array, and an array where that has rows."""

    def state_dict(self) -> Any:
        return {"rows": ms.Rows(self.rows), "like": [self.rows]}


# ------------------------------------------------------------------------------------------------ per-rank arrays


def of_one_rank(rank: int, on: float) -> dict[str, Any]:
    """Return arrays whose shapes differ by rank; rank 0 has no rows."""
    rows = np.full((2 * rank, 3), rank + 1.0) * on
    return {
        "array": rows.copy(),
        "axes": np.full((2,) * (rank + 1), rank, np.int16) * np.int16(on),
        "nest": {"a": [rows.copy(), (rows[:1].copy(), 5)], "b": np.full((rank, 0), "x")},
        "domain": Domain(rows if on else np.empty(0)),
        "same": np.arange(3.0) * on,
    }


def texts(objects: dict[str, Any]) -> dict[str, str]:
    plain = objects | {"domain": objects["domain"].rows}
    return {name: repr(value) for name, value in plain.items()}


@pytest.mark.parametrize("many", [True, False])
def test_arrays_of_another_shape_on_each_rank(strategy: ms.MirroredStrategy, folder: Path, many: bool) -> None:
    with strategy.scope(), many_writers(many):
        ms.Checkpoint(**of_one_rank(RANK, 1)).save(folder / "c", wait=many).wait()
        again = ms.Checkpoint(**of_one_rank(RANK, 0))
    again.restore(folder / "c")
    assert texts(again.objects) == texts(of_one_rank(RANK, 1))
    if SIZE > 1:
        arrays = ms.Checkpoint.arrays(folder / "c")
        assert [arrays[f"array@{rank}"].shape for rank in range(SIZE)] == [(2 * rank, 3) for rank in range(SIZE)]
        assert arrays[f"axes@{SIZE - 1}"].tolist() == np.full((2,) * SIZE, SIZE - 1).tolist()


# ------------------------------------------------------------------------------------------------ rows


def parts(count: int, ranks: int) -> list[slice]:
    each = -(-count // ranks)
    return [slice(min(rank * each, count), min((rank + 1) * each, count)) for rank in range(ranks)]


@pytest.mark.one_rank
@settings(max_examples=part_of(40))
@given(
    st.sampled_from(RANKS).flatmap(lambda p: st.lists(st.integers(0, 7), min_size=p, max_size=p)),
    st.sampled_from([(), (3,), (2, 2), (0,)]),
    st.sampled_from(["<f8", "<i2", "|b1", "<U3", "<c8"]),
    st.booleans(),
    st.booleans(),
)
def test_rows_from_any_number_of_ranks_to_any(
    lengths: list[int], axes: tuple[int, ...], dtype: str, many: bool, in_turns: bool
) -> None:
    count, p = sum(lengths), len(lengths)
    whole = (np.arange(count * int(np.prod(axes))).reshape(count, *axes) % 97).astype(dtype)
    ends = np.cumsum(lengths)

    def save(strategy: ms.Strategy) -> None:
        mine = whole[ends[strategy.rank] - lengths[strategy.rank] : ends[strategy.rank]]
        own = np.full(strategy.rank, 1.0)
        checkpoint_of(strategy, rows=ms.Rows(mine), state=Domain(mine), own={"x": own}).save(folder / "c")

    def restore(strategy: ms.Strategy) -> Any:
        rows, state = ms.Rows(np.empty((1, *axes), dtype)), Domain(np.empty((0, *axes), dtype))
        checkpoint_of(strategy, rows=rows).restore(folder / "c", partial=True)
        if strategy.size == p:
            checkpoint_of(strategy, state=state).restore(folder / "c", partial=True)
        return rows.value, state.rows

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with many_writers(many):
            replicas(save, p, nodes=[rank % 2 if in_turns else rank * 2 // p for rank in range(p)])
        for q in RANKS:
            found = replicas(restore, q)
            for (rows, _), part in zip(found, parts(count, q), strict=True):
                assert rows.dtype == whole.dtype
                assert rows.tolist() == whole[part].tolist()
            if q == p:
                own = np.split(whole, ends[:-1])
                assert [state.tolist() for _, state in found] == [each.tolist() for each in own]
        assert ms.Checkpoint.arrays(folder / "c")["rows"].tolist() == whole.tolist()


@pytest.mark.parametrize("memory", ["host", "GPU"])
@pytest.mark.parametrize("wait", [True, False])
def test_rows_of_real_ranks(strategy: ms.MirroredStrategy, folder: Path, memory: str, wait: bool) -> None:
    library: Any = gpu_here.cupy_or_skip() if memory == "GPU" else np
    on_host = library.asnumpy if memory == "GPU" else np.asarray
    rows, state = ms.Rows(library.full((RANK, 2), RANK + 1.0)), Domain(library.full(RANK, RANK + 1))
    with strategy.scope(), many_writers(wait):
        checkpoint = ms.Checkpoint(rows=rows, state=state)
        checkpoint.save(folder / "c", wait=wait).wait()
        rows.value, state.rows = library.empty((1, 2)), library.empty(7, int)
        checkpoint.restore(folder / "c")
    whole = np.repeat(np.arange(SIZE) + 1.0, np.arange(SIZE))
    assert isinstance(rows.value, library.ndarray)
    assert isinstance(state.rows, library.ndarray)
    assert on_host(rows.value)[:, 1].tolist() == whole[parts(len(whole), SIZE)[RANK]].tolist()
    assert on_host(state.rows).tolist() == [RANK + 1] * RANK
    for value in ([1.0], np.float64(1), np.zeros(())):
        with pytest.raises((errors.OptionTypeError, errors.ShapeError)):
            ms.Rows(value)


def test_rows_that_do_not_fit_together(strategy: ms.MirroredStrategy, folder: Path) -> None:
    with strategy.scope():
        made = {"rows": ms.Rows(np.ones((RANK, 2))), "array": np.ones((RANK, 2)), "domain": Domain(np.ones(2))}
        for name, x in made.items():
            ms.Checkpoint(x=x).save(folder / name)
        tried: list[tuple[str, Any]] = [
            ("rows", np.zeros((RANK, 2))), ("array", ms.Rows(np.zeros((RANK, 2)))), ("domain", Swapped(np.ones(2))),
            *(("rows", ms.Rows(array)) for array in (np.zeros((0, 3)), np.zeros((0, 2), np.float32), np.zeros(0))),
        ]  # fmt: skip
        for name, x in tried:
            all_raise(errors.CheckpointMismatchError, ms.Checkpoint(x=x).restore, folder / name)
        if SIZE > 1:
            x = ms.Rows(np.zeros((0, 3 if RANK else 2)))
            for call in (ms.Checkpoint(x=x).restore, ms.Checkpoint(x=x).save):
                all_raise(errors.CollectiveMismatchError, call, folder / "rows")
