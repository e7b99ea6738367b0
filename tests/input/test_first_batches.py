"""The first global batches are compared on all ranks: what differs is found, and what it costs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicas import DTYPES, RANK, SIZE, all_raise, outcomes, several

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.input.first_batches import MOST_BYTES
from mpistrategy.objects.shown import ranks_in_words

pytestmark = pytest.mark.mpi

LAST = SIZE - 1
ODD = RANK == LAST  # the rank that has something else than the others


def taken(strategy: ms.Strategy, dataset: Any, **options: Any) -> tuple[list[Any], list[str]]:
    """Return this rank's parts, and what it was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = list(strategy.experimental_distribute_dataset(dataset, **options))
    assert {warning.category for warning in caught} <= {errors.DatasetWarning}
    return parts, [str(warning.message) for warning in caught]


def check_warned(strategy: ms.Strategy, dataset: Any, differ: bool = True) -> None:
    parts, told = taken(strategy, dataset)
    assert len(parts) == len(dataset)
    assert len(told) == (differ and RANK == 0)
    for text in told:
        assert "distribute_datasets_from_function" in text
        assert f"rank {LAST} differs from {ranks_in_words(range(LAST))}" in text


# ------------------------------------------------------------------------------------------- other rows


@several
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_other_rows_warn_on_rank_0_and_name_the_ranks(strategy: ms.MirroredStrategy, rows: int) -> None:
    batches = [np.arange(rows) + 100 * number for number in range(3)]
    check_warned(strategy, batches, differ=False)
    check_warned(strategy, [batch + ODD for batch in batches])
    check_warned(strategy, [batches[0], batches[1] + ODD, batches[2]], differ=False)  # only the first is
    for seed in (None, 3):
        check_warned(strategy, ms.Dataset.from_arrays(batches[0], 4, shuffle_seed=seed), differ=False)
        check_warned(strategy, ms.Dataset.from_arrays(batches[0] + ODD, 4, shuffle_seed=seed))


@several
def test_other_rows_raise_on_every_rank_where_that_is_asked_for(strategy: ms.MirroredStrategy) -> None:
    all_raise(
        errors.CollectiveMismatchError,
        lambda: taken(strategy, [np.arange(4.0) + ODD], check_batches="raise"),
        words=[f"rank {LAST}", "distribute_datasets_from_function"],
    )
    assert taken(strategy, [np.arange(4.0)], check_batches="raise")[1] == []


@several
def test_a_warning_that_is_an_error_is_raised_on_every_rank(strategy: ms.MirroredStrategy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.DatasetWarning)
        found = outcomes(lambda: list(strategy.experimental_distribute_dataset([np.arange(4.0) + ODD])))
    assert [outcome.error for outcome in found] == [errors.DatasetWarning, *[errors.RemoteError] * LAST]


@several
def test_nothing_is_compared_when_it_is_off(strategy: ms.MirroredStrategy) -> None:
    distributed = strategy.experimental_distribute_dataset([np.zeros((RANK + 1, 2))], check_batches="off")
    if RANK == 0:  # one rank alone may iterate
        assert len(list(distributed)) == 1


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=2),
    st.integers(1, 5),
    st.integers(0, 2**20),
    st.booleans(),
)
def test_the_same_bits_are_the_same_rows(
    strategy: ms.MirroredStrategy, dtype: Any, inner: list[int], rows: int, seed: int, differ: bool
) -> None:
    random = np.random.default_rng(seed)
    batch = random.integers(0, 100, (rows, *inner)).astype(dtype)
    if differ and batch.size:
        batch.reshape(-1)[random.integers(batch.size)] += int(ODD)
    layouts = [batch, np.asfortranarray(batch), np.repeat(batch, 2, axis=0)[::2]]
    _, told = taken(strategy, [{"x": layouts[RANK % 3], "y": [np.arange(rows)]}])  # the same values in other memory
    assert len(told) == (differ and batch.size > 0 and RANK == 0 and SIZE > 1)


@several
@pytest.mark.parametrize("make", [np.array, lambda a: a.astype("U4"), lambda a: a.astype("M8[s]"), np.ma.array, "GPU"])
def test_what_else_rows_may_be(strategy: ms.MirroredStrategy, make: Any, cupy: ModuleType) -> None:
    make = cupy.asarray if make == "GPU" else make
    check_warned(strategy, [make(np.arange(4))], differ=False)
    check_warned(strategy, [make(np.arange(4) + ODD)], differ=make is not np.ma.array)  # which is left out
    objects = np.array([RANK, "text", None, {}], object)
    assert taken(strategy, [objects])[1] == []
    check_warned(strategy, [{"objects": objects, "numbers": np.arange(4) + ODD}])


# ------------------------------------------------------------------------------------------- another layout

OTHERS: dict[str, tuple[Any, Any, str]] = {
    "rows": ([np.zeros(4)], [np.zeros(5)], "float64[5]"),
    "dtype": ([np.zeros(4)], [np.zeros(4, np.float32)], "float32[4]"),
    "structure": ([{"x": np.zeros(4)}], [[np.zeros(4)]], "[*]"),
    "one of two arrays": (
        [{"x": np.zeros(4), "y": np.zeros(4)}],
        [{"x": np.zeros(4), "y": np.zeros((4, 1))}],
        "float64[4, 1]",
    ),
    "no batch": ([np.zeros(4)], [], "no batch at all"),
    "objects": ([np.zeros(4)], [np.array([None] * 4)], "object"),
}


@several
@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("level", ["warn", "raise"])
def test_another_layout_raises_on_every_rank(strategy: ms.MirroredStrategy, what: str, level: str) -> None:
    usual, other, words = OTHERS[what]
    source = iter(other if ODD else usual)
    with pytest.raises(errors.CollectiveMismatchError, match=re.escape(words)) as refusal:
        taken(strategy, source, check_batches=level)
    assert f"rank {LAST}: " in str(refusal.value)
    assert "distribute_datasets_from_function" in " ".join(refusal.value.__notes__)


@several
def test_another_number_of_batches_raises_where_it_is_known(strategy: ms.MirroredStrategy) -> None:
    batches = dict.fromkeys(range(2 + ODD), np.zeros(4)).values()  # no sequence: of it only the length is known
    all_raise(
        errors.CollectiveMismatchError, lambda: taken(strategy, batches), words=["3 global batches", "2 global batches"]
    )


def test_no_batches_on_any_rank(strategy: ms.MirroredStrategy) -> None:
    assert taken(strategy, iter([])) == taken(strategy, set()) == ([], [])


@several
@pytest.mark.parametrize(
    ("batches", "kind", "others", "words"),
    [
        (map(int, ["no number"] if ODD else []), Exception, errors.RemoteError, "no number"),
        (type("", (), {"__iter__": lambda _: iter([*map(int, "x" * ODD)])})(), Exception, errors.RemoteError, "'x'"),
        (iter([(np.zeros(2), np.zeros(2 + ODD))]), errors.BatchError, errors.BatchError, "(2,), (3,)"),
    ],
)
def test_a_loader_that_fails_on_one_rank_fails_on_all(
    strategy: ms.MirroredStrategy, batches: Any, kind: type[Exception], others: type[Exception], words: str
) -> None:
    ended = outcomes(lambda: taken(strategy, batches))
    assert [outcome.error for outcome in ended] == [*[others] * LAST, kind], ended
    assert all(words in outcome.text for outcome in ended)


@several
def test_two_datasets_in_another_order(strategy: ms.MirroredStrategy) -> None:
    both = [strategy.experimental_distribute_dataset([np.zeros(4)]) for _ in range(2)]
    all_raise(errors.CollectiveMismatchError, lambda: next(iter(both[ODD])), words=["dataset "])


@several
def test_levels_are_known_and_equal_on_all_ranks(strategy: ms.MirroredStrategy) -> None:
    for level in ("warning", "", None, 1, True, [], "off" if ODD else "warn"):
        kind = errors.CollectiveMismatchError if level in ("off", "warn") else errors.OptionError
        for outcome in outcomes(
            lambda level=level: strategy.experimental_distribute_dataset([np.zeros(2)], check_batches=level)
        ):
            assert outcome.error is kind, outcome.text
    check_warned(strategy, [np.arange(4)], differ=False)  # the ranks count their datasets alike


# ------------------------------------------------------------------------------------------- when, and how much


@several
def test_an_order_that_differs_from_the_second_epoch_on(strategy: ms.MirroredStrategy) -> None:
    class Shuffled:
        epoch = 0

        def __iter__(self) -> Iterator[Any]:
            self.epoch += 1
            yield np.arange(8) if self.epoch == 1 else np.random.default_rng([self.epoch, ODD]).permutation(8)

    distributed = strategy.experimental_distribute_dataset(Shuffled())
    assert len(list(distributed)) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(distributed)) == 1
    assert len(caught) == (RANK == 0)


class Counted:
    """An array that reads when it is sliced."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.shape, self.read = array, array.shape, 0

    def __getitem__(self, rows: Any) -> Any:
        found = self.array[rows]
        self.read += found.nbytes
        return found


@several
@pytest.mark.parametrize("row_bytes", [8, 4096, 2 * MOST_BYTES])
def test_of_large_batches_the_first_rows_are_compared_and_read(strategy: ms.MirroredStrategy, row_bytes: int) -> None:
    rows = max(8, 4 * MOST_BYTES // row_bytes)
    compared = max(1, MOST_BYTES // row_bytes)
    for row, differ in ((0, True), (compared - 1, True), (compared, False)):
        array = np.zeros((rows, row_bytes // 8))
        array[row, -1] = ODD
        source = Counted(array)
        parts, told = taken(strategy, [source])
        assert len(told) == (differ and RANK == 0)
        assert source.read <= parts[0].nbytes + compared * row_bytes + row_bytes
