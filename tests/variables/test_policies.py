"""What a write and a read of a variable do: the whole behaviour in one table, policy by context.

Before each cell every rank's copy is made ``10 + rank`` (ON_READ) or 10 (ON_WRITE); then rank r writes ``x = r + 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import BFLOAT16, INTEGERS, RANK, RANKS, SIZE, outcomes, part_of, same_everywhere, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.variables.policies import share_of

pytestmark = pytest.mark.mpi

X = [float(rank + 1) for rank in RANKS]
SUM, MEAN, FIRST = sum(X), sum(X) / SIZE, X[0]

# What becomes of the copy of rank r, given what it was.  "refused" is an error, and nothing changes.
WRITES: dict[str, Callable[[float, int], float]] = {
    "x": lambda old, r: X[r],
    "old + x": lambda old, r: old + X[r],
    "old - x": lambda old, r: old - X[r],
    "sum": lambda old, r: SUM,
    "old + sum": lambda old, r: old + SUM,
    "old - sum": lambda old, r: old - SUM,
    "mean": lambda old, r: MEAN,
    "old + mean": lambda old, r: old + MEAN,
    "old - mean": lambda old, r: old - MEAN,
    "first": lambda old, r: FIRST,
    "old + first": lambda old, r: old + FIRST,
    "old - first": lambda old, r: old - FIRST,
    "x / n": lambda old, r: X[r] / SIZE,
}
# What rank r reads, given all copies.
READS: dict[str, Callable[[list[float], int], float]] = {
    "own": lambda copies, r: copies[r],
    "sum": lambda copies, r: sum(copies),
    "mean": lambda copies, r: sum(copies) / SIZE,
    "first": lambda copies, r: copies[0],
}
TABLE = """
    synchronization  aggregation         context  assign   assign_add   assign_sub   read
    ON_WRITE         NONE                step     refused  refused      refused      own
    ON_WRITE         SUM                 step     sum      old + sum    old - sum    own
    ON_WRITE         MEAN                step     mean     old + mean   old - mean   own
    ON_WRITE         ONLY_FIRST_REPLICA  step     first    old + first  old - first  own
    ON_WRITE         NONE                cross    x        old + x      old - x      own
    ON_WRITE         SUM                 cross    x        old + x      old - x      own
    ON_WRITE         MEAN                cross    x        old + x      old - x      own
    ON_WRITE         ONLY_FIRST_REPLICA  cross    x        old + x      old - x      own
    ON_WRITE         NONE                update   x        old + x      old - x      own
    ON_WRITE         SUM                 update   x        old + x      old - x      own
    ON_WRITE         MEAN                update   x        old + x      old - x      own
    ON_WRITE         ONLY_FIRST_REPLICA  update   x        old + x      old - x      own
    AUTO             SUM                 step     sum      old + sum    old - sum    own
    ON_READ          NONE                step     x        old + x      old - x      own
    ON_READ          SUM                 step     x        old + x      old - x      own
    ON_READ          MEAN                step     x        old + x      old - x      own
    ON_READ          ONLY_FIRST_REPLICA  step     x        old + x      old - x      own
    ON_READ          NONE                cross    x        old + x      old - x      refused
    ON_READ          SUM                 cross    x / n    refused      refused      sum
    ON_READ          MEAN                cross    x        old + x      old - x      mean
    ON_READ          ONLY_FIRST_REPLICA  cross    x        old + x      old - x      first
    ON_READ          NONE                update   x        old + x      old - x      own
    ON_READ          SUM                 update   x        old + x      old - x      own
    ON_READ          MEAN                update   x        old + x      old - x      own
    ON_READ          ONLY_FIRST_REPLICA  update   x        old + x      old - x      own
"""


def rows() -> Iterator[dict[str, str]]:
    lines = TABLE.strip("\n").split("\n")
    names = lines[0].split()
    starts = [lines[0].index(name) for name in names]
    for line in lines[1:]:
        cells = [line[start:stop].strip() for start, stop in zip(starts, [*starts[1:], None], strict=True)]
        yield dict(zip(names, cells, strict=True))


def name_of(row: dict[str, str]) -> str:
    return "-".join((row["synchronization"], row["aggregation"], row["context"]))


def inside(strategy: ms.Strategy, context: str, variable: ms.Variable, call: Callable[[], Any]) -> Any:
    if context == "step":
        return strategy.run(call)
    if context == "update":
        return strategy.extended.update(variable, lambda given: call())
    with strategy.scope():
        return call()


def variable_of(strategy: ms.Strategy, row: dict[str, str]) -> tuple[ms.Variable, list[float]]:
    with strategy.scope():
        variable = ms.Variable(10.0, synchronization=row["synchronization"], aggregation=row["aggregation"])
    copies = [10.0 + rank if row["synchronization"] == "ON_READ" else 10.0 for rank in RANKS]
    strategy.extended.update(variable, lambda v: v.assign(copies[RANK]))
    return variable, copies


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("row", list(rows()), ids=name_of)
def test_writes(strategy: ms.Strategy, row: dict[str, str], method: str) -> None:
    variable, copies = variable_of(strategy, row)
    outcome = row[method]

    def call() -> bool:
        return getattr(variable, method)(X[RANK]) is variable

    if outcome == "refused":
        with pytest.raises(errors.AggregationError, match="aggregation") as refusal:
            inside(strategy, row["context"], variable, call)
        assert isinstance(refusal.value, ValueError)
        assert repr(variable.name) in str(refusal.value)
        assert f"Variable.{method}" in str(refusal.value)
        right = copies[RANK]
    else:
        assert inside(strategy, row["context"], variable, call), "a write returns the variable"
        right = WRITES[outcome](copies[RANK], RANK)
    # Rank 0 keeps the residue of a division.
    np.testing.assert_allclose(variable.local_copy(), right, rtol=1e-15)
    assert still_works(strategy)


@pytest.mark.parametrize("row", list(rows()), ids=name_of)
def test_reads(strategy: ms.Strategy, row: dict[str, str]) -> None:
    variable, copies = variable_of(strategy, row)
    if row["read"] == "refused":
        with pytest.raises(errors.AggregationError, match="aggregation") as refusal:
            inside(strategy, row["context"], variable, lambda: float(variable))
        assert isinstance(refusal.value, ValueError)
    else:
        right = READS[row["read"]](copies, RANK)
        for read in (
            lambda: float(variable),
            lambda: float(variable.numpy()),
            lambda: float(variable.read_value()),
            lambda: float(np.asarray(variable)),
            lambda: float(variable + 0),
        ):
            assert inside(strategy, row["context"], variable, read) == right
    assert float(variable.local_copy()) == copies[RANK]
    assert still_works(strategy)


@pytest.mark.parametrize("synchronization", ["AUTO", "NONE", "ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_a_variable_of_one_device_is_just_an_array(synchronization: str, aggregation: str) -> None:
    strategy = ms.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        variable = ms.Variable(10.0, synchronization=synchronization, aggregation=aggregation)
    for context in ("step", "cross", "update"):
        inside(strategy, context, variable, lambda: variable.assign(X[RANK]))
        inside(strategy, context, variable, lambda: variable.assign_add(1))
        inside(strategy, context, variable, lambda: variable.assign_sub(2))
        assert inside(strategy, context, variable, lambda: float(variable)) == X[RANK] - 1


def test_synchronization_none_is_refused_in_the_scope_of_several(strategy: ms.Strategy) -> None:
    with strategy.scope(), pytest.raises(errors.OptionError, match="OneDeviceStrategy"):
        ms.Variable(1.0, synchronization="NONE")


# ------------------------------------------------------------------------------------------------- keeping totals


@settings(max_examples=part_of(40))
@given(dtype=st.sampled_from(INTEGERS), data=st.data())
def test_an_integer_total_is_kept_exactly(strategy: ms.Strategy, dtype: str, data: st.DataObject) -> None:
    limits = np.iinfo(dtype)
    values = data.draw(st.lists(st.integers(int(limits.min), int(limits.max)), min_size=1, max_size=5))
    total = np.array(values, dtype)
    with strategy.scope():
        variable = ms.Variable(np.zeros_like(total), synchronization="ON_READ", aggregation="SUM")
        variable.assign(total)
        assert variable.numpy().tolist() == total.tolist()
        assert variable.dtype == np.dtype(dtype)


@given(
    total=st.integers(-(2**31), 2**31 - 1),
    size=st.integers(1, 9),
)
def test_whole_units_go_to_the_first_ranks(total: int, size: int) -> None:
    parts = [int(share_of(np.array(total), rank, size)) for rank in range(size)]
    assert sum(parts) == total
    assert parts == sorted(parts, reverse=True)
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble", "complex128"])
@settings(max_examples=part_of(30))
@given(data=st.data())
def test_a_floating_total_is_kept_within_one_ulp(strategy: ms.Strategy, dtype: str, data: st.DataObject) -> None:
    width = 32 if dtype == "float32" else 64
    finite = st.floats(allow_nan=False, allow_infinity=False, width=width, min_value=-(2.0**100), max_value=2.0**100)
    total = np.array(data.draw(st.lists(finite, min_size=1, max_size=5)), dtype)
    with strategy.scope():
        variable = ms.Variable(np.zeros_like(total), synchronization="ON_READ", aggregation="SUM")
        variable.assign(total)
        read = variable.numpy()
    assert (np.abs(read - total) <= np.abs(np.spacing(np.abs(total)))).all()
    assert same_everywhere(read)


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
def test_a_total_in_16_bits(strategy: ms.Strategy, dtype: Any) -> None:
    total = np.array([0.1, 1.0, -3.0, 7.5, 1000.0, 6e4], dtype)
    with strategy.scope():
        variable = ms.Variable(np.zeros_like(total), synchronization="ON_READ", aggregation="SUM")
        variable.assign(total)
        read = variable.numpy().astype(np.float32)
    np.testing.assert_allclose(read, total.astype(np.float32), rtol=2.0**-10 if dtype == "float16" else 2.0**-7)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 1.7e308, 5e-324, -0.0])
def test_an_extreme_total_is_kept(strategy: ms.Strategy, special: float) -> None:
    with strategy.scope():
        variable = ms.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        variable.assign(special)
        np.testing.assert_array_equal(variable.numpy(), special)


# ------------------------------------------------------------------------------------------------- one bad rank

BAD: dict[str, tuple[Any, type[Exception]]] = {
    "shape": (np.ones(3, np.float32), ValueError),
    "dtype": (np.ones(2, np.complex128), TypeError),
    "float64 for float32": (np.ones(2, np.float64), TypeError),
    "None": (None, ValueError),
    "text": ("text", TypeError),
    "objects": (np.array([None, 1]), ValueError),
    "masked": (np.ma.masked_array([1.0, 2.0], [True, False]), ValueError),
    "slices": (ms.IndexedSlices(np.ones((1, 2)), np.array([0])), NotImplementedError),
}


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("bad_rank", ["all", "last"])
def test_a_value_that_does_not_fit_changes_no_copy_anywhere(
    strategy: ms.Strategy, what: str, aggregation: str, bad_rank: str
) -> None:
    value, kind = BAD[what]
    bad = bad_rank == "all" or RANK == SIZE - 1
    with strategy.scope():
        variable = ms.Variable(np.full(2, 10, np.float32), name="weights", aggregation=aggregation)
    for method in ("assign", "assign_add", "assign_sub"):
        write = getattr(variable, method)
        ends = outcomes(lambda write=write: strategy.run(write, args=(value if bad else np.ones(2, np.float32),)))
        for rank, end in enumerate(ends):
            assert end.error is not None, f"rank {rank} raised nothing"
            assert issubclass(end.error, errors.MpiStrategyError), end.text
            assert issubclass(end.error, kind), end.text
            assert "'weights'" in end.text
        np.testing.assert_array_equal(variable.local_copy(), [10, 10])
    assert still_works(strategy)


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("context", ["cross", "update"])
@pytest.mark.parametrize("what", BAD)
def test_a_refused_local_write_changes_nothing(
    strategy: ms.Strategy, what: str, context: str, synchronization: str
) -> None:
    value, kind = BAD[what]
    with strategy.scope():
        variable = ms.Variable(np.full(2, 10, np.float32), synchronization=synchronization, aggregation="MEAN")
    for method in ("assign", "assign_add", "assign_sub"):
        with pytest.raises(kind) as refusal:
            inside(strategy, context, variable, lambda method=method: getattr(variable, method)(value))
        assert isinstance(refusal.value, errors.MpiStrategyError)
    np.testing.assert_array_equal(variable.local_copy(), [10, 10])
