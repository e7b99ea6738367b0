"""Gather, all_gather and broadcast_to; `out=` of all_reduce; scalars; algorithms of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import (
    DTYPES,
    RANK,
    RANKS,
    SIZE,
    bits,
    context,
    expected,
    laid_out,
    part_of,
    pieces_of,
    same_everywhere,
    value_of,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array

pytestmark = pytest.mark.mpi


def all_gather(strategy: ms.Strategy, value: Any, axis: Any) -> Any:
    return strategy.run(lambda: context().all_gather(value, axis))


def all_reduce(strategy: ms.Strategy, *arguments: Any, **named: Any) -> Any:
    return strategy.run(lambda: context().all_reduce(*arguments, **named))


# ------------------------------------------------------------------------------------------------- gather


@settings(max_examples=part_of(60))
@given(
    dtype=st.sampled_from([*DTYPES, np.dtype(bool), np.dtype("U3"), np.dtype("M8[s]")]),
    shape=st.sampled_from([(3,), (0,), (2, 5), (2, 0, 4), (1, 2, 3, 2)]),
    axis=st.integers(-4, 3),
    lengths=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    layout=st.integers(0, 5),
    max_count=st.sampled_from([2**30, 16, 40]),
)
def test_gather_is_concatenation_in_rank_order(
    strategy: ms.Strategy,
    dtype: Any,
    shape: tuple[int, ...],
    axis: int,
    lengths: list[int],
    layout: int,
    max_count: int,
) -> None:
    axis = axis % len(shape) - len(shape) * (axis < 0)

    def of(rank: int) -> Array:
        own = list(shape)
        own[axis] = lengths[rank]
        whole = value_of(rank, "int64", own)
        return (whole % 1000).astype("S3" if dtype.kind == "S" else dtype)

    mine = of(RANK) if dtype.kind in "bUM" else laid_out(of(RANK), layout + RANK)
    before = mine.copy()
    right = np.concatenate([of(rank) for rank in RANKS], axis=axis)
    with pieces_of(strategy, max_count):
        for result in (strategy.gather(mine, axis), all_gather(strategy, mine, axis)):
            assert result.dtype == right.dtype
            assert result.flags.c_contiguous
            assert bits(result) == bits(right)
            assert result.shape == right.shape
            assert same_everywhere(result)
            assert not np.shares_memory(result, mine)
    assert bits(mine) == bits(before)


def test_gather_of_a_nest_keeps_its_structure(strategy: ms.Strategy) -> None:
    mine = {"b": (np.full((RANK, 2), RANK),), "a": [ms.PerReplica((np.array([RANK]),))]}
    result = strategy.gather(mine if RANK % 2 else dict(reversed(mine.items())), axis=0)
    np.testing.assert_array_equal(result["a"][0], list(RANKS))
    np.testing.assert_array_equal(result["b"][0][:, 1], np.repeat(list(RANKS), list(RANKS)))


def test_nothing_to_gather_on_any_rank(strategy: ms.Strategy) -> None:
    assert strategy.gather(np.zeros((0, 3), np.float32), 0).shape == (0, 3)
    assert strategy.gather(np.zeros((3, 0), np.float32), 0).shape == (3 * SIZE, 0)


def test_gather_takes_variables_lists_and_a_records_array(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable(np.arange(2.0))
        np.testing.assert_array_equal(strategy.gather(variable, 0), [0, 1] * SIZE)
    records = np.array([(RANK, 0.5)], [("rank", "i4"), ("x", "f8")])
    assert strategy.gather(records, 0)["rank"].tolist() == list(RANKS)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [1, 100_000])
def test_ranks_with_a_plan_meet_those_without(strategy: ms.Strategy, size: int) -> None:
    mine = np.full(size * SIZE, RANK + 1.0)
    given = ms.PerReplica((mine,)) if RANK == 0 else mine  # is looked at in each call
    for _ in range(2):
        gathered = all_gather(strategy, given, 0)
        np.testing.assert_array_equal(gathered, np.repeat(np.arange(1.0, SIZE + 1), size * SIZE))
        np.testing.assert_array_equal(strategy.broadcast(given, SIZE - 1), np.full(size * SIZE, float(SIZE)))
        part = strategy.run(lambda: context().reduce_scatter("SUM", given))
        np.testing.assert_array_equal(part, np.full(size, SIZE * (SIZE + 1) / 2))


@pytest.mark.mpi(min_size=2)
def test_small_arrays_of_a_node_travel_with_the_check_of_the_call(strategy: ms.Strategy) -> None:
    ranks, guard = strategy.extended.communicator, strategy.extended.communicator.guard
    if ranks.mailboxes is None:
        pytest.skip("the ranks are on several nodes")
    mine = np.full(3, RANK)
    for call in (lambda: strategy.gather(mine, 0), lambda: strategy.broadcast(mine)):
        call()
        before = guard.comparisons
        call()
        assert guard.comparisons == before + 1


# ------------------------------------------------------------------------------------------------- broadcast


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(bool), np.dtype("U3")], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)], ids=str)
def test_broadcast_sends_the_value_of_rank_0(strategy: ms.Strategy, dtype: Any, shape: tuple[int, ...]) -> None:
    of_first = value_of(0, "int8", shape).astype(dtype)
    mine = value_of(RANK, "int8", shape).astype(dtype)
    before = mine.copy()
    for max_count in (2**30, 7):
        with pieces_of(strategy, max_count):
            result = strategy.extended.broadcast_to(
                np.asfortranarray(mine).reshape(shape), [f"task:{r}" for r in RANKS]
            )
        assert isinstance(result, ms.Mirrored)
        assert result.dtype == mine.dtype
        assert result.shape == shape
        assert bits(result) == bits(of_first)
        assert not np.shares_memory(result.numpy(), mine)
    assert bits(mine) == bits(before)


@pytest.mark.parametrize("target", RANKS)
def test_broadcast_to_one_rank(strategy: ms.Strategy, target: int) -> None:
    result = strategy.extended.broadcast_to(np.float64(RANK), f"task:{target}")
    assert [float(value) for value in result.values] == ([0.0] if target == RANK else [])


# ------------------------------------------------------------------------------------------------- all_reduce(out=)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_out_is_filled_and_returned(strategy: ms.Strategy, op: str) -> None:
    value = {"w": value_of(RANK, "float32", (3, 2)), "b": [value_of(RANK, "float64", (4,))]}
    out = {"b": [np.full(4, np.nan)], "w": np.full((3, 2), np.nan, np.float32, order="F")}
    right = {
        "w": expected(op, [value_of(r, "float32", (3, 2)) for r in RANKS]),
        "b": [expected(op, [value_of(r, "float64", (4,)) for r in RANKS])],
    }
    result = all_reduce(strategy, op, value, out=out)
    assert result["w"] is out["w"]
    assert result["b"][0] is out["b"][0]
    np.testing.assert_array_equal(out["w"], right["w"])
    np.testing.assert_array_equal(out["b"][0], right["b"][0])


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a[::2], lambda a: a[::-1], lambda a: a.T])
def test_out_may_be_the_value_itself(strategy: ms.Strategy, view: Any) -> None:
    value = view(value_of(RANK, "float64", (6, 4)).copy())
    right = expected("SUM", [view(value_of(r, "float64", (6, 4))) for r in RANKS])
    assert all_reduce(strategy, "SUM", value, out=value) is value
    np.testing.assert_array_equal(value, right)


def test_out_of_an_integer_mean_has_the_dtype_of_the_mean(strategy: ms.Strategy) -> None:
    out = np.empty(2)
    all_reduce(strategy, "MEAN", np.full(2, RANK), out=out)
    np.testing.assert_array_equal(out, np.full(2, (SIZE - 1) / 2))


def test_out_in_another_byte_order(strategy: ms.Strategy) -> None:
    value = np.full(2, RANK, ">f8")
    all_reduce(strategy, "SUM", value, out=value)
    np.testing.assert_array_equal(value, np.full(2, sum(RANKS)))


# ------------------------------------------------------------------------------------------------- scalars


@pytest.mark.parametrize(
    ("value", "sum_type", "mean_type"),
    [
        (2, np.int64, np.float64),
        (2.0, np.float64, np.float64),
        (2j, np.complex128, np.complex128),
        (np.float32(2), np.float32, np.float32),
        (np.int8(2), np.int8, np.float32),
        (np.array(2, np.int8), np.ndarray, np.ndarray),
        (np.array(2.0), np.ndarray, np.ndarray),
    ],
    ids=lambda value: str(value),
)
def test_a_scalar_stays_a_scalar_and_an_array_an_array(
    strategy: ms.Strategy, value: Any, sum_type: type, mean_type: type
) -> None:
    for reduce in (lambda *a: all_reduce(strategy, *a), strategy.reduce):
        total, mean = reduce("SUM", value), reduce("MEAN", value)
        assert type(total) is sum_type
        assert type(mean) is mean_type
        assert total == value * SIZE
        assert mean == value


def test_a_list_is_a_nest_of_numbers(strategy: ms.Strategy) -> None:
    assert all_reduce(strategy, "SUM", [1, 2.5, {"x": (3,)}]) == [SIZE, 2.5 * SIZE, {"x": (3 * SIZE,)}]
    assert strategy.reduce("SUM", [1, 2]) == [SIZE, 2 * SIZE]


def test_containers_and_variables_are_read(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable(np.ones(2))
    parts = strategy.experimental_distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    assert strategy.reduce("SUM", parts) == sum(RANKS)
    assert strategy.run(lambda part: context().all_reduce("SUM", part), args=(parts,)) == sum(RANKS)
    np.testing.assert_array_equal(all_reduce(strategy, "SUM", variable), [SIZE, SIZE])


def test_a_mirrored_value_is_its_own_mean_and_has_no_sum(strategy: ms.Strategy) -> None:
    mirrored = strategy.extended.broadcast_to(np.array([RANK, 5.0]), "CPU:0")
    for reduce in (lambda *a: all_reduce(strategy, *a), strategy.reduce):
        np.testing.assert_array_equal(reduce("MEAN", mirrored), [0, 5])
        with pytest.raises(ValueError, match="Mirrored") as refusal:
            reduce("SUM", mirrored)
        assert isinstance(refusal.value, errors.MpiStrategyError)


# ------------------------------------------------------------------------------------------------- one's own algorithm


class Loud(ms.ReductionToOneDevice):
    """A user's algorithm: overrides the hooks and relies on the ones it inherits."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        self.calls.append("reduce")
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        assert isinstance(reduce_op, ms.ReduceOp)
        assert isinstance(value_destination_pairs, list)
        assert isinstance(options, ms.CommunicationOptions)
        self.calls.append("batch_reduce")
        return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        self.calls.append("broadcast")
        return super().broadcast_implementation(tensor, destinations)


def test_a_strategy_uses_the_algorithm_it_was_given() -> None:
    loud = Loud()
    strategy = ms.MirroredStrategy(cross_device_ops=loud)
    try:
        assert strategy.reduce("SUM", 1) == SIZE
        assert loud.calls == ["reduce", "batch_reduce"]
        loud.calls.clear()
        assert all_reduce(strategy, "SUM", [1, 2]) == [SIZE, 2 * SIZE]
        assert loud.calls == ["batch_reduce"]
        loud.calls.clear()
        assert float(strategy.extended.broadcast_to(RANK, "CPU:0")) == 0
        assert loud.calls == ["broadcast"]
    finally:
        strategy.close()


def test_an_algorithm_without_hooks_says_which_are_missing(strategy: ms.Strategy) -> None:
    with strategy.scope():
        for call in (
            lambda: ms.CrossDeviceOps().reduce("SUM", 1.0, "CPU:0"),
            lambda: ms.CrossDeviceOps().batch_reduce("SUM", [(1.0, "CPU:0")]),
        ):
            with pytest.raises(NotImplementedError, match="reduce_implementation"):
                call()
        assert float(ms.CrossDeviceOps().broadcast(RANK + 1, "CPU:0")) == 1


def test_the_accumulation_function_gets_all_values_once_in_rank_order(strategy: ms.Strategy) -> None:
    seen: list[list[float]] = []

    def maximum(values: list[Array]) -> Array:
        seen.append([float(value) for value in values])
        return np.max(values, axis=0)

    last = ms.ReductionToOneDevice(f"task:{SIZE - 1}", accumulation_fn=maximum)
    with strategy.scope():
        mean = last.reduce("MEAN", float(RANK), ms.PerReplica((0,)))
    assert float(mean) == (SIZE - 1) / SIZE  # MEAN divides whatever the function did
    assert seen == ([[float(rank) for rank in RANKS]] if RANK == SIZE - 1 else [])
