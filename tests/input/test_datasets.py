"""Datasets: how global batches are made of arrays and split among the ranks, and what is read for it."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicas import RANK, SIZE, all_raise

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import nest

pytestmark = pytest.mark.mpi

WORLDS = range(1, 5)
counts = st.integers(0, 30)
sizes = st.integers(1, 12)


def parts_of(dataset: Any, ranks: int, **options: bool) -> list[list[Any]]:
    """Return what each of `ranks` ranks gets, step by step."""
    return [list(ms.DistributedDataset(dataset, rank, ranks, **options)) for rank in range(ranks)]


def numbered(rows: int, *, width: int = 2) -> np.ndarray[Any, Any]:
    """An array that has the number of the row in each row."""
    return np.repeat(np.arange(rows), width).reshape(rows, width)


# ------------------------------------------------------------------------------------------- the split


@given(counts, sizes, st.sampled_from(WORLDS), st.booleans(), st.none() | st.integers(0, 3))
def test_the_parts_of_all_ranks_make_up_the_global_batch(
    rows: int, size: int, ranks: int, drop: bool, seed: int | None
) -> None:
    data = ms.Dataset.from_arrays(numbered(rows), size, shuffle_seed=seed, drop_remainder=drop)
    whole, parts = list(data), parts_of(data, ranks)
    assert len(whole) == len(data) == (rows // size if drop else -(-rows // size))
    assert {len(of_rank) for of_rank in parts} == {len(whole)}  # every rank makes the same number of steps
    for batch, *of_ranks in zip(whole, *parts, strict=True):
        assert np.array_equal(np.concatenate(of_ranks), batch)
        lengths = [len(part) for part in of_ranks]
        full = -(-len(batch) // ranks)
        assert lengths == [min(full, max(0, len(batch) - rank * full)) for rank in range(ranks)]
        assert {part.dtype for part in of_ranks} == {batch.dtype}
        assert {part.shape[1:] for part in of_ranks} == {batch.shape[1:]}


@given(counts, sizes, st.sampled_from(WORLDS))
def test_dropping_what_is_left_over(rows: int, size: int, ranks: int) -> None:
    batches = [numbered(rows)[start : start + size] for start in range(0, rows, size)]
    parts = parts_of(batches, ranks, drop_remainder=True)
    kept = [batch[: len(batch) - len(batch) % ranks] for batch in batches if len(batch) >= ranks]
    data = ms.Dataset.from_arrays(numbered(rows), size)
    for source in (batches, data):
        assert len(ms.DistributedDataset(source, 0, ranks, drop_remainder=True)) == len(kept)
    assert {len(of_rank) for of_rank in parts} == {len(kept)}
    for batch, *of_ranks in zip(kept, *parts, strict=True):
        assert np.array_equal(np.concatenate(of_ranks), batch)
        assert len({len(part) for part in of_ranks}) == 1


@given(counts, sizes, st.sampled_from(WORLDS))
def test_padding_with_rows_of_zeros(rows: int, size: int, ranks: int) -> None:
    columns = {"data": numbered(rows) + 7, "real": np.ones(rows, bool)}
    parts = parts_of(ms.Dataset.from_arrays(columns, size), ranks, pad=True)
    real = [part["data"][part["real"]] for step in zip(*parts, strict=True) for part in step]
    if rows:
        assert np.array_equal(np.concatenate(real), columns["data"])
    for step in zip(*parts, strict=True):
        assert len({len(part["data"]) for part in step}) == 1
        assert all(not part["data"][~part["real"]].any() for part in step)
        assert {part["data"].dtype for part in step} == {columns["data"].dtype}


# ------------------------------------------------------------------------------------------- shuffling


@given(st.integers(1, 30), sizes, st.integers(0, 2**40), st.integers(1, 3))
def test_each_epoch_has_every_row_once_in_an_order_of_its_own(rows: int, size: int, seed: int, epochs: int) -> None:
    data = ms.Dataset.from_arrays(np.arange(rows), size, shuffle_seed=seed, epochs=epochs)
    everything = np.concatenate(list(data)).reshape(epochs, rows)
    assert (np.sort(everything, axis=1) == np.arange(rows)).all()
    again = np.concatenate(list(ms.Dataset.from_arrays(np.arange(rows), size, shuffle_seed=seed + 1)))
    if rows >= 12:
        assert not (everything[0] == again).all()
    if rows >= 12 and epochs > 1:
        assert not (everything[0] == everything[1]).all()
    for number in range(epochs):
        assert np.array_equal(np.concatenate(list(data.epoch(number))), everything[number])


# ------------------------------------------------------------------------------------------- what a batch may be


Batch = namedtuple("Batch", "x y")


@pytest.mark.parametrize(
    "example",
    [
        numbered(7),
        (numbered(7), np.arange(7)),
        {"x": numbered(7), "y": [np.arange(7.0), np.zeros((7, 2, 3), np.float16)]},
        Batch(numbered(7), np.array(list("abcdefg"))),
    ],
    ids=["array", "tuple", "dict", "namedtuple"],
)
def test_the_structure_is_kept(example: Any) -> None:
    for parts in zip(*parts_of(ms.Dataset.from_arrays(example, 7), 3), strict=True):
        for rank, part in enumerate(parts):
            expected = nest.map_structure(lambda leaf, r=rank: leaf[[slice(3), slice(3, 6), slice(6, 7)][r]], example)
            assert type(part) is type(example)
            np.testing.assert_equal(part, expected)


def test_any_iterable_gives_global_batches(strategy: ms.MirroredStrategy) -> None:
    batches = [np.arange(5), np.arange(5, 9)]

    class Again:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    for source in (
        batches,
        tuple(batches),
        iter(batches),
        (batch for batch in batches),
        Again(),
        map(np.array, batches),
    ):
        parts = list(strategy.experimental_distribute_dataset(source))
        assert [strategy.gather(part, 0).tolist() for part in parts] == [batch.tolist() for batch in batches]


def test_what_can_be_iterated_again_starts_again(strategy: ms.MirroredStrategy) -> None:
    distributed = strategy.experimental_distribute_dataset(ms.Dataset.from_arrays(np.arange(6), 2))
    first = [part.tolist() for part in distributed]
    assert len(distributed) == 3
    assert [part.tolist() for part in distributed] == first
    with pytest.raises(TypeError):
        len(strategy.experimental_distribute_dataset(iter([np.arange(2)])))


def test_without_an_end() -> None:
    data = ms.Dataset.from_arrays(np.arange(3), 2, epochs=None)
    iterator = iter(ms.DistributedDataset(data, 0, 1))
    assert [next(iterator).tolist() for _ in range(5)] == [[0, 1], [2], [0, 1], [2], [0, 1]]
    with pytest.raises(TypeError, match="no length"):
        len(data)
    assert list(ms.Dataset.from_arrays(np.arange(3), 4, drop_remainder=True, epochs=None)) == []
    assert parts_of(ms.Dataset.from_arrays(np.arange(1), 2, epochs=None), 2, drop_remainder=True) == [[], []]


def test_what_slices_of_a_source_are_is_kept() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    source = sparse.csr_array(np.diag([1.0, 2.0, 3.0]))
    for seed in (None, 2):
        data = ms.Dataset.from_arrays((source, np.arange(3)), 3, shuffle_seed=seed)
        for [(rows, numbers)] in parts_of(data, 2):
            assert np.array_equal(rows.toarray(), np.diag([1.0, 2.0, 3.0])[numbers])
    masked = np.ma.masked_equal(np.arange(4), 2)
    [[part]] = parts_of(ms.Dataset.from_arrays(masked, 4), 1)
    assert part.mask.tolist() == [False, False, True, False]


def test_a_step_may_write_into_its_batch() -> None:
    source = np.arange(6.0)
    for seed in (None, 1):
        for [part] in parts_of(ms.Dataset.from_arrays(source, 6, shuffle_seed=seed), 2):
            part *= 0
    assert source.tolist() == [0, 1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------- what is read


@dataclasses.dataclass
class Recording:
    """Stands in for a dataset in a file (h5py, zarr): reads when it is sliced, wants rows in order and once.

    As of zarr, the class is a dataclass, and an array is one leaf all the same.
    """

    array: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.array.shape, self.array.dtype
        self.read: list[int] = []

    def __getitem__(self, rows: Any) -> np.ndarray[Any, Any]:
        numbers = np.arange(len(self.array))[rows]
        assert np.array_equal(numbers, np.unique(numbers))
        self.read.extend(numbers.tolist())
        return self.array[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise AssertionError("read as a whole")


@given(st.integers(0, 30), sizes, st.sampled_from(WORLDS), st.none() | st.integers(0, 3))
def test_a_rank_reads_its_own_rows_only(rows: int, size: int, ranks: int, seed: int | None) -> None:
    read = []
    for rank in range(ranks):
        source = Recording(numbered(rows))
        data = ms.Dataset.from_arrays({"a": source, "b": np.arange(rows)}, size, shuffle_seed=seed)
        assert source.read == []
        iterator = iter(ms.DistributedDataset(data, rank, ranks))
        assert source.read == []
        parts = list(iterator)
        own = [int(row) for part in parts for row in part["b"]]
        assert sorted(source.read) == sorted(own)
        assert all((part["a"][:, 0] == part["b"]).all() for part in parts)
        read.extend(source.read)
    assert sorted(read) == list(range(rows))


def test_batches_that_are_lazy_themselves_are_sliced() -> None:
    batches = [Recording(numbered(5)), Recording(numbered(3))]
    parts = list(ms.DistributedDataset(batches, 1, 2))
    assert [part[:, 0].tolist() for part in parts] == [[3, 4], [2]]
    assert [batch.read for batch in batches] == [[3, 4], [2]]


@pytest.mark.parametrize("seed", [None, 4])
def test_memory_mapped_arrays(tmp_path: Path, strategy: ms.MirroredStrategy, seed: int | None) -> None:
    path = tmp_path / f"rows-{RANK}.bin"
    numbered(9).astype(np.int32).tofile(path)
    mapped = np.memmap(path, np.int32, "r", shape=(9, 2))
    data = ms.Dataset.from_arrays((mapped, np.arange(9)), 4, shuffle_seed=seed)
    for rows, numbers in strategy.experimental_distribute_dataset(data):
        assert type(rows) is np.ndarray
        assert rows.flags.writeable
        assert np.array_equal(rows[:, 0], numbers)
        assert rows.dtype == np.int32


# ------------------------------------------------------------------------------------------- bad input

NO_DATASETS: list[tuple[Any, type[Exception]]] = [
    (None, errors.OptionTypeError),
    (3, errors.OptionTypeError),
    ("batches", errors.OptionTypeError),
    ({"x": np.zeros(2)}, errors.OptionTypeError),
    ([1, 2], errors.BatchError),
    (np.arange(3), errors.OptionTypeError),
    (np.zeros((4, 3)), errors.OptionTypeError),
    ([(np.zeros(2), np.zeros(3))], errors.BatchError),
    ([np.zeros(2), None], errors.BatchError),
    (iter([np.float64(1)]), errors.BatchError),
    ([()], errors.BatchError),
]


@pytest.mark.parametrize(("dataset", "kind"), NO_DATASETS, ids=lambda value: type(value).__name__)
def test_what_is_no_dataset_is_refused_on_every_rank(
    strategy: ms.MirroredStrategy, dataset: Any, kind: type[Exception]
) -> None:
    all_raise(kind, lambda: list(strategy.experimental_distribute_dataset(dataset)))


def test_bad_options(strategy: ms.MirroredStrategy) -> None:
    for options, words in (({"drop_remainder": True, "pad": True}, "one of them"), ({"options": {}}, "InputOptions")):
        with pytest.raises(errors.MpiStrategyError, match=words):
            strategy.experimental_distribute_dataset([np.arange(4)], **options)  # type: ignore[arg-type]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("dataset", "kind", "told"),
    [
        ({"x": 1} if RANK == SIZE - 1 else [np.arange(4)], errors.OptionTypeError, ""),
        ([np.arange(4)] * (RANK + 1), errors.CollectiveMismatchError, "1 global batches"),
        *[
            (ms.Dataset.from_arrays(np.arange(8), **settings), errors.CollectiveMismatchError, "shuffle_seed")
            for settings in (
                {"global_batch_size": 4, "shuffle_seed": 1 + RANK},
                {"global_batch_size": 1 + RANK},
                {"global_batch_size": 4, "epochs": 1 + RANK},
            )
        ],
    ],
)
def test_datasets_that_differ_between_the_ranks_are_refused_on_all(
    strategy: ms.MirroredStrategy, dataset: Any, kind: type[Exception], told: str
) -> None:
    all_raise(kind, strategy.experimental_distribute_dataset, dataset, words=[told])
