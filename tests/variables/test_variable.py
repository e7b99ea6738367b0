"""Variables: how they begin, how they convert what is assigned, and that they act as arrays that keep their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from replicas import BFLOAT16, DTYPES, RANK, RANKS, SIZE, new_variable, outcomes, same_everywhere

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi


@pytest.fixture
def matrix(strategy: ms.Strategy) -> ms.Variable:
    return new_variable(strategy, [[1.0, 2.0], [3.0, 4.0]], aggregation="SUM", name="matrix")


# ------------------------------------------------------------------------------------------------- beginning


@pytest.mark.skipif(SIZE == 1, reason="one replica has no copies that could differ")
def test_what_differs_by_replica_is_not_written_to_copies_that_stay_equal(strategy: ms.Strategy) -> None:
    v = new_variable(strategy, np.zeros((3, 2)), aggregation="SUM")
    own = new_variable(strategy, np.zeros((3, 2)), aggregation="MEAN", synchronization="ON_READ")
    mine = ms.PerReplica((np.full((3, 2), RANK + 1.0),))
    slices = ms.IndexedSlices(ms.PerReplica((np.full((1, 2), RANK + 1.0),)), np.array([0]), (3, 2))
    update = strategy.extended.update
    with strategy.scope():
        calls: list[Any] = [
            *(lambda method=method: getattr(v, method)(mine) for method in ("assign", "assign_add", "assign_sub")),
            lambda: v.assign([[ms.PerReplica((RANK,)), 0]] * 3),
            lambda: v.scatter_add(slices),
            lambda: update(v, lambda v, x: v.assign(x), args=(mine,)),
            lambda: update(v, lambda v, x: v.assign(x["a"][0]), kwargs={"x": {"a": [mine]}}, group=False),
            lambda: update(v, lambda v: v.assign(mine)),
            lambda: update(v, lambda v: v.assign(own)),  # which is read as this replica's copy there
            lambda: strategy.run(lambda: update(v, lambda v, x: v.assign(x), args=(mine,))),
            lambda: ms.Variable(mine),
            lambda: ms.Variable(lambda: mine, synchronization="ON_READ"),
        ]
        for number, call in enumerate(calls):
            with pytest.raises(errors.OptionTypeError, match=r"strategy\.reduce.*ON_READ"):
                call()
            assert not v.numpy().any(), number
        # What the replicas combine, and what each may have for itself, is taken.
        strategy.run(lambda: v.assign(mine))
        assert (v.numpy() == sum(rank + 1.0 for rank in RANKS)).all()
        update(own, lambda own, x: own.assign(x), args=(mine,))
        v.assign(own)
        assert (v.numpy() == sum(rank + 1.0 for rank in RANKS) / SIZE).all()


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(bool)], ids=str)
def test_every_copy_begins_with_the_value_of_rank_0(
    strategy: ms.Strategy, synchronization: str, aggregation: str, dtype: Any
) -> None:
    mine = np.full((2, 3), RANK % 2, dtype)
    variable = new_variable(strategy, mine, synchronization=synchronization, aggregation=aggregation)
    assert variable.dtype == dtype
    np.testing.assert_array_equal(variable.local_copy(), np.zeros((2, 3), dtype))
    np.testing.assert_array_equal(mine, np.full((2, 3), RANK % 2, dtype))  # the argument is not the storage


@pytest.mark.parametrize(
    ("given", "shape", "dtype"),
    [
        (3, (), "int64"),
        (3.0, (), "float64"),
        (True, (), "bool"),
        ([1, 2], (2,), "int64"),
        ([[1.0], [2.0]], (2, 1), "float64"),
        (np.float32(1), (), "float32"),
        (np.zeros((0, 3)), (0, 3), "float64"),
        (np.asfortranarray(np.ones((2, 3))), (2, 3), "float64"),
        (np.ones(6)[::-2], (3,), "float64"),
        (np.ones(2, ">f4"), (2,), "float32"),
        (lambda: np.ones(2), (2,), "float64"),
        (ms.Mirrored((np.ones(2),)), (2,), "float64"),
    ],
)
def test_what_a_variable_can_begin_with(strategy: ms.Strategy, given: Any, shape: tuple[int, ...], dtype: str) -> None:
    variable = new_variable(strategy, given)
    again = new_variable(strategy, variable)
    for v in (variable, again):
        assert (v.shape, v.dtype) == (shape, np.dtype(dtype))
        assert v.numpy().flags.c_contiguous
    assert not np.shares_memory(variable.numpy(), again.numpy())


@pytest.mark.parametrize("dtype", [*DTYPES, "float32", float, np.float32], ids=str)
def test_dtype_converts_a_number(strategy: ms.Strategy, dtype: Any) -> None:
    with strategy.scope():
        variable = ms.Variable(3, dtype=dtype)
        assert variable.dtype == np.dtype(dtype)
        assert variable.numpy() == 3
        variable.assign(4)
        assert variable.numpy() == 4


@pytest.mark.mpi(min_size=2)
def test_an_initial_value_that_fails_on_one_rank_fails_on_all(strategy: ms.Strategy) -> None:
    def initial() -> Any:
        total = strategy.reduce("SUM", 1.0)  # it may communicate, too
        if RANK == SIZE - 1:
            raise KeyError("mine")
        return total

    with strategy.scope():
        ends = outcomes(lambda: ms.Variable(initial))
    assert [end.error for end in ends] == [errors.RemoteError] * (SIZE - 1) + [Exception]
    assert all("mine" in end.text for end in ends)


def test_names_are_numbered_alike_whatever_else_a_rank_creates(strategy: ms.Strategy) -> None:
    if RANK == 0:
        with ms.OneDeviceStrategy().scope():
            ms.Variable(1.0)
    variable = new_variable(strategy, 1.0, aggregation="SUM")
    assert same_everywhere(np.frombuffer(variable.name.encode(), np.uint8))
    strategy.run(lambda: variable.assign(1.0))
    assert float(variable) == SIZE


def test_a_variable_created_in_a_step_belongs_to_the_strategy(strategy: ms.Strategy) -> None:
    variable = strategy.run(lambda: ms.Variable(float(RANK), aggregation="SUM", trainable=False))
    assert not variable.trainable
    assert strategy.extended.variable_created_in_scope(variable)
    assert float(variable) == 0
    with ms.OneDeviceStrategy().scope():
        assert not strategy.extended.variable_created_in_scope(ms.Variable(1.0))


# ------------------------------------------------------------------------------------------------- memory


def test_a_value_assigned_is_copied_and_may_be_the_variable(strategy: ms.Strategy, matrix: ms.Variable) -> None:
    value = np.array([[1.0, 2.0], [3.0, 4.0]])
    matrix.assign(value)
    value[...] = 7
    matrix.assign(matrix[::-1])
    matrix.assign_add(matrix[:, ::-1])
    np.testing.assert_array_equal(matrix, [[7, 7], [3, 3]])
    matrix.assign_sub(matrix)
    np.testing.assert_array_equal(matrix, np.zeros((2, 2)))


# ------------------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("int8", 127, True),
        ("int8", 128, False),
        ("int8", np.int64(127), True),
        ("int8", np.int64(300), False),
        ("uint8", -1, False),
        ("uint8", np.int64(-1), False),
        ("uint64", 2**63, True),
        ("int64", 2**63, False),
        ("int32", 1.0, False),
        ("int32", np.float64(1), False),
        ("float32", 1, True),
        ("float32", 1e39, False),
        ("float32", float("inf"), True),
        ("float32", float("nan"), True),
        ("float32", np.float64(0.1), True),
        ("float32", 1j, False),
        ("float16", 70000.0, False),
        ("complex64", 1, True),
        ("complex64", 1.5, True),
        ("bool", True, True),
        (BFLOAT16, 1.5, True),
        (BFLOAT16, np.float32(1.5), True),
    ],
)
def test_a_number_is_converted_where_nothing_is_lost(strategy: ms.Strategy, dtype: Any, value: Any, fits: bool) -> None:
    with strategy.scope():
        for shape, given in (((), value), ((1,), [value])):
            variable = ms.Variable(np.zeros(shape, dtype))
            if fits:
                variable.assign(given)
                np.testing.assert_array_equal(variable, np.asarray(value).astype(dtype))
            else:
                with pytest.raises(errors.DTypeError, match=str(np.dtype(dtype))):
                    variable.assign(given)
                assert not variable.numpy().any()


def test_an_array_of_another_dtype_is_refused_with_the_cure(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable(np.zeros(2, np.float32), name="w")
        with pytest.raises(errors.DTypeError, match=r"'w'.*float64.*float32.*astype\('float32'\)"):
            variable.assign(np.zeros(2))
        with pytest.raises(errors.ShapeError, match=r"'w'.*\(3,\).*\(2,\)"):
            variable.assign(np.zeros(3, np.float32))
        with pytest.raises(errors.ShapeError):
            variable.assign(1.0)  # no broadcasting
        assert ms.Variable([1.0], dtype=">f8").dtype.isnative, "so that arrays of the dtype can be assigned"
        with pytest.raises(errors.DTypeError, match=r"datetime64.*a numeric or bool dtype"):
            ms.Variable(np.zeros(1, "M8[s]"))
        with pytest.raises(errors.DTypeError, match=r"variable of dtype bool.*a numeric dtype"):
            ms.Variable([True]).assign_add([True])
        with pytest.raises(errors.DTypeError, match=r"variable of dtype complex128.*can be compared"):
            ms.Variable([1j]).scatter_max(ms.IndexedSlices([2j], [0]))


# ------------------------------------------------------------------------------------------------- as an array


def test_looking_at_a_variable_never_communicates(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable([1.0, 2.0], synchronization="ON_READ", aggregation="SUM", name="seen")
        if RANK == 0:  # the others do not take part
            assert repr(variable) == str(variable) == f"{variable}"
            assert "seen" in repr(variable)
            assert "ON_READ" in repr(variable)
            assert (variable.shape, variable.dtype, variable.ndim, variable.size, len(variable)) == (
                (2,),
                np.float64,
                1,
                2,
                2,
            )
            assert variable.local_copy().tolist() == [1, 2]
