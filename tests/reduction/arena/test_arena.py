"""Arenas: where their arrays lie, who sees what, what is refused, and when their memory is given back.

That a reduction in an arena is that of other arrays is a row of tests/reduction/test_every_route.py.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import (
    RANK,
    RANKS,
    SIZE,
    OnNodes,
    all_reduce,
    context,
    expected,
    made,
    new_variable,
    outcomes,
    rows,
    several,
    value_of,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory.segments import private_memory
from mpistrategy.reduction.arena import Arena

pytestmark = pytest.mark.mpi
COUNT = 300_000


def in_two_levels(node_of: list[int]) -> ms.Strategy:
    """Let the smallest buffers go within the nodes, between them and back, as large ones do."""
    strategy = OnNodes(node_of, ms.MpiAllReduce())
    communicator = strategy.extended.communicator
    communicator.thresholds = replace(communicator.thresholds, lanes_bytes=1)
    return strategy


STRATEGIES: dict[str, Callable[[], ms.Strategy]] = {
    "one node": ms.MirroredStrategy,
    "to one device": lambda: ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice()),
    "every rank a node": lambda: OnNodes(list(RANKS), ms.MpiAllReduce()),
    "odd and even ranks, in two levels": lambda: in_two_levels([r % 2 for r in RANKS]),
    "one alone, the rest together": lambda: in_two_levels([min(r, 1) for r in RANKS]),
}


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    yield from made(STRATEGIES)


@pytest.fixture(scope="module", params=STRATEGIES)
def each_strategy(strategies: dict[str, ms.Strategy], request: pytest.FixtureRequest) -> ms.Strategy:
    return strategies[request.param]


@dataclass
class Record:
    weights: Array
    scale: Array


def leaves_of(arena: Arena) -> list[Array]:
    return nest.flatten(arena.values)[0]


def filled(arena: Arena, seed: int) -> None:
    for number, leaf in enumerate(leaves_of(arena)):
        leaf[...] = value_of(RANK, leaf.dtype, leaf.shape, seed + number)


def assert_filled(arena: Arena, seed: int, op: str = "SUM") -> None:
    """Check that the arrays are the reductions of what `filled` has written."""
    for number, leaf in enumerate(leaves_of(arena)):
        everyone = [value_of(rank, leaf.dtype, leaf.shape, seed + number) for rank in RANKS]
        np.testing.assert_array_equal(leaf, expected(op, everyone) if op != "MAX" else np.max(everyone, axis=0))


# ------------------------------------------------------------------------------------------------ results


def test_the_result_is_in_place_or_one_for_the_node(strategy: ms.Strategy) -> None:
    like = {"w": np.empty((3, 5), np.float32), "b": np.empty(2, np.int64)}
    arena, shared = strategy.arena(like), strategy.arena(like, shared_result=True)
    filled(arena, 1)
    filled(shared, 1)
    in_place, result = strategy.reduce("SUM", arena), strategy.reduce("SUM", shared)
    assert in_place is arena.values
    assert all(in_place[key] is arena.values[key] for key in like)
    assert not any(result[key].flags.writeable for key in like)
    assert result["w"] is strategy.reduce("SUM", shared)["w"]
    np.testing.assert_array_equal(result["w"], in_place["w"])
    ordinary = strategy.reduce("SUM", {"in": arena.values, "out": np.ones(2)})  # as other arrays are
    assert not np.may_share_memory(ordinary["in"]["w"], arena.values["w"])
    np.testing.assert_array_equal(shared.values["w"], value_of(RANK, np.float32, (3, 5), 2))


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_every_way_to_reduce_takes_an_arena(each_strategy: ms.Strategy, op: str) -> None:
    """Ranks may write the call differently: the messages are the same."""
    strategy, dtype = each_strategy, np.float32 if op == "MEAN" else np.int32
    arena = strategy.arena([np.zeros((40, 100)), np.zeros(2, dtype), 0.0])
    to = strategy.extended
    ways: dict[str, Callable[[], Any]] = {
        "reduce": lambda: strategy.reduce(op, arena),
        "all_reduce": lambda: all_reduce(strategy, op, arena),
        "out=arena": lambda: all_reduce(strategy, op, arena, out=arena),
        "out=values": lambda: all_reduce(strategy, op, arena, out=arena.values),
        "some out": lambda: all_reduce(strategy, op, arena, out=arena.values if RANK % 2 else None),
        "reduce_to": lambda: to.reduce_to(op, arena, arena),
        "to its values": lambda: to.reduce_to(op, arena, arena.values),
        "to a rank": lambda: to.reduce_to(op, arena, "task:0"),
    }
    for way in ways.values():
        for seed in (3, 4):
            filled(arena, seed)
            assert way() is arena.values
            assert_filled(arena, seed, op)
    if op == "MEAN":
        filled(arena, 5)
        plain = [leaf.copy() for leaf in arena.values]
        found = strategy.reduce(op, arena, weight=RANK % 3)
        for got, other in zip(found, strategy.reduce(op, plain, weight=RANK % 3), strict=True):
            np.testing.assert_array_equal(got, other)
    filled(arena, 6)
    assert to.broadcast_to(arena, arena) is arena.values
    for number, leaf in enumerate(arena.values):
        np.testing.assert_array_equal(leaf, value_of(0, leaf.dtype, leaf.shape, 6 + number))


def test_one_line_of_the_program_serves_other_arenas_strategies_and_algorithms(strategy: ms.Strategy) -> None:
    """What was worked out for an arena is never used for another one."""
    other = ms.MirroredStrategy(cross_device_ops=ms.OrderedAllReduce())
    arenas = [(each, each.arena([np.zeros(3)])) for each in (strategy, other, strategy, other)]
    for _ in range(2):
        for number, (each, arena) in enumerate(arenas):
            for op, right in (("SUM", SIZE * number + sum(RANKS)), ("MAX", number + SIZE - 1)):
                arena.values[0][...] = number + RANK
                assert (all_reduce(each, op, arena)[0] == right).all()
    for another in (strategy, ms.OneDeviceStrategy()):
        with pytest.raises(errors.OptionTypeError, match="an arena of another strategy"):
            all_reduce(another, "SUM", arenas[1][1])
    strategy.extended.cross_device_ops = ms.ReductionToOneDevice()
    arenas[0][1].values[0][...] = RANK
    assert (all_reduce(strategy, "SUM", arenas[0][1])[0] == sum(RANKS)).all()
    strategy.extended.cross_device_ops = ms.MpiAllReduce()
    if SIZE > 1:
        with pytest.raises(errors.CollectiveMismatchError):
            all_reduce(strategy, "SUM", arenas[0 if RANK else 2][1])
    arenas[0][1].close()
    with pytest.raises(errors.ContextError, match="close"):
        all_reduce(strategy, "SUM", arenas[0][1])
    other.close()


@pytest.mark.parametrize("check", ["always", "off"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_rewriting_and_reading_never_meet(strategies: dict[str, ms.Strategy], name: str, check: Any) -> None:
    """Ranks that come late or early neither see the next values nor lose these, be calls compared or not."""
    strategy = strategies[name]
    guard = strategy.extended.communicator.guard
    guard.check_as(check)
    arenas = [strategy.arena(np.zeros(50_000), shared_result=shared) for shared in (False, True)]
    for number in range(30):
        for arena in arenas:
            arena.values[...] = -1e6
            if (number + RANK) % 3 == 0:
                np.sort(np.arange(20_000)[::-1])  # this rank is late
            arena.values[...] = number + RANK
            result = strategy.reduce("SUM", arena)
            assert result.min() == result.max() == SIZE * number + sum(RANKS)
    guard.check_as("always")


# ------------------------------------------------------------------------------------------------ layout


def test_arrays_are_like_those_given_on_cache_lines(strategy: ms.Strategy) -> None:
    variable = new_variable(strategy, np.ones((2, 3), np.float16))
    like = {"v": variable, "n": 1, "x": 2.5, "s": np.float32(1), "p": ms.PerReplica((np.ones(33),)), "e": np.ones(0)}
    arena = strategy.arena(like)
    kinds = {key: (value.dtype.name, value.shape) for key, value in arena.values.items()}
    assert list(kinds.values()) == [
        ("float16", (2, 3)), ("int64", ()), ("float64", ()), ("float32", ()), ("float64", (33,)), ("float64", (0,)),
    ]  # fmt: skip
    for leaf in arena.values.values():
        assert leaf.ctypes.data % 64 == 0
        assert leaf.flags.c_contiguous
        assert not leaf.any()
    assert "6 arrays in 4 buckets" in repr(arena)


# ------------------------------------------------------------------------------------------------ mistakes

SLICES = ms.IndexedSlices(np.ones(1), [0])
UNLIKE: list[tuple[Any, type[Exception], str]] = [
    ({}, errors.EmptyBatchError, "empty"),
    ([np.zeros(2), [True]], errors.DTypeError, r"bool at leaf \[1\]\[0\]"),
    ({"s": "text"}, errors.DTypeError, r"strings <U4 at leaf \['s'\]"),
    ([None], errors.LeafError, "None"),
    ([SLICES], errors.LeafError, "IndexedSlices"),
]


def test_what_an_arena_cannot_be_like_and_how_it_cannot_be_reduced(strategy: ms.Strategy) -> None:
    integers, numbers = strategy.arena([np.zeros(2, np.int32)]), strategy.arena(np.zeros(2, np.complex64))
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        *((lambda like=like: strategy.arena(like), error, text) for like, error, text in UNLIKE),
        (lambda: strategy.reduce("MEAN", integers), errors.DTypeError, "MEAN of int32"),
        (lambda: strategy.reduce("MEAN", integers, weight=1), errors.DTypeError, "MEAN of int32"),
        (lambda: strategy.reduce("MAX", numbers), errors.DTypeError, "MAX of complex64"),
        (lambda: strategy.reduce("SUM", numbers, axis=0), errors.OptionError, "axis=0"),
        (lambda: strategy.reduce("AVERAGE", numbers), errors.ReduceOpError, "AVERAGE"),
        (lambda: strategy.arena(np.zeros(2), shared_result=1), errors.OptionTypeError, "shared_result=1"),
        (lambda: strategy.extended.reduce_to("SUM", numbers, None), errors.DestinationError, "None"),
        (lambda: all_reduce(strategy, "SUM", numbers, out=np.zeros(2, np.complex64)), errors.OptionError, "out="),
        (lambda: strategy.reduce("SUM", [numbers, 1.0]), errors.LeafError, "Arena"),
        *((lambda copied=copied: copied(numbers), errors.CopyError, "copying") for copied in (copy.copy, pickle.dumps)),
    ]
    for call, error, text in refused:
        with pytest.raises(error, match=text):
            call()


@several
def test_one_ranks_mistake_is_everybodys(strategy: ms.Strategy) -> None:
    arena, other, first = strategy.arena([np.zeros(2)]), strategy.arena([np.zeros(2)]), RANK == 0
    to = strategy.extended
    wrong: dict[str, Callable[[], Any]] = {
        "another shape": lambda: strategy.arena([np.zeros(2 + first)]),
        "another dtype": lambda: strategy.arena([np.zeros(2, np.float32 if first else np.float64)]),
        "another structure": lambda: strategy.arena([np.zeros(2)] if first else (np.zeros(2),)),
        "a refused one": lambda: strategy.arena([np.zeros(2)] if first else None),
        "another result": lambda: strategy.arena([np.zeros(2)], shared_result=first),
        "another arena": lambda: strategy.reduce("SUM", arena if first else other),
        "another operation": lambda: strategy.reduce("SUM" if first else "MAX", arena),
        "an ordinary value": lambda: strategy.reduce("SUM", arena if first else [np.zeros(2)]),
        "broadcast": lambda: to.broadcast_to(arena, arena) if first else strategy.reduce("SUM", arena),
    }
    for name, call in wrong.items():
        assert all(outcome.error is not None for outcome in outcomes(call)), name
    filled(arena, 0)
    strategy.reduce("SUM", arena)
    assert_filled(arena, 0)


A, B = np.zeros(2), np.zeros(())
LIKES: dict[str, Any] = {
    "a list": [A, [B]],
    "a tuple": (B, [A]),
    "a dict": {"a": (A, {"b": B}), "c": [A]},
    "empty arrays": {"a": np.zeros(0), "b": [np.zeros(0)]},
    "a record": Record(A, B),
}


@pytest.mark.parametrize("like", LIKES)
def test_other_arrays_in_values_are_found(strategy: ms.Strategy, like: str) -> None:
    arena = strategy.arena(LIKES[like])
    values: Any = arena.values
    holder, key = (vars(values), "scale") if like == "a record" else (values, "a")
    if isinstance(values, (list, tuple)):
        holder, key = values[1], 0
    for _ in range(2):
        filled(arena, 0)
        assert strategy.reduce("SUM", arena) is values
        assert_filled(arena, 0)
        mine, holder[key] = holder[key], nest.map_structure(np.copy, holder[key])
        for call in (lambda: strategy.reduce("SUM", arena), lambda: all_reduce(strategy, "SUM", arena)):
            with pytest.raises(errors.StructureError, match="written in place"):
                call()
        holder[key] = mine
    if like != "a record":
        holder.append(mine) if isinstance(holder, list) else holder.update(another=1)
        with pytest.raises(errors.StructureError):
            strategy.reduce("SUM", arena)


# ------------------------------------------------------------------------------------------------ the end of things


def test_after_close_arrays_stay_and_calls_are_refused(strategy: ms.Strategy) -> None:
    arena = strategy.arena({"a": np.zeros(COUNT)}, shared_result=True)
    filled(arena, 0)
    result, mine = strategy.reduce("SUM", arena)["a"], arena.values["a"]
    before = result.copy()
    arena.close()
    arena.close()
    assert "closed" in repr(arena)
    for ends in (outcomes(strategy.reduce, "SUM", arena), outcomes(strategy.extended.broadcast_to, arena, arena)):
        assert all(outcome.error is errors.ContextError for outcome in ends)
    with pytest.raises(errors.ContextError, match="close"):
        _ = arena.values
    gc.collect()
    mine[...] = 7
    np.testing.assert_array_equal(result, before)


def test_arrays_outlive_the_strategy() -> None:
    with ms.MirroredStrategy() as strategy:
        arena = strategy.arena([np.zeros(1000)])
        filled(arena, 0)
        (result,) = strategy.reduce("SUM", arena)
    assert_filled(arena, 0)
    arena.close()
    result[...] = 3
    assert result.sum() == 3000


WAYS: dict[str, Callable[[ms.Strategy, Arena], Any]] = {
    "reduce": lambda s, arena: s.reduce("SUM", arena),
    "all_reduce": lambda s, arena: all_reduce(s, "SUM", arena),
    "in the background": lambda s, arena: s.run(lambda: context().all_reduce_async("SUM", arena, out=arena).wait()),
    "reduce_to": lambda s, arena: s.extended.reduce_to("SUM", arena, arena),
}


def mappings() -> int:
    """Return how many pieces of shared memory of ours this process sees."""
    return len(re.findall(r"(/dev/shm/|memfd:)mpistrategy", Path("/proc/self/maps").read_text()))


@pytest.mark.parametrize(("where", "asked"), rows(1, STRATEGIES, WAYS))
def test_the_memory_is_back_when_close_returns(strategies: dict[str, ms.Strategy], where: str, asked: str) -> None:
    """Unless one of its arrays is still held; no garbage collection is needed."""
    strategy, way = strategies[where], WAYS[asked]
    gc.collect()
    gc.disable()
    for shared_result in (False, True) if asked != "in the background" else (False,):
        way(strategy, strategy.arena([np.zeros(COUNT)], shared_result=shared_result))  # what is made once is there
        before, files = mappings(), len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            with closing(strategy.arena([np.zeros(COUNT)], shared_result=shared_result)) as arena:
                arena.values[0][...] = 1
                way(strategy, arena)
                way(strategy, arena)
            assert mappings() <= before
            assert len(os.listdir("/proc/self/fd")) <= files
    arena = strategy.arena([np.zeros(COUNT), np.zeros(3)])
    kept: Any = arena.values[1]
    kept[...] = 1
    way(strategy, arena)
    arena.close()
    for _ in range(3):  # others take memory meanwhile
        way(strategy, strategy.arena([np.zeros(COUNT)]))
    gc.enable()
    assert kept.tolist() == [SIZE] * 3


# ------------------------------------------------------------------------------------- without shared memory


@pytest.mark.parametrize("shared_result", [False, True])
@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")
def test_one_replica_and_simulated_ones_have_arenas(shared_result: bool) -> None:
    for alone in (ms.OneDeviceStrategy(), ms.get_strategy()):
        arena = alone.arena({"a": np.zeros(3), "b": np.zeros((), np.int8)}, shared_result=shared_result)
        arena.values["a"][...] = [1, 2, 3]
        assert alone.reduce("SUM", arena)["a"].tolist() == [1, 2, 3]
        assert "this rank alone" in repr(arena)

    def program() -> list[float]:
        strategy = ms.MirroredStrategy()
        arena = strategy.arena([np.zeros(2, np.float16), np.zeros(1, np.float32)], shared_result=shared_result)
        arena.values[0][...] = strategy.replica_id_in_sync_group
        got: list[float] = strategy.reduce("SUM", arena)[0].tolist()
        strategy.extended.broadcast_to(arena, "CPU:0")
        return got

    assert ms.testing.run_replicas(program, 3) == [[3, 3]] * 3
    assert ms.testing.run_replicas(program, 3, nodes=[0, 1, 1]) == [[3, 3]] * 3


@several
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
            assert (np.asarray(all_reduce(strategy, op, arena)) == wanted).all()
            assert not shared_result or (arena.values == RANK + 1).all()
            arena.close()
