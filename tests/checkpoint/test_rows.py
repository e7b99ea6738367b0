"""Per-rank arrays of any shape come back on as many ranks; `Rows` of a global array on any number of ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_here
import numpy as np
import pytest
from checkpoints import checkpoint_of, many_writers
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, all_raise, part_of

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.testing import run_replicas

COUNTS = (1, 2, 3, 4, 6)


def replicas(program: Callable[[ms.Strategy], Any], ranks: int, **options: Any) -> list[Any]:
    return run_replicas(lambda: program(ms.MirroredStrategy()), ranks, **options)


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
    st.sampled_from(COUNTS).flatmap(lambda p: st.lists(st.integers(0, 7), min_size=p, max_size=p)),
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
        for q in COUNTS:
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
