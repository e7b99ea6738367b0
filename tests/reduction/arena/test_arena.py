"""Arenas: where their arrays lie, and that reducing them where they are gives what reducing other arrays gives."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import (
    DTYPES,
    RANK,
    RANKS,
    SIXTEEN_BITS,
    SIZE,
    OnNodes,
    bits,
    context,
    expected,
    made,
    one_node,
    outcomes,
    same_everywhere,
    still_works,
    value_of,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import COMBINE, Array
from mpistrategy.mpi.multi_node.two_level import Lanes
from mpistrategy.mpi.shared_memory.segments import private_memory
from mpistrategy.reduction.arena import Arena

pytestmark = pytest.mark.mpi


def in_two_levels(node_of: list[int]) -> ms.Strategy:
    """Let the smallest buffers go within the nodes, between them and back, as large ones do."""
    made = OnNodes(node_of, ms.MpiAllReduce())
    communicator = made.extended.communicator
    communicator.thresholds = replace(communicator.thresholds, lanes_bytes=1)
    return made


STRATEGIES: dict[str, Callable[[], ms.Strategy]] = {
    "one node": ms.MirroredStrategy,
    "hierarchical": lambda: ms.MirroredStrategy(cross_device_ops=ms.HierarchicalCopyAllReduce()),
    "to one device": lambda: ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice()),
    "every rank a node": lambda: OnNodes(list(RANKS), ms.MpiAllReduce()),
    "odd and even ranks": lambda: OnNodes([r % 2 for r in RANKS], ms.MpiAllReduce()),
    "one alone, the rest together": lambda: OnNodes([min(r, 1) for r in RANKS], ms.MpiAllReduce()),
    "odd and even ranks, in two levels": lambda: in_two_levels([r % 2 for r in RANKS]),
    "one alone, the rest together, in two levels": lambda: in_two_levels([min(r, 1) for r in RANKS]),
}


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    yield from made(STRATEGIES)


@pytest.fixture(scope="module", params=STRATEGIES)
def each_strategy(strategies: dict[str, ms.Strategy], request: pytest.FixtureRequest) -> ms.Strategy:
    return strategies[request.param]


class Layer(NamedTuple):
    kernel: Any
    offset: Any


@dataclass
class Record:
    weights: Array
    scale: Array


def nested(arrays: list[Array]) -> Any:
    """Return a nest of any kind that holds all of these arrays."""
    first, *rest = arrays
    if not rest:
        return first
    half = len(rest) // 2
    return {"z": Layer(first, [*rest[:half]]), "a": (*rest[half:],)}


def filled(arena: Arena, seed: int) -> None:
    for number, leaf in enumerate(arena._leaves):
        leaf[...] = value_of(RANK, leaf.dtype, leaf.shape, seed + number)


def combined(op: str, arrays: list[Array]) -> Array:
    """Return the reduction in rank order, by the definition."""
    if op in ("SUM", "MEAN"):
        return expected(op, arrays)
    wide = [array.astype(np.float32) if array.dtype in SIXTEEN_BITS else array for array in arrays]
    total = wide[0]
    with np.errstate(all="ignore"):
        for array in wide[1:]:
            total = COMBINE[op](total, array)
        return np.asarray(total.astype(arrays[0].dtype))


def wanted(op: str, leaf: Array, seed: int) -> Array:
    return combined(op, [value_of(rank, leaf.dtype, leaf.shape, seed) for rank in RANKS])


LAYOUTS = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3) | st.tuples(st.sampled_from([1, 63, 64, 1000, 40_000])),
    ),
    min_size=1,
    max_size=7,
)


# ------------------------------------------------------------------------------------------------ results


@given(layouts=LAYOUTS, op=st.sampled_from(["SUM", "MEAN", "MIN", "MAX", "PROD"]), shared_result=st.booleans())
@settings(max_examples=15)
def test_a_reduction_in_an_arena_is_that_of_other_arrays(
    each_strategy: ms.Strategy, layouts: Any, op: str, shared_result: bool
) -> None:
    refused = {"MEAN": "iu", "MIN": "c", "MAX": "c"}.get(op, "")
    like = nested([np.empty(shape, dtype) for dtype, shape in layouts if dtype.kind not in refused] or [np.empty(3)])
    arena = each_strategy.arena(like, shared_result=shared_result)
    for seed in (0, 50):  # twice, in the same memory
        filled(arena, seed)
        result = each_strategy.reduce(op, arena)
        leaves, structure = nest.flatten(result)
        assert structure.text == nest.flatten(like)[1].text
        for number, (leaf, mine) in enumerate(zip(leaves, arena._leaves, strict=True)):
            assert (leaf.dtype, leaf.shape) == (mine.dtype, mine.shape)
            assert bits(leaf) == bits(wanted(op, mine, seed + number)) or op == "PROD"
            np.testing.assert_allclose(
                leaf.astype(complex), wanted(op, mine, seed + number).astype(complex), rtol=1e-2, equal_nan=True
            )
            if shared_result:
                assert bits(mine) == bits(value_of(RANK, mine.dtype, mine.shape, seed + number))
        assert same_everywhere(result)
    arena.close()


@pytest.mark.parametrize("node_of", [[r % 2 for r in RANKS], [min(r, 1) for r in RANKS], [r // 2 for r in RANKS]])
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_large_arenas_on_several_nodes_between_other_reductions(node_of: list[int], wire: str | None) -> None:
    """Pieces of arenas are counted with those of other arrays; the bits are those of the latter."""
    strategy, size = OnNodes(node_of, ms.MpiAllReduce()), 1_300_001  # five pieces
    options = ms.CommunicationOptions(wire=wire)
    arenas = [
        strategy.arena({"w": np.empty(size, np.float32), "b": np.empty(3)}, shared_result=shared)
        for shared in (False, True)
    ]
    plain = {"w": np.empty(size, np.float32), "b": np.empty(3)}
    for seed in range(3):
        random = np.random.default_rng([seed, RANK])
        plain["w"][:], plain["b"][:] = random.standard_normal(size, np.float32), RANK
        for op in ("SUM", "MEAN", "MAX"):
            for arena in arenas:
                for name, array in plain.items():
                    arena.values[name][...] = array
            right = strategy.run(lambda op=op: context().all_reduce(op, plain, options=options))
            for arena in arenas:
                found = strategy.run(lambda op=op, arena=arena: context().all_reduce(op, arena, options=options))
                assert all(bits(found[name]) == bits(right[name]) for name in plain), (op, seed)
            np.testing.assert_array_equal(arenas[1].values["w"], plain["w"])
    strategy.close()


@pytest.mark.mpi(min_size=4)
def test_on_several_nodes_a_late_rank_is_waited_for() -> None:
    """Where calls are not compared, the exchange itself keeps rank 0 from what rank 1 has not written yet."""
    strategy = in_two_levels([r // 2 for r in RANKS])
    strategy.extended.communicator.guard.check_as("off")
    arena = strategy.arena([np.zeros(1000, np.float32)])
    (values,) = arena.values
    first_have_come = 0
    for number in range(12):
        values[:] = -1e6
        exchange: Any = strategy.extended.communicator.once.made.get(Lanes)
        if RANK == 1 and exchange is not None:
            node = exchange.node_sum
            rank_0, end = node._arrived.numbers[0], time.monotonic() + 1
            while rank_0[0] <= node._barriers and time.monotonic() < end:
                pass  # unless it waits in a comparison, it comes
            first_have_come += rank_0[0] > node._barriers
            for _ in range(10_000):
                os.sched_yield()
        values[:] = number + RANK
        strategy.reduce("SUM", arena)
        assert (values == number * SIZE + sum(RANKS)).all()
    assert RANK != 1 or first_have_come > 0
    strategy.close()


def test_the_result_is_in_place_or_one_for_the_node(strategy: ms.Strategy) -> None:
    like = {"w": np.empty((3, 5), np.float32), "b": np.empty(2, np.int64)}
    arena, shared = strategy.arena(like), strategy.arena(like, shared_result=True)
    for one in (arena, shared):
        filled(one, 1)
    in_place, result = strategy.reduce("SUM", arena), strategy.reduce("SUM", shared)
    assert in_place is arena.values
    assert all(in_place[key] is arena.values[key] for key in like)
    assert not any(result[key].flags.writeable for key in like)
    assert result["w"] is strategy.reduce("SUM", shared)["w"]
    np.testing.assert_array_equal(result["w"], in_place["w"])
    if shared.is_shared:
        addresses = [one.result for one in shared._buckets]
        assert all(address is not None for address in addresses)


def test_a_mean_with_weights_is_that_of_other_arrays(each_strategy: ms.Strategy) -> None:
    like = [np.empty(7, np.float32), np.empty((2, 3), np.float16)]
    weights = [rank % 3 for rank in RANKS]
    for shared_result in (False, True):
        arena = each_strategy.arena(like, shared_result=shared_result)
        filled(arena, 0)
        plain = [leaf.copy() for leaf in arena._leaves]
        result = each_strategy.reduce("MEAN", arena, weight=weights[RANK])
        for got, other in zip(result, each_strategy.reduce("MEAN", plain, weight=weights[RANK]), strict=True):
            np.testing.assert_array_equal(got, other)
        assert (result is arena.values) is not shared_result


def test_every_way_to_reduce_takes_an_arena(strategy: ms.Strategy) -> None:
    arena = strategy.arena([np.zeros(3), np.zeros(2, np.int32)])
    ways: dict[str, Callable[[], Any]] = {
        "reduce": lambda: strategy.reduce("SUM", arena),
        "all_reduce": lambda: strategy.run(lambda: context().all_reduce("SUM", arena)),
        "out=arena": lambda: strategy.run(lambda: context().all_reduce("SUM", arena, out=arena)),
        "out=values": lambda: strategy.run(lambda: context().all_reduce("SUM", arena, out=arena.values)),
        "reduce_to": lambda: strategy.extended.reduce_to("SUM", arena, arena),
        "to its values": lambda: strategy.extended.reduce_to("SUM", arena, arena.values),
        "to a rank": lambda: strategy.extended.reduce_to("SUM", arena, "task:0"),
    }
    for name, way in ways.items():
        filled(arena, 3)
        assert way() is arena.values, name
        for number, leaf in enumerate(arena._leaves):
            np.testing.assert_array_equal(leaf, wanted("SUM", leaf, 3 + number), name)


def test_one_line_of_the_program_serves_other_arenas_strategies_and_algorithms(strategy: ms.Strategy) -> None:
    """What was worked out for an arena is never used for another one."""
    other = ms.MirroredStrategy(cross_device_ops=ms.OrderedAllReduce())
    arenas = [(each, each.arena([np.zeros(3)])) for each in (strategy, other, strategy, other)]

    def total(which: ms.Strategy, arena: Arena[Any], *, op: str = "SUM") -> Any:
        return which.run(lambda: context().all_reduce(op, arena))

    for _ in range(2):
        for number, (each, arena) in enumerate(arenas):
            arena.values[0][...] = number + RANK
            assert (total(each, arena)[0] == SIZE * number + sum(RANKS)).all()
            arena.values[0][...] = number + RANK
            assert (total(each, arena, op="MAX")[0] == number + SIZE - 1).all()
    with pytest.raises(errors.OptionTypeError, match="an arena of another strategy"):
        total(strategy, arenas[1][1])
    strategy.extended.cross_device_ops = ms.ReductionToOneDevice()
    arenas[0][1].values[0][...] = RANK
    assert (total(*arenas[0])[0] == sum(RANKS)).all()
    strategy.extended.cross_device_ops = ms.MpiAllReduce()
    arenas[0][1].close()
    with pytest.raises(errors.ContextError, match="close"):
        total(*arenas[0])
    other.close()


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_ranks_may_write_the_call_differently(strategy: ms.Strategy, op: str) -> None:
    """Some calls are worked out once, others are not: the messages are the same."""
    arena = strategy.arena([np.zeros(4000), np.zeros((3, 5), np.float32), 0.0])
    for round_ in range(6):
        filled(arena, round_)
        out = arena.values if round_ % SIZE == RANK else None
        result = strategy.run(lambda out=out: context().all_reduce(op, arena, out=out))
        assert result is arena.values
        for number, leaf in enumerate(arena._leaves):
            np.testing.assert_array_equal(leaf, wanted(op, leaf, round_ + number))


def test_a_call_that_was_worked_out_is_still_checked(strategy: ms.Strategy) -> None:
    arena, other = strategy.arena([np.zeros(400), np.zeros(3)]), strategy.arena([np.zeros(400), np.zeros(3)])
    for _ in range(2):
        strategy.run(lambda: context().all_reduce("SUM", arena))
        strategy.run(lambda: context().all_reduce("SUM", other))
    kept = arena.values[0]
    arena.values[0] = np.zeros(400)
    with pytest.raises(ms.errors.StructureError, match="other arrays"):
        strategy.run(lambda: context().all_reduce("SUM", arena))
    arena.values[0] = kept
    if SIZE > 1:
        with pytest.raises(ms.errors.CollectiveMismatchError):
            strategy.run(lambda: context().all_reduce("SUM", arena if RANK else other))
    strategy.run(lambda: context().all_reduce("SUM", arena))
    arena.close()
    with pytest.raises(ms.errors.ContextError, match="close"):
        strategy.run(lambda: context().all_reduce("SUM", arena))


def test_values_without_out_are_ordinary_arrays(strategy: ms.Strategy) -> None:
    arena = strategy.arena([np.zeros(5, np.float32)])
    filled(arena, 2)
    (result,) = strategy.reduce("SUM", arena.values)
    assert not np.may_share_memory(result, arena._leaves[0])
    np.testing.assert_array_equal(arena._leaves[0], value_of(RANK, np.float32, (5,), 2))
    mixed = strategy.run(lambda: context().all_reduce("SUM", {"in": arena.values, "out": np.ones(2)}))
    np.testing.assert_array_equal(mixed["in"][0], wanted("SUM", arena._leaves[0], 2))
    np.testing.assert_array_equal(mixed["out"], np.full(2, SIZE))


def test_a_broadcast_writes_replica_0s_arrays_everywhere(each_strategy: ms.Strategy) -> None:
    arena = each_strategy.arena({"x": np.zeros((40, 1000)), "flags": np.zeros(3, np.int8)})
    for seed in (0, 9):
        filled(arena, seed)
        assert each_strategy.extended.broadcast_to(arena, arena) is arena.values
        for number, leaf in enumerate(arena._leaves):
            np.testing.assert_array_equal(leaf, value_of(0, leaf.dtype, leaf.shape, seed + number))


def test_overflow_is_no_warning(each_strategy: ms.Strategy) -> None:
    for dtype in ("float16", "float32", "float64"):
        arena = each_strategy.arena(np.zeros(3, dtype))
        arena.values[...] = np.finfo(dtype).max
        assert np.isinf(each_strategy.reduce("PROD", arena)).all() or SIZE == 1
        arena.values[...] = [np.inf, -np.inf, np.nan] if RANK == 0 else [-np.inf, np.inf, 1]
        assert np.isnan(each_strategy.reduce("SUM", arena)).all() or SIZE == 1


def test_rewriting_and_reading_never_meet(strategy: ms.Strategy) -> None:
    """Ranks that come late or early neither see the next values nor lose these."""
    arena, shared = strategy.arena(np.zeros(50_000)), strategy.arena(np.zeros(50_000), shared_result=True)
    for number in range(60):
        for one in (arena, shared):
            one.values[...] = number + RANK
            result = strategy.reduce("SUM", one)
            if (number + RANK) % 3 == 0:
                np.sort(np.arange(20_000)[::-1])  # this rank is late
            assert result.min() == result.max() == SIZE * number + sum(RANKS)


# ------------------------------------------------------------------------------------------------ layout


def test_arrays_lie_in_order_on_cache_lines(strategy: ms.Strategy) -> None:
    like = [np.zeros(3, np.float32), np.zeros((2, 2)), np.zeros((), np.float32), np.zeros((0, 4)), np.zeros(33)]
    arena = strategy.arena(like)
    assert [bucket.mine.dtype for bucket in arena._buckets] == [np.float32, np.float64]
    assert [(bucket, place.start) for bucket, place in arena._places] == [(0, 0), (1, 0), (0, 16), (1, 8), (1, 8)]
    for leaf, (bucket, _) in zip(arena._leaves, arena._places, strict=True):
        assert leaf.ctypes.data % 64 == 0
        assert leaf.flags.c_contiguous
        assert leaf.flags.writeable
        assert not leaf.any()
        assert np.shares_memory(leaf, arena._buckets[bucket].mine) or not leaf.size
    arena._leaves[0][...] = RANK + 1
    strategy.barrier()
    if arena.is_shared:
        node_of = strategy.extended.communicator.node_of
        here = [rank + 1 for rank in RANKS if node_of[rank] == node_of[RANK]]
        assert [one[0] for one in arena._buckets[0].arrays] == here
    strategy.barrier()
    assert f"{len(like)} arrays in 2 buckets" in repr(arena)


def test_an_arena_is_like_variables_and_numbers(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable(np.ones((2, 3), np.float16))
    arena = strategy.arena({"v": variable, "n": 1, "x": 2.5, "s": np.float32(1), "p": ms.PerReplica((np.ones(2),))})
    layouts = {key: (value.dtype.name, value.shape) for key, value in arena.values.items()}
    assert layouts == {
        "v": ("float16", (2, 3)),
        "n": ("int64", ()),
        "x": ("float64", ()),
        "s": ("float32", ()),
        "p": ("float64", (2,)),
    }


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("like", "error", "text"),
    [
        ([], errors.EmptyBatchError, "empty"),
        ({}, errors.EmptyBatchError, "empty"),
        ([np.zeros(2), [True]], errors.DTypeError, r"bool at leaf \[1\]\[0\]"),
        ({"s": "text"}, errors.DTypeError, r"strings <U4 at leaf \['s'\]"),
        ([None], errors.LeafError, "None"),
        ([ms.IndexedSlices(np.ones(1), [0])], errors.LeafError, "IndexedSlices"),
    ],
)
def test_what_an_arena_cannot_be_like(strategy: ms.Strategy, like: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        strategy.arena(like)
    assert still_works(strategy)


def test_one_ranks_mistake_is_everybodys(strategy: ms.Strategy) -> None:
    arena, other = strategy.arena([np.zeros(2)]), strategy.arena([np.zeros(2)])
    wrong: dict[str, Callable[[], Any]] = {
        "another shape": lambda: strategy.arena([np.zeros(2 + (RANK == 0))]),
        "another dtype": lambda: strategy.arena([np.zeros(2, np.float32 if RANK == 0 else np.float64)]),
        "another structure": lambda: strategy.arena([np.zeros(2)] if RANK == 0 else (np.zeros(2),)),
        "a refused one": lambda: strategy.arena([np.zeros(2)] if RANK == 0 else None),
        "another result": lambda: strategy.arena([np.zeros(2)], shared_result=RANK == 0),
        "another arena": lambda: strategy.reduce("SUM", arena if RANK == 0 else other),
        "another operation": lambda: strategy.reduce("SUM" if RANK == 0 else "MAX", arena),
        "an ordinary value": lambda: strategy.reduce("SUM", arena if RANK == 0 else [np.zeros(2)]),
        "broadcast": lambda: (
            strategy.extended.broadcast_to(arena, arena) if RANK == 0 else strategy.reduce("SUM", arena)
        ),
    }
    for name, call in wrong.items():
        found = outcomes(call)
        assert SIZE == 1 or all(outcome.error is not None for outcome in found), (name, found)
    assert still_works(strategy)
    filled(arena, 0)
    np.testing.assert_array_equal(strategy.reduce("SUM", arena)[0], wanted("SUM", arena._leaves[0], 0))


def test_refused_operations(strategy: ms.Strategy) -> None:
    integers, numbers = strategy.arena([np.zeros(2, np.int32)]), strategy.arena(np.zeros(2, np.complex64))
    with pytest.raises(errors.DTypeError, match="MEAN of int32"):
        strategy.reduce("MEAN", integers)
    with pytest.raises(errors.DTypeError, match="MEAN of int32"):
        strategy.reduce("MEAN", integers, weight=1)
    with pytest.raises(errors.DTypeError, match="MAX of complex64"):
        strategy.reduce("MAX", numbers)
    with pytest.raises(errors.OptionError, match="axis=0"):
        strategy.reduce("SUM", numbers, axis=0)
    with pytest.raises(errors.ReduceOpError):
        strategy.reduce("AVERAGE", numbers)
    with pytest.raises(errors.OptionTypeError, match="shared_result=1"):
        strategy.arena(np.zeros(2), shared_result=1)  # type: ignore[arg-type]
    with pytest.raises(errors.DestinationError):
        strategy.extended.reduce_to("SUM", numbers, None)
    with pytest.raises(errors.OptionError, match="out="):
        strategy.run(lambda: context().all_reduce("SUM", numbers, out=np.zeros(2, np.complex64)))
    with pytest.raises(errors.LeafError, match="Arena"):
        strategy.reduce("SUM", [numbers, 1.0])
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(errors.CopyError):
            copied(numbers)
    assert still_works(strategy)


@pytest.mark.parametrize("make", [list, tuple, dict], ids=lambda make: make.__name__)
def test_other_arrays_in_values_are_found(strategy: ms.Strategy, make: Any) -> None:
    arrays = [np.zeros(2), np.zeros(3)]
    like = {"x": arrays[0], "y": [arrays[1]]} if make is dict else make([arrays[0], [arrays[1]]])
    arena = strategy.arena(like)
    inner = arena.values["y" if make is dict else 1]
    mine = inner[0]
    inner[0] = np.ones(3)
    with pytest.raises(errors.StructureError, match="written in place"):
        strategy.reduce("SUM", arena)
    inner.append(mine)
    with pytest.raises(errors.StructureError):
        strategy.reduce("SUM", arena)
    inner[:] = [mine]
    strategy.reduce("SUM", arena)
    assert still_works(strategy)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2,)], ids=str)
def test_equal_arrays_in_values_are_others(strategy: ms.Strategy, shape: tuple[int, ...]) -> None:
    arrays = [np.zeros(shape), np.zeros(shape)]
    for like in (arrays, {"a": arrays[0], "b": [arrays[1]]}, {"a": (arrays[0], {"b": arrays[1]}), "c": arrays[0]}):
        arena = strategy.arena(like)
        strategy.reduce("SUM", arena)
        values, key = (arena.values, 0) if isinstance(like, list) else (arena.values, "a")
        mine = values[key]
        values[key] = nest.map_structure(np.copy, mine)
        with pytest.raises(errors.StructureError, match="written in place"):
            strategy.reduce("SUM", arena)
        values[key] = mine
        strategy.reduce("SUM", arena)
        extra: Any = {"another": 1}
        if isinstance(values, dict):
            values.update(extra)
            with pytest.raises(errors.StructureError):
                strategy.reduce("SUM", arena)


def test_values_may_be_records(strategy: ms.Strategy) -> None:
    arena = strategy.arena(Record(np.zeros(2), np.zeros(())))
    filled(arena, 0)
    assert strategy.reduce("SUM", arena) is arena.values
    np.testing.assert_array_equal(arena.values.weights, wanted("SUM", arena.values.weights, 0))
    arena.values.scale = np.zeros(())
    with pytest.raises(errors.StructureError):
        strategy.reduce("SUM", arena)


def test_an_arena_belongs_to_its_strategy(strategy: ms.Strategy) -> None:
    arena, alone = strategy.arena(np.zeros(2)), ms.OneDeviceStrategy()
    with pytest.raises(errors.OptionTypeError, match="another strategy"):
        alone.reduce("SUM", arena)
    assert still_works(strategy)


def test_after_close_arrays_stay_and_calls_are_refused(strategy: ms.Strategy) -> None:
    arena = strategy.arena({"a": np.zeros(300_000)}, shared_result=RANK < SIZE)
    filled(arena, 0)
    result, mine = strategy.reduce("SUM", arena)["a"], arena.values["a"]
    before = result.copy()
    arena.close()
    arena.close()
    assert "closed" in repr(arena)
    for found in (outcomes(strategy.reduce, "SUM", arena), outcomes(strategy.extended.broadcast_to, arena, arena)):
        assert all(outcome.error is errors.ContextError for outcome in found)
    with pytest.raises(errors.ContextError, match="close"):
        _ = arena.values
    gc.collect()
    mine[...] = 7
    np.testing.assert_array_equal(result, before)
    assert still_works(strategy)


def test_arrays_outlive_the_strategy() -> None:
    with ms.MirroredStrategy() as strategy:
        arena = strategy.arena([np.zeros(1000)])
        filled(arena, 0)
        (result,) = strategy.reduce("SUM", arena)
    np.testing.assert_array_equal(result, wanted("SUM", result, 0))
    with pytest.raises(errors.ContextError):
        strategy.reduce("SUM", arena)
    arena.close()
    result[...] = 3
    assert result.sum() == 3000


def test_arenas_that_are_dropped_leave_nothing_open(strategy: ms.Strategy) -> None:
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    for number in range(150):
        arena = strategy.arena([np.zeros(5000)], shared_result=number % 2 == 0)
        arena._leaves[0][...] = RANK
        assert strategy.reduce("MAX", arena)[0][-1] == SIZE - 1
        if number % 3:
            arena.close()
    del arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


# ------------------------------------------------------------------------------------- without shared memory


@pytest.mark.parametrize("shared_result", [False, True])
@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")
def test_one_replica_and_simulated_ones_have_arenas(shared_result: bool) -> None:
    for alone in (ms.OneDeviceStrategy(), ms.get_strategy()):
        arena = alone.arena({"a": np.zeros(3), "b": np.zeros((), np.int8)}, shared_result=shared_result)
        arena.values["a"][...] = [1, 2, 3]
        assert alone.reduce("SUM", arena)["a"].tolist() == [1, 2, 3]
        assert not arena.is_shared
        assert "this rank alone" in repr(arena)

    def program() -> list[float]:
        strategy = ms.MirroredStrategy()
        arena = strategy.arena([np.zeros(2, np.float16), np.zeros(1, np.float32)], shared_result=shared_result)
        arena._leaves[0][...] = strategy.replica_id_in_sync_group
        arena._leaves[1][...] = 1
        got: list[float] = strategy.reduce("SUM", arena)[0].tolist()
        strategy.extended.broadcast_to(arena, "CPU:0")
        return got

    assert ms.testing.run_replicas(program, 3) == [[3, 3]] * 3
    assert ms.testing.run_replicas(program, 3, nodes=[0, 1, 1]) == [[3, 3]] * 3


@one_node
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("refusing", ["the first", "the last"])
def test_no_room_on_one_rank_means_none_for_all(monkeypatch: pytest.MonkeyPatch, refusing: str) -> None:
    """A full /dev/shm, seen by one rank alone: the same results, and one warning."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with ms.MirroredStrategy() as strategy:
        if (refusing == "the first" and RANK == 0) or (refusing == "the last" and RANK == SIZE - 1):
            monkeypatch.setattr(os, "posix_fallocate", full)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            arena = strategy.arena([np.zeros(100_000, np.float32), np.zeros(3, np.int16)])
        monkeypatch.undo()
        assert {warning.category for warning in told} == ({errors.FallbackWarning} if RANK == 0 else set())
        assert not arena.is_shared
        filled(arena, 0)
        result = strategy.reduce("SUM", arena)
        assert result is arena.values
        for number, leaf in enumerate(result):
            np.testing.assert_array_equal(leaf, wanted("SUM", leaf, number))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("shared_result", [False, True])
@pytest.mark.parametrize("placement", [[rank // 2 for rank in RANKS], [min(rank, 1) for rank in RANKS]], ids=str)
def test_between_nodes_without_memory_for_the_lanes(
    placement: list[int], shared_result: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena itself is shared, but there is no more room when its first reduction asks for it."""
    for op, wanted in (("MEAN", (SIZE + 1) / 2), ("SUM", SIZE * (SIZE + 1) / 2)):
        with in_two_levels(placement) as strategy:
            arena = strategy.arena(np.zeros(5000), shared_result=shared_result)
            monkeypatch.setattr(strategy.extended.communicator, "shared", private_memory)
            arena.values[...] = RANK + 1
            result = strategy.run(lambda op=op, arena=arena: context().all_reduce(op, arena))
            assert (np.asarray(result) == wanted).all()
            assert not shared_result or (arena.values == RANK + 1).all()
            arena.close()
