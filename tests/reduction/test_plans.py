"""One place in the program that sees many kinds of values and memory: what was prepared there is never misused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, bits, context, made, outcomes, rows, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Thresholds, trying
from mpistrategy.reduction import reducer

pytestmark = pytest.mark.mpi
several = pytest.mark.mpi(min_size=2)
THRESHOLDS = {
    "the defaults": DEFAULT,
    "everything in the window": Thresholds(64, 0, 4096, 64),
    "nothing in the window": Thresholds(64, 2**40, 4096, 256),
}


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    def make(thresholds: Thresholds) -> ms.Strategy:
        with trying(thresholds):
            return ms.MirroredStrategy()

    yield from made({name: lambda each=each: make(each) for name, each in THRESHOLDS.items()})


def reduced(strategy: ms.Strategy, value: Any, op: Any = "SUM", **more: Any) -> Any:
    return strategy.run(lambda: context().all_reduce(op, value, **more))


# ------------------------------------------------------------------------------------- kinds of values


def test_one_place_in_the_program_that_sees_many_kinds(strategy: ms.Strategy) -> None:
    """What it saw last is at hand there, and is not taken for what it only resembles."""
    floats, whole = {"a": 1.5, "b": 2.0}, {"a": 1, "b": 2}
    names = [f"n{i}" for i in range(7)]
    keys: list[list[Any]] = [[1, "a"], [True, "a"], [1.0, "a"], [1], [True], [1.0], ["1"], [(1, "x")], [None]]
    seen: list[Any] = [
        floats, whole, 1.5, np.ones(2), floats, {"b": 2.0, "a": 1.5}, {"a": 1.5, "c": 2.0}, {"a": 1.5},
        {**floats, "c": 3.0}, {"a": 1.5, "b": 2}, whole, {"a": np.float32(1.5), "b": np.float32(2.0)}, floats,
        *({key: float(at) for at, key in enumerate(each)} for each in keys),
        *({name: kind(names.index(name)) for name in (*names[RANK:], *names[:RANK])} for kind in (float, np.float32)),
        7,
    ]  # fmt: skip
    for op in ("MAX", "MEAN"):
        for value in [*seen, *reversed(seen), 2**63 if op == "MAX" else 0]:
            found = reduced(strategy, value, op)
            leaves, given = nest.flatten(found)[0], nest.flatten(value)[0]
            right = [np.asarray(each) if op == "MAX" else np.mean([each], axis=0, dtype=np.float64) for each in given]
            assert [float(np.max(leaf)) for leaf in leaves] == [float(np.max(each)) for each in right]
            if op == "MAX":
                assert [np.asarray(leaf).dtype for leaf in leaves] == [each.dtype for each in right]
            assert not isinstance(value, dict) or list(map(repr, found)) == list(map(repr, value))


A, B = np.arange(6.0), {"a": 1.0, "b": 2.0}
DIFFERENT: list[tuple[Any, Any]] = [
    (A, A.astype(np.float32)),
    (A, A.reshape(2, 3)),
    (A, [A]),
    (A, np.arange(60_000.0)),
    (np.arange(60_000.0), np.arange(60_001.0)),
    (1.0, 1),
    (1.0, np.float32(1)),
    (1.0, np.ones(1)),
    ([1.0], (1.0,)),
    (B, {"a": 1.0, "c": 2.0}),
    (B, {"a": 1.0, "b": 2}),
    (B, {"a": 1.0, "b": [2.0]}),
    ({1: 1.0}, {True: 1.0}),
    ({1: 1.0}, {1.0: 1.0}),
    ({"1": 1.0}, {1: 1.0}),
    ([A] * 20, [A] * 21),
    ([A] * 20, [A] * 19 + [A.reshape(6, 1)]),
]


@several
@pytest.mark.parametrize("case", range(len(DIFFERENT) + 1))
def test_different_calls_raise_everywhere(strategy: ms.Strategy, case: int) -> None:
    """Whether the place has seen them or not."""
    usual, other = (("SUM", each) for each in DIFFERENT[case]) if case < len(DIFFERENT) else (("SUM", A), ("MEAN", A))
    for odd_one in (0, SIZE - 1):
        op, value = other if odd_one == RANK else usual
        ends = outcomes(lambda: reduced(strategy, value, op))  # noqa: B023
        assert [end.error for end in ends] == [errors.CollectiveMismatchError] * SIZE, ends
        assert len({end.text.partition(" at ")[0] for end in ends}) == 1
        for op, value in (usual, other):
            reduced(strategy, value, op)
    assert still_works(strategy)


def test_more_kinds_of_values_than_are_remembered(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "_MOST_PLANS", 50)
    for number in range(120):
        assert reduced(strategy, np.ones(1 + number)).sum() == SIZE * (1 + number)
    assert len(strategy.extended._reducer._plans) <= 50
    assert reduced(strategy, {f"key {number}": 1.0 for number in range(50)})["key 7"] == SIZE


# ------------------------------------------------------------------------------------- memory

OVERLAPS = ("value and out", "in place", "apart but for the ends", "one array")


@pytest.mark.parametrize(("name", "shift", "case"), rows(2, THRESHOLDS, [0, 1, 300, 20000], OVERLAPS))
def test_overlapping_memory(strategies: dict[str, ms.Strategy], name: str, shift: int, case: str) -> None:
    """All is read before anything is written; where results overlap, the later one is seen."""
    size = 20000
    memory, total = np.arange(4.0 * size) * (RANK + 1), np.arange(4.0 * size) * sum(rank + 1 for rank in RANKS)
    first, second, third = slice(0, size), slice(size - shift, 2 * size - shift), slice(2 * size, 3 * size)
    places: list[tuple[slice, slice]] = {
        "value and out": [(first, second), (slice(3 * size, None), slice(shift, size + shift))],
        "in place": [(first, first), (second, second)],
        "apart but for the ends": [(first, third), (second, slice(3 * size - shift, 4 * size - shift))],
        "one array": [(first, slice(shift, size + shift))],
    }[case]
    right = memory.copy()
    for source, target in places:
        right[target] = total[source]
    value = [memory[source] for source, _ in places]
    out = value if case == "in place" else [memory[target] for _, target in places]
    if case == "one array":
        value, out = value[0], out[0]
    reduced(strategies[name], value, out=out)
    assert bits(memory) == bits(right)


@pytest.mark.parametrize(("name", "size"), rows(1, THRESHOLDS, [1, 100, 10_000, 100_000]))
def test_in_place_where_the_memory_has_gaps(strategies: dict[str, ms.Strategy], name: str, size: int) -> None:
    for as_list in (False, True):
        memory = np.ones((2, size, 2))
        value = memory[:, :, 0].T  # cannot be made flat without a copy
        reduced(strategies[name], [value] if as_list else value, out=[value] if as_list else value)
        assert np.all(memory == [SIZE, 1]), "the result is there, and nowhere else"


@several
@pytest.mark.parametrize(("size", "as_list", "in_place"), rows(1, [1, 100_000], [False, True], [False, True]))
def test_an_out_that_one_rank_cannot_write_any_more(
    strategy: ms.Strategy, size: int, as_list: bool, in_place: bool
) -> None:
    value = np.ones(size)
    out = value if in_place else np.empty_like(value)

    def call() -> Any:
        return reduced(strategy, [value] if as_list else value, out=[out] if as_list else out)

    call()
    out.flags.writeable = RANK != SIZE - 1
    assert all(end.error is not None for end in outcomes(call))
    both = [np.ones(3), np.ones(3)]
    with pytest.raises(errors.StructureError, match="one array twice"):
        reduced(strategy, both, out=[both[0], both[0]])
    assert still_works(strategy)


class Kept(dict[str, Any]):
    """A dictionary that can be watched."""


class Hashed(np.ndarray):  # as tensors of torch are
    __hash__ = object.__hash__


class Gamma(NamedTuple):
    shape: Any
    rate: Any


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x,
        lambda x: {"b": {"c": x}, "a": [x.copy()]},
        lambda x: [{"a": x}, (x.copy(),)],
        lambda x: Kept(a=x),
        lambda x: Gamma(x.view(Hashed), x.copy()),
        lambda x: ms.PerReplica((x,)),
    ],
)
def test_nothing_keeps_the_values_alive(strategy: ms.Strategy, build: Any) -> None:
    for size in (3, 3000, 100_000):
        array = np.ones(size)
        watched = [weakref.ref(array)]
        result = reduced(strategy, build(array))
        watched.append(weakref.ref(nest.flatten(result)[0][0]))
        del array, result
        gc.collect()
        assert [each() is None for each in watched] == [True, True]


@several
def test_a_failed_call_keeps_neither_its_value_nor_its_out(strategy: ms.Strategy) -> None:
    def reduce(size: int, seen: list[weakref.ref[Array]]) -> None:
        for op in ("SUM", "SUM" if RANK else "MAX"):  # the second time the plan is there, and the ranks differ
            value, out = np.ones(size), np.empty(size)
            seen[:] = weakref.ref(value), weakref.ref(out)
            reduced(strategy, value, op, out=out)

    for size in (3, 3000, 100_000, 2**21):
        seen: list[weakref.ref[Array]] = []
        with pytest.raises(errors.CollectiveMismatchError):
            reduce(size, seen)
        gc.collect()
        assert [each() is None for each in seen] == [True, True]
