"""Variables by policy and context: creation, writes, scatter updates and reads, as tables; and what is refused.

Before each cell of `WRITTEN` every rank's copy is ``10 + rank`` (ON_READ) or 10 (ON_WRITE) in rows 0 and 2, and 50 more
in row 1; then rank r writes ``x = r + 1``, scatter updates to rows 0 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import (
    BFLOAT16,
    INTEGERS,
    RANK,
    RANKS,
    SIXTEEN_BITS,
    SIZE,
    all_refuse,
    new_variable,
    part_of,
    same_everywhere,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.variables.variable import share_of

pytestmark = pytest.mark.mpi

DENSE = ("assign", "assign_add", "assign_sub")
X = [float(rank + 1) for rank in RANKS]


def inside(strategy: ms.Strategy, context: str, variable: ms.Variable, call: Callable[[], Any]) -> Any:
    if context == "step":
        return strategy.run(call)
    if context == "merge":
        return strategy.run(lambda: ms.get_replica_context().merge_call(lambda _: call()))
    if context == "update":
        return strategy.extended.update(variable, lambda _: call())
    if context == "outside":
        return call()
    with strategy.scope():
        return call()


def rows_of(table: str) -> list[dict[str, str]]:
    lines = table.strip("\n").split("\n")
    names = lines[0].split()
    starts = [lines[0].index(name) for name in names]
    cells = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines[1:]]
    return [dict(zip(names, row, strict=True)) for row in cells]


def name_of(row: dict[str, str]) -> str:
    return "-".join((row["synchronization"], row["aggregation"], row.get("context", "")))


# ------------------------------------------------------------------------------------------------- creation

# What becomes of the synchronization, the default of trainable, and the dtypes, in a scope of several replicas and for
# one replica alone.
CREATED = """
    synchronization  aggregation         float32           int32             several   alone     trainable
    AUTO             NONE                yes               yes               ON_WRITE  AUTO      yes
    AUTO             SUM                 yes               yes               ON_WRITE  AUTO      yes
    AUTO             MEAN                yes               alone only        ON_WRITE  AUTO      yes
    AUTO             ONLY_FIRST_REPLICA  yes               yes               ON_WRITE  AUTO      yes
    NONE             NONE                alone only        alone only        -         NONE      yes
    NONE             SUM                 alone only        alone only        -         NONE      yes
    NONE             MEAN                alone only        alone only        -         NONE      yes
    NONE             ONLY_FIRST_REPLICA  alone only        alone only        -         NONE      yes
    ON_WRITE         NONE                yes               yes               ON_WRITE  ON_WRITE  yes
    ON_WRITE         SUM                 yes               yes               ON_WRITE  ON_WRITE  yes
    ON_WRITE         MEAN                yes               alone only        ON_WRITE  ON_WRITE  yes
    ON_WRITE         ONLY_FIRST_REPLICA  yes               yes               ON_WRITE  ON_WRITE  yes
    ON_READ          NONE                yes               yes               ON_READ   ON_READ   no
    ON_READ          SUM                 yes               yes               ON_READ   ON_READ   no
    ON_READ          MEAN                yes               alone only        ON_READ   ON_READ   no
    ON_READ          ONLY_FIRST_REPLICA  yes               yes               ON_READ   ON_READ   no
"""


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("row", rows_of(CREATED), ids=name_of)
def test_creation(strategy: ms.Strategy, row: dict[str, str], dtype: str) -> None:
    def make() -> ms.Variable:
        return ms.Variable(np.asarray(3, dtype), synchronization=row["synchronization"], aggregation=row["aggregation"])

    for place, column in [(strategy, "several"), (ms.OneDeviceStrategy("CPU:0"), "alone")]:
        with place.scope():
            if column == "several" and row[dtype] == "alone only":
                with pytest.raises(errors.OptionError, match=r"OneDeviceStrategy|MEAN"):
                    make()
                continue
            variable = make()
        assert variable.synchronization.name == row[column]
        assert variable.aggregation.name == row["aggregation"]
        assert variable.trainable is (row["trainable"] == "yes")
        assert variable.local_copy() == 3
        for what in ("synchronization", "aggregation"):
            with pytest.raises(errors.OptionError, match=what):
                setattr(variable, what, getattr(variable, what))


# ------------------------------------------------------------------------------------------------- writes and reads

# What becomes of the copy of rank r, given what it was.  "refused" and "no" are errors, and nothing changes.
WRITES: dict[str, Callable[[Any, int], Any]] = {
    "x": lambda old, r: X[r],
    "sum": lambda old, r: sum(X),
    "mean": lambda old, r: sum(X) / SIZE,
    "first": lambda old, r: X[0],
    "x / n": lambda old, r: X[r] / SIZE,
}
# What rank r reads, given all copies.
READS: dict[str, Callable[[list[float], int], float]] = {
    "own": lambda copies, r: copies[r],
    "sum": lambda copies, r: sum(copies),
    "mean": lambda copies, r: sum(copies) / SIZE,
    "first": lambda copies, r: copies[0],
}
#: "add" and "sub" of what stands there; "refused": AggregationError; "no": NotImplementedError.
WRITTEN = """
    synchronization  aggregation         context  assign   add      read     scatter  scatter_others
    ON_WRITE         NONE                step     refused  refused  own      refused  refused
    ON_WRITE         SUM                 step     sum      sum      own      sum      no
    ON_WRITE         MEAN                step     mean     mean     own      mean     no
    ON_WRITE         ONLY_FIRST_REPLICA  step     first    first    own      first    first
    ON_WRITE         NONE                cross    x        x        own      x        x
    ON_WRITE         SUM                 cross    x        x        own      x        no
    ON_WRITE         MEAN                cross    x        x        own      x        no
    ON_WRITE         ONLY_FIRST_REPLICA  cross    x        x        own      x        x
    ON_WRITE         NONE                update   x        x        own      x        x
    ON_WRITE         SUM                 update   x        x        own      x        x
    ON_WRITE         MEAN                update   x        x        own      x        x
    ON_WRITE         ONLY_FIRST_REPLICA  update   x        x        own      x        x
    ON_READ          NONE                step     x        x        own      no       no
    ON_READ          SUM                 step     x        x        own      no       no
    ON_READ          MEAN                step     x        x        own      no       no
    ON_READ          ONLY_FIRST_REPLICA  step     x        x        own      no       no
    ON_READ          NONE                cross    x        x        refused  no       no
    ON_READ          SUM                 cross    x / n    refused  sum      no       no
    ON_READ          MEAN                cross    x        x        mean     no       no
    ON_READ          ONLY_FIRST_REPLICA  cross    x        x        first    no       no
    ON_READ          NONE                update   x        x        own      no       no
    ON_READ          SUM                 update   x        x        own      no       no
    ON_READ          MEAN                update   x        x        own      no       no
    ON_READ          ONLY_FIRST_REPLICA  update   x        x        own      no       no
"""
ROWS = rows_of(WRITTEN)
#: Outside every scope and in merge_call it is as in cross-replica context; AUTO is ON_WRITE.
ROWS += [{**row, "context": like} for row in ROWS if row["context"] == "cross" for like in ("outside", "merge")]
ROWS += [{**row, "synchronization": "AUTO"} for row in ROWS[:2]]
COLUMN = {"assign": "assign", "assign_add": "add", "assign_sub": "add", "scatter_add": "scatter"}
COLUMN |= {"scatter_sub": "scatter", "scatter_update": "scatter_others", "scatter_max": "scatter_others"}
CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "max": np.maximum,
}
REFUSALS: dict[str, type[Exception]] = {"refused": errors.AggregationError, "no": NotImplementedError}


def variable_of(strategy: ms.Strategy, row: dict[str, str]) -> tuple[ms.Variable, list[float]]:
    variable = new_variable(
        strategy, np.zeros((3, 1)), synchronization=row["synchronization"], aggregation=row["aggregation"]
    )
    copies = [10.0 + rank if row["synchronization"] == "ON_READ" else 10.0 for rank in RANKS]
    strategy.extended.update(variable, lambda v: v.assign(np.array([[0.0], [50.0], [0.0]]) + copies[RANK]))
    return variable, copies


@pytest.mark.parametrize("method", COLUMN)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_writes(strategy: ms.Strategy, row: dict[str, str], method: str) -> None:
    variable, _ = variable_of(strategy, row)
    outcome, before, is_scatter = row[COLUMN[method]], variable.local_copy(), method.startswith("scatter")
    changed = [0, 2] if is_scatter else [0, 1, 2]
    mine: Any = np.full((len(changed), 1), X[RANK])
    if is_scatter:
        mine = ms.IndexedSlices(mine, np.array(changed))

    def call() -> bool:
        return getattr(variable, method)(mine) is variable

    right = before.copy()
    if outcome in REFUSALS:
        with pytest.raises(REFUSALS[outcome]) as refusal:
            inside(strategy, row["context"], variable, call)
        assert isinstance(refusal.value, errors.MpiStrategyError)
        assert f"Variable.{method} of {variable.name!r}" in str(refusal.value)
    else:
        assert inside(strategy, row["context"], variable, call), "a write returns the variable"
        change = CHANGES.get(method.rpartition("_")[2], lambda old, x: x)
        right[changed] = change(before[changed], WRITES[outcome](before, RANK))
        assert inside(strategy, "update", variable, lambda: variable.assign_add(right, read_value=False)) is None
        right += right
    # Rank 0 keeps the residue of a division.
    np.testing.assert_allclose(variable.local_copy(), right, rtol=1e-15)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_reads(strategy: ms.Strategy, row: dict[str, str]) -> None:
    variable, copies = variable_of(strategy, row)
    for read in (
        lambda: np.asarray(variable),
        lambda: variable.numpy(),
        lambda: variable.read_value(),
        lambda: variable + 0,
    ):
        if row["read"] == "refused":
            with pytest.raises(errors.AggregationError, match="aggregation"):
                inside(strategy, row["context"], variable, read)
        else:
            right = READS[row["read"]](copies, RANK)
            assert inside(strategy, row["context"], variable, read)[0, 0] == right
    assert variable.local_copy()[0, 0] == copies[RANK]


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("context", ["cross", "step", "merge"])
def test_another_strategys_context_refuses(
    strategy: ms.Strategy, other: ms.Strategy, context: str, synchronization: str
) -> None:
    variable = new_variable(strategy, 10.0, synchronization=synchronization, aggregation="SUM")
    uses: list[Callable[[], Any]] = [
        lambda: variable.read_value(),
        lambda: variable + 1,
        lambda: np.asarray(variable),
        lambda: float(variable),
        *(lambda method=method: getattr(variable, method)(1.0) for method in DENSE),
    ]
    for use in uses:
        with pytest.raises(errors.ContextError, match="another strategy"):
            inside(other, context, variable, use)
    assert variable.local_copy() == 10
    assert "10" in inside(other, context, variable, lambda: repr(variable)), "looking at it is always allowed"


def test_a_variable_of_one_rank_can_be_used_in_every_context(strategy: ms.Strategy) -> None:
    for context in ("cross", "step", "merge", "outside"):
        variable = new_variable(
            ms.OneDeviceStrategy(), np.array([1.0, 2.0]), synchronization="ON_READ", aggregation="NONE"
        )

        def use(variable: ms.Variable = variable) -> list[float]:
            assert variable.assign_add([float(RANK)] * 2) is variable
            variable.scatter_max(ms.IndexedSlices([50.0], [1]))
            return (variable + 0).tolist()

        assert inside(strategy, context, variable, use) == [1 + RANK, 50]


# ------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("aggregation", ["SUM", "ONLY_FIRST_REPLICA"])
def test_ranks_may_bring_different_numbers_of_rows(strategy: ms.Strategy, aggregation: str) -> None:
    variable = new_variable(strategy, np.zeros((SIZE + 1, 2), np.float32), aggregation=aggregation)
    indices = np.arange(RANK, dtype=np.int32)  # rank 0 brings none
    strategy.run(lambda: variable.scatter_add(ms.IndexedSlices(np.ones((RANK, 2), np.float32), indices)))
    right = [sum(row < rank for rank in RANKS) if aggregation == "SUM" else 0 for row in range(SIZE + 1)]
    np.testing.assert_array_equal(variable.local_copy()[:, 0], right)
    assert same_everywhere(variable.local_copy())


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", BFLOAT16, "float64", "complex64"], ids=str)
def test_repeated_rows_all_count_and_may_be_the_variables_own(strategy: ms.Strategy, dtype: Any) -> None:
    with strategy.scope():
        variable, own = ms.Variable(np.zeros(2, dtype), aggregation="SUM"), ms.Variable(np.array([1, 2, 3], dtype))
        own.scatter_update(ms.IndexedSlices(own[:2], [1, 2]))
    strategy.run(lambda: variable.scatter_add(ms.IndexedSlices(np.ones(3, dtype), [1, 1, 1])))
    np.testing.assert_array_equal(variable.local_copy(), np.array([0, 3 * SIZE], dtype))
    np.testing.assert_array_equal(own.local_copy(), np.array([1, 1, 2], dtype))


# ------------------------------------------------------------------------------------------------- keeping totals

EXTREMES = [np.inf, -np.inf, np.nan, 1.7e308, 5e-324, -0.0]


@settings(max_examples=part_of(90))
@given(
    dtype=st.sampled_from([*INTEGERS, "float16", BFLOAT16, "float32", "float64", "longdouble", "complex128"]),
    seed=st.integers(0, 99),
)
def test_a_total_is_kept(strategy: ms.Strategy, dtype: Any, seed: int) -> None:
    """Of integers exactly, of floats within one unit in the last place, or what their 16 bits allow."""
    dtype, random = np.dtype(dtype), np.random.default_rng(seed)
    if dtype.kind in "iu":
        total = random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 5, dtype, endpoint=True)
    elif dtype in SIXTEEN_BITS:
        total = np.array([0.1, 1.0, -3.0, 7.5, 1000.0, 6e4 - 32 * seed]).astype(dtype)
    else:
        total = (random.standard_normal(5) * 10.0 ** random.integers(-30, 30, 5)).astype(dtype)
    with strategy.scope():
        variable = ms.Variable(np.zeros_like(total), synchronization="ON_READ", aggregation="SUM")
        variable.assign(total)
        read = variable.numpy()
    assert read.dtype == dtype
    assert same_everywhere(read)
    if dtype.kind in "iu":
        np.testing.assert_array_equal(read, total)
    elif dtype in SIXTEEN_BITS:
        np.testing.assert_allclose(
            read.astype(float), total.astype(float), rtol=2.0 ** (-7 if dtype == BFLOAT16 else -10)
        )
    else:
        assert (np.abs(read - total) <= np.abs(np.spacing(np.abs(total)))).all()


@pytest.mark.parametrize("special", EXTREMES)
def test_an_extreme_total_is_kept(strategy: ms.Strategy, special: float) -> None:
    with strategy.scope():
        variable = ms.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        variable.assign(special)
        np.testing.assert_array_equal(variable.numpy(), special)


@given(total=st.integers(-128, 127), size=st.integers(1, 300))
def test_the_shares_of_many_ranks_add_up(total: int, size: int) -> None:
    parts = [share_of(np.array(total, np.int8), rank, size) for rank in range(size)]
    assert {part.dtype for part in parts} == {np.dtype(np.int8)}
    assert np.add.reduce(np.array(parts)).astype(np.int8) == total
    assert len({*map(int, parts[1:])}) <= 1


# ------------------------------------------------------------------------------------------------- one bad rank


def slices(values: Any, indices: Any) -> ms.IndexedSlices:
    return ms.IndexedSlices(values, indices)


ONE = np.ones((1, 1), np.float32)
BAD: dict[str, tuple[Any, type[Exception]]] = {
    "shape": (np.ones((4, 1), np.float32), ValueError),
    "dtype": (np.ones((3, 1), np.complex128), TypeError),
    "float64 for float32": (np.ones((3, 1)), TypeError),
    "None": (None, ValueError),
    "text": ("text", TypeError),
    "objects": (np.array([[None], [1], [2]]), ValueError),
    "masked": (np.ma.masked_array([[1.0], [2.0], [0.0]], [[True], [False], [False]]), ValueError),
    "slices": (slices(ONE, np.array([0])), NotImplementedError),
    "rows: an array": (ONE, TypeError),
    "rows: None": (None, TypeError),
    "rows: no such row": (slices(ONE, [3]), ValueError),
    "rows: a negative row": (slices(ONE, [-1]), ValueError),
    "rows: too few": (slices(ONE, [0, 1]), ValueError),
    "rows: another shape": (slices(np.ones((1, 2), np.float32), [0]), ValueError),
    "rows: float indices": (slices(ONE, [0.5]), TypeError),
    "rows: indices of two axes": (slices(np.ones((1, 1, 1), np.float32), [[0]]), ValueError),
    "rows: another dtype": (slices(np.ones((1, 1)), [0]), TypeError),
    "rows: text": (slices([["a"]], [0]), TypeError),
    "rows: values None": (slices(None, [0]), ValueError),
}
#: Policies and contexts of writes that the ranks make together, and of those that each rank makes for itself.
TOGETHER = ["ON_WRITE SUM step", "ON_WRITE MEAN step", "ON_WRITE ONLY_FIRST_REPLICA step", "ON_READ MEAN cross"]
APART = ["ON_WRITE MEAN cross", "ON_WRITE MEAN update", "ON_READ MEAN update"]


@pytest.mark.parametrize("bad_rank", ["all", "last"])
@pytest.mark.parametrize("policy", [*TOGETHER, *APART])
@pytest.mark.parametrize("what", BAD)
def test_a_value_that_does_not_fit_changes_no_copy_anywhere(
    strategy: ms.Strategy, what: str, policy: str, bad_rank: str
) -> None:
    (value, kind), (synchronization, aggregation, context) = BAD[what], policy.split()
    is_rows = what.startswith("rows")
    if (is_rows and synchronization == "ON_READ") or (policy in APART and bad_rank == "last"):
        pytest.skip("no such write, or each rank's own")
    mine: Any = slices(ONE, [0]) if is_rows else np.ones((3, 1), np.float32)
    if bad_rank == "all" or RANK == SIZE - 1:
        mine = value
    variable = new_variable(
        strategy, np.full((3, 1), 10, np.float32), name="rows", synchronization=synchronization, aggregation=aggregation
    )
    for method in ("scatter_add", "scatter_sub") if is_rows else DENSE:
        write = getattr(variable, method)
        all_refuse(kind, inside, strategy, context, variable, lambda w=write: w(mine), words=["'rows'"])
        np.testing.assert_array_equal(variable.local_copy(), np.full((3, 1), 10))
