"""The rest of the matrix of variables: creation, scatter updates, contexts that are like others, and those that refuse.

(test_policies.py has the table of assign, assign_add, assign_sub and read.)

Before each cell of `SCATTER` every copy is [[1], [2], [3]] (ON_READ: plus 10 times the rank); then rank r brings rows 0
and 2, [[10], [20]] times r + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from replicas import BFLOAT16, RANK, RANKS, SIZE, outcomes, same_everywhere, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.context import Mode
from mpistrategy.variables.policies import POLICIES, share_of

pytestmark = pytest.mark.mpi

SHARED = [ms.VariableSynchronization.ON_WRITE, ms.VariableSynchronization.ON_READ]
AGGREGATIONS = [aggregation.name for aggregation in ms.VariableAggregation]
TOTAL = sum(rank + 1 for rank in RANKS)
DENSE = ("assign", "assign_add", "assign_sub")
SCATTERS = ("scatter_add", "scatter_sub", "scatter_update", "scatter_max")


@pytest.fixture(scope="module")
def other() -> Iterator[ms.MirroredStrategy]:
    made = ms.MirroredStrategy()
    yield made
    made.close()


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


def rows_of(table: str) -> Iterator[dict[str, str]]:
    lines = table.strip("\n").split("\n")
    names = lines[0].split()
    starts = [lines[0].index(name) for name in names]
    for line in lines[1:]:
        cells = [line[start:stop].strip() for start, stop in zip(starts, [*starts[1:], None], strict=True)]
        yield dict(zip(names, cells, strict=True))


# ------------------------------------------------------------------------------------------------- the table itself


def test_the_table_has_every_synchronization_aggregation_and_context() -> None:
    assert set(POLICIES) == set(product(SHARED, ms.VariableAggregation, Mode))


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
@pytest.mark.parametrize(
    "row", list(rows_of(CREATED)), ids=lambda row: f"{row['synchronization']}-{row['aggregation']}"
)
def test_creation(strategy: ms.Strategy, row: dict[str, str], dtype: str) -> None:
    def make() -> ms.Variable:
        return ms.Variable(np.asarray(3, dtype), synchronization=row["synchronization"], aggregation=row["aggregation"])

    for place, column in [(strategy, "several"), (ms.OneDeviceStrategy("CPU:0"), "alone")]:
        with place.scope():
            if column == "several" and row[dtype] == "alone only":
                with pytest.raises(errors.OptionError) as refusal:
                    make()
                assert isinstance(refusal.value, ValueError)
                continue
            variable = make()
        assert variable.synchronization.name == row[column]
        assert variable.aggregation.name == row["aggregation"]
        assert variable.trainable is (row["trainable"] == "yes")
        assert variable.local_copy() == 3
    assert still_works(strategy)


def test_a_mean_of_complex_numbers_is_refused_as_in_tensorflow(strategy: ms.Strategy) -> None:
    with strategy.scope(), pytest.raises(errors.OptionError, match="complex64"):
        ms.Variable(np.complex64(1), aggregation="MEAN")


@pytest.mark.parametrize("what", ["synchronization", "aggregation"])
def test_the_policy_of_a_variable_cannot_be_changed(strategy: ms.Strategy, what: str) -> None:
    with strategy.scope():
        variable = ms.Variable(1.0)
    before = getattr(variable, what)
    with pytest.raises(errors.UnsupportedError, match=what):
        setattr(variable, what, before)
    assert getattr(variable, what) is before


# ------------------------------------------------------------------------------------------------- scatter updates

# "sum" and the like: what the replicas bring is combined first; "own": each writes its own rows; "refused": ValueError;
# "no": NotImplementedError.
SCATTER = """
    synchronization  aggregation         context  scatter_add  scatter_sub  scatter_update  scatter_max
    ON_WRITE         NONE                step     refused      refused      refused         refused
    ON_WRITE         SUM                 step     sum          sum          no              no
    ON_WRITE         MEAN                step     mean         mean         no              no
    ON_WRITE         ONLY_FIRST_REPLICA  step     first        first        first           first
    ON_WRITE         NONE                cross    own          own          own             own
    ON_WRITE         SUM                 cross    own          own          no              no
    ON_WRITE         MEAN                cross    own          own          no              no
    ON_WRITE         ONLY_FIRST_REPLICA  cross    own          own          own             own
    ON_WRITE         NONE                update   own          own          own             own
    ON_WRITE         SUM                 update   own          own          own             own
    ON_WRITE         MEAN                update   own          own          own             own
    ON_WRITE         ONLY_FIRST_REPLICA  update   own          own          own             own
    ON_READ          NONE                step     no           no           no              no
    ON_READ          SUM                 step     no           no           no              no
    ON_READ          MEAN                step     no           no           no              no
    ON_READ          ONLY_FIRST_REPLICA  step     no           no           no              no
    ON_READ          NONE                cross    no           no           no              no
    ON_READ          SUM                 cross    no           no           no              no
    ON_READ          MEAN                cross    no           no           no              no
    ON_READ          ONLY_FIRST_REPLICA  cross    no           no           no              no
    ON_READ          NONE                update   no           no           no              no
    ON_READ          SUM                 update   no           no           no              no
    ON_READ          MEAN                update   no           no           no              no
    ON_READ          ONLY_FIRST_REPLICA  update   no           no           no              no
"""
FACTOR = {"sum": TOTAL, "mean": TOTAL / SIZE, "first": 1, "own": RANK + 1}
REFUSALS: dict[str, type[Exception]] = {"refused": ValueError, "no": NotImplementedError}
CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "scatter_add": lambda old, rows: old + rows,
    "scatter_sub": lambda old, rows: old - rows,
    "scatter_update": lambda old, rows: rows,
    "scatter_max": np.maximum,
}


@pytest.mark.parametrize("method", SCATTERS)
@pytest.mark.parametrize(
    "row",
    list(rows_of(SCATTER)),
    ids=lambda row: "-".join((row["synchronization"], row["aggregation"], row["context"])),
)
def test_scatter_updates(strategy: ms.Strategy, row: dict[str, str], method: str) -> None:
    with strategy.scope():
        variable = ms.Variable(
            np.array([[1.0], [2.0], [3.0]]), synchronization=row["synchronization"], aggregation=row["aggregation"]
        )
    if row["synchronization"] == "ON_READ":
        strategy.run(lambda: variable.assign_add(np.full((3, 1), 10.0 * RANK)))
    before = variable.local_copy()
    slices = ms.IndexedSlices(np.array([[10.0], [20.0]]) * (RANK + 1), np.array([0, 2]))

    def call() -> bool:
        return getattr(variable, method)(slices) is variable

    if row[method] in REFUSALS:
        with pytest.raises(REFUSALS[row[method]]) as refusal:
            inside(strategy, row["context"], variable, call)
        assert isinstance(refusal.value, errors.MpiStrategyError)
        assert f"Variable.{method} of {variable.name!r}" in str(refusal.value)
        right = before
    else:
        assert inside(strategy, row["context"], variable, call), "a write returns the variable"
        right = before.copy()
        right[[0, 2]] = CHANGES[method](before[[0, 2]], np.array([[10.0], [20.0]]) * FACTOR[row[method]])
    np.testing.assert_allclose(variable.local_copy(), right, rtol=1e-15)
    assert still_works(strategy)


@pytest.mark.parametrize("aggregation", ["SUM", "ONLY_FIRST_REPLICA"])
def test_ranks_may_bring_different_numbers_of_rows(strategy: ms.Strategy, aggregation: str) -> None:
    with strategy.scope():
        variable = ms.Variable(np.zeros((SIZE + 1, 2), np.float32), aggregation=aggregation)
    indices = np.arange(RANK, dtype=np.int32)  # rank 0 brings none
    strategy.run(lambda: variable.scatter_add(ms.IndexedSlices(np.ones((RANK, 2), np.float32), indices)))
    right = [sum(row < rank for rank in RANKS) if aggregation == "SUM" else 0 for row in range(SIZE + 1)]
    np.testing.assert_array_equal(variable.local_copy()[:, 0], right)
    assert same_everywhere(variable.local_copy())


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", BFLOAT16, "float64", "complex64"], ids=str)
def test_repeated_rows_all_count(strategy: ms.Strategy, dtype: Any) -> None:
    with strategy.scope():
        variable = ms.Variable(np.zeros(2, dtype), aggregation="SUM")
    strategy.run(lambda: variable.scatter_add(ms.IndexedSlices(np.ones(3, dtype), [1, 1, 1])))
    np.testing.assert_array_equal(variable.local_copy(), np.array([0, 3 * SIZE], dtype))


def test_the_rows_may_be_the_variables_own(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable([1.0, 2.0, 3.0])
        variable.scatter_update(ms.IndexedSlices(variable[:2], [1, 2]))
    assert variable.local_copy().tolist() == [1, 1, 2]


BAD_SLICES: dict[str, tuple[Any, type[Exception]]] = {
    "an array": (np.ones((1, 1)), TypeError),
    "None": (None, TypeError),
    "no such row": (ms.IndexedSlices(np.ones((1, 1)), [3]), ValueError),
    "a negative row": (ms.IndexedSlices(np.ones((1, 1)), [-1]), ValueError),
    "too few rows": (ms.IndexedSlices(np.ones((1, 1)), [0, 1]), ValueError),
    "rows of another shape": (ms.IndexedSlices(np.ones((1, 2)), [0]), ValueError),
    "indices of a float dtype": (ms.IndexedSlices(np.ones((1, 1)), [0.5]), TypeError),
    "indices of two axes": (ms.IndexedSlices(np.ones((1, 1, 1)), [[0]]), ValueError),
    "values of another dtype": (ms.IndexedSlices(np.ones((1, 1), np.float32), [0]), TypeError),
    "values that are text": (ms.IndexedSlices([["a"]], [0]), TypeError),
    "values None": (ms.IndexedSlices(None, [0]), ValueError),
}


@pytest.mark.parametrize("bad_rank", ["all", "last"])
@pytest.mark.parametrize("aggregation", ["SUM", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("what", BAD_SLICES)
def test_bad_slices_change_no_copy_anywhere(strategy: ms.Strategy, what: str, aggregation: str, bad_rank: str) -> None:
    bad, kind = BAD_SLICES[what]
    mine = bad if bad_rank == "all" or RANK == SIZE - 1 else ms.IndexedSlices(np.ones((1, 1)), [0])
    with strategy.scope():
        variable = ms.Variable(np.full((3, 1), 10.0), name="rows", aggregation=aggregation)
    for end in outcomes(lambda: strategy.run(lambda: variable.scatter_add(mine))):
        assert end.error is not None
        assert issubclass(end.error, errors.MpiStrategyError), end.text
        assert issubclass(end.error, kind), end.text
        assert "'rows'" in end.text
    np.testing.assert_array_equal(variable.local_copy(), np.full((3, 1), 10.0))
    assert still_works(strategy)


# ------------------------------------------------------------------------------------------------- contexts


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("like_cross", ["outside", "merge"])
def test_outside_and_in_merge_call_it_is_as_in_cross_replica_context(
    strategy: ms.Strategy, synchronization: str, aggregation: str, like_cross: str
) -> None:
    def ends(context: str) -> list[Any]:
        found = []
        for method in ("read_value", *DENSE, *SCATTERS):
            with strategy.scope():
                variable = ms.Variable([10.0, 20.0], synchronization=synchronization, aggregation=aggregation)
            value = ms.IndexedSlices([50.0], [1]) if method in SCATTERS else [4.0, 6.0]
            arguments = () if method == "read_value" else (value,)
            try:
                result = inside(
                    strategy,
                    context,
                    variable,
                    lambda variable=variable, method=method, arguments=arguments: np.array(
                        getattr(variable, method)(*arguments)
                    ),
                ).tolist()
            except errors.MpiStrategyError as error:
                result = type(error)
            found.append((method, result, variable.local_copy().tolist()))
        return found

    assert ends(like_cross) == ends("cross")


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("context", ["cross", "step", "merge"])
def test_another_strategys_context_refuses(
    strategy: ms.Strategy, other: ms.Strategy, context: str, synchronization: str
) -> None:
    with strategy.scope():
        variable = ms.Variable(10.0, synchronization=synchronization, aggregation="SUM")
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
    assert still_works(strategy)
    assert still_works(other)


def test_a_variable_of_one_rank_can_be_used_in_every_context(strategy: ms.Strategy) -> None:
    for context in ("cross", "step", "merge", "outside"):
        with ms.OneDeviceStrategy().scope():
            variable = ms.Variable(np.array([1.0, 2.0]), synchronization="ON_READ", aggregation="NONE")
        inside(strategy, context, variable, lambda variable=variable: variable.assign_add([float(RANK)] * 2))
        inside(
            strategy, context, variable, lambda variable=variable: variable.scatter_max(ms.IndexedSlices([50.0], [1]))
        )
        assert inside(strategy, context, variable, lambda variable=variable: (variable + 0).tolist()) == [1 + RANK, 50]


@pytest.mark.parametrize("method", DENSE)
@pytest.mark.parametrize("context", ["cross", "step", "update"])
def test_read_value_false_returns_none(strategy: ms.Strategy, context: str, method: str) -> None:
    with strategy.scope():
        variable = ms.Variable(10.0, aggregation="MEAN")
    assert inside(strategy, context, variable, lambda: getattr(variable, method)(1.0, read_value=False)) is None
    assert variable.local_copy() == {"assign": 1, "assign_add": 11, "assign_sub": 9}[method]


# ------------------------------------------------------------------------------------------------- refused by all ranks


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "bad", [np.ones(3), np.ones(2, np.float32), "text", None, ms.PerReplica((np.ones(2),))], ids=repr
)
def test_a_cross_replica_write_that_one_rank_cannot_make_is_nobodys(
    strategy: ms.Strategy, bad: Any, aggregation: str
) -> None:
    with strategy.scope():
        variable = ms.Variable([10.0, 20.0], name="total", synchronization="ON_READ", aggregation=aggregation)
        for method in DENSE:
            mine = bad if RANK == SIZE - 1 else np.ones(2)
            for end in outcomes(lambda method=method, mine=mine: getattr(variable, method)(mine)):
                assert end.error is not None, "a rank raised nothing"
                assert issubclass(end.error, errors.MpiStrategyError), end.text
            np.testing.assert_array_equal(variable.local_copy(), [10, 20])
    assert still_works(strategy)


@pytest.mark.parametrize("size", [1, 2, 100, 200])
@pytest.mark.parametrize("value", [-128, -1, 0, 1, 127])
def test_the_shares_of_a_small_integer_among_many(value: int, size: int) -> None:
    parts = [share_of(np.array(value, np.int8), rank, size) for rank in range(size)]
    assert {part.dtype for part in parts} == {np.dtype(np.int8)}
    assert sum(int(part) for part in parts) == value
