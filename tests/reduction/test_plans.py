"""The worked-out all-reduce, the general one and NumPy: the same bits, whichever way each rank goes."""

from __future__ import annotations

import functools
import gc
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import (
    BFLOAT16,
    DTYPES,
    RANK,
    RANKS,
    SIXTEEN_BITS,
    SIZE,
    bits,
    context,
    laid_out,
    outcomes,
    part_of,
    rows,
    same_everywhere,
    still_works,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import COMBINE, Array
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Thresholds, trying
from mpistrategy.reduction import plan
from mpistrategy.reduction.reducer import Reducer

pytestmark = pytest.mark.mpi

THRESHOLDS = {
    "the defaults": DEFAULT,
    "small ones": Thresholds(128, 1024, 4096, 512),
    "everything in the window": Thresholds(64, 0, 4096, 64),
    "nothing in the window": Thresholds(64, 2**40, 4096, 256),
}


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    made = {}
    for name, paths in THRESHOLDS.items():
        with trying(paths):
            made[name] = ms.MirroredStrategy()
    yield made
    for strategy in made.values():
        strategy.close()


def quick(strategy: ms.Strategy, op: Any, value: Any, **more: Any) -> Any:
    return strategy.run(lambda: context().all_reduce(op, value, **more))


class NoPlans(dict[Any, Any]):
    """Has the general way for all values."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def get(self, key: Any, default: Any = None) -> Any:
        general, *_, (_, argument), options, _, _ = key
        return general(self.reducer, argument, options)


def general(strategy: ms.Strategy, op: Any, value: Any, **more: Any) -> Any:
    """Look at the values anew; at the same place in the program."""
    reducer = strategy.extended._reducer
    reducer._plans, before = NoPlans(reducer), reducer._plans
    try:
        return quick(strategy, op, value, **more)
    finally:
        reducer._plans = before


def either(way: int, strategy: ms.Strategy, op: Any, value: Any, **more: Any) -> Any:
    """Go one way on some ranks and the other way on the others: bit r of `way` is rank r's."""
    return (general if way >> RANK & 1 else quick)(strategy, op, value, **more)


# ------------------------------------------------------------------------------------- values, and what is right


def in_rank_order(op: str, leaves: list[Any]) -> Array:
    """Return the reduction of all ranks' leaves by the definition: in rank order, rounded once."""
    arrays = [np.asarray(leaf) for leaf in leaves]
    dtype = arrays[0].dtype.newbyteorder("=")
    wide = np.dtype(np.float32) if dtype in SIXTEEN_BITS else dtype
    if op == "MEAN" and dtype.kind in "iu":
        wide = np.dtype(f"{dtype.kind}8")
    with np.errstate(all="ignore"):
        total = functools.reduce(COMBINE["SUM" if op == "MEAN" else op], [array.astype(wide) for array in arrays])
        total = np.asarray(total).astype(wide)
        if op == "MEAN" and dtype.kind in "iu":
            means = np.asarray(np.true_divide(total, len(arrays), dtype=np.float64))
            return means.astype(np.float32 if dtype.itemsize < 4 else np.float64)
        if op == "MEAN" and len(arrays) > 1:  # one rank divides nothing: NumPy makes inf+1j / 1 inf+nanj
            total = np.asarray(np.true_divide(total, wide.type(len(arrays))))
        return total.astype(dtype)


def brought(rank: int, dtype: Any, shape: tuple[int, ...], seed: int) -> Array:
    """Return rank's array: whole ranges of integers; of floats, numbers whose sums and products are exact."""
    random = np.random.default_rng([seed, rank])
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(random.integers(limits.min, limits.max, shape, np.dtype(dtype), endpoint=True))
    small = np.asarray([-2, -1, -0.5, 0.5, 1, 2, 0.0, 1.5, np.nan, np.inf])
    some = random.integers(0, 8, shape) if seed % 3 else random.integers(0, 10, shape)
    values = small[some] + (1j * small[random.integers(0, 6, shape)] if np.dtype(dtype).kind == "c" else 0)
    return np.asarray(values).astype(dtype)


NUMBERS: list[Callable[[int, int], Any]] = [
    lambda rank, seed: float(brought(rank, np.float64, (), seed)),
    lambda rank, seed: int(brought(rank, np.int64, (), seed)) >> 8,
    lambda rank, seed: seed - 10 * rank,
    lambda rank, seed: complex(rank, seed),
    lambda rank, seed: brought(rank, np.float32, (), seed)[()],
    lambda rank, seed: brought(rank, np.float64, (), seed)[()],
    lambda rank, seed: brought(rank, np.int32, (), seed)[()],
    lambda rank, seed: brought(rank, np.int64, (), seed)[()],
    lambda rank, seed: brought(rank, np.int8, (), seed)[()],
    lambda rank, seed: brought(rank, np.float16, (), seed)[()],
    lambda rank, seed: brought(rank, BFLOAT16, (), seed)[()],
    lambda rank, seed: brought(rank, np.longdouble, (), seed)[()],
]

# Around the borders of mailboxes, packs, windows, chunks and pieces, for items of every size.
sizes = st.sampled_from([0, 1, 2, 7, 15, 16, 17, 32, 63, 64, 65, 127, 128, 129, 257, 511, 513, 1024, 1025, 4097, 9001])
shapes = st.one_of(sizes.map(lambda n: (n,)), st.sampled_from([(), (0,), (2, 0, 3), (3, 5), (1,), (1, 1), (13, 4, 5)]))
an_array = st.tuples(st.sampled_from(DTYPES), shapes, st.integers(0, 5))
a_number = st.sampled_from(range(len(NUMBERS)))
leaves_of_one_kind = st.tuples(a_number, st.integers(1, 5)).map(lambda pair: [pair[0]] * pair[1])
leaves = st.one_of(
    st.lists(an_array, min_size=1, max_size=5),
    st.lists(st.one_of(an_array, a_number), min_size=1, max_size=6),
    leaves_of_one_kind,
    st.lists(an_array, min_size=18, max_size=20),
)


def leaf_of(rank: int, plan: Any, seed: int) -> Any:
    if isinstance(plan, int):
        return NUMBERS[plan](rank, seed)
    dtype, shape, layout = plan
    return laid_out(brought(rank, dtype, shape, seed), layout + rank)


def as_dict(parts: list[Any], rank: int) -> dict[str, Any]:
    """Each rank fills its dictionary in another order."""
    order = [(i + rank) % len(parts) for i in range(len(parts))]
    return {f"k{i}": parts[i] for i in order}


NESTS: list[Callable[[list[Any], int], Any]] = [
    lambda parts, rank: parts[0],
    lambda parts, rank: parts,
    lambda parts, rank: tuple(parts),
    as_dict,
    lambda parts, rank: {"z": as_dict(parts[1:], rank), "a": [parts[0]]},
    lambda parts, rank: [(parts[0], parts[1:]), {1: parts[0]}],
    lambda parts, rank: ({"only": parts[0]},),
    lambda parts, rank: {"only": parts[0]},
    lambda parts, rank: {"it's \n\"\\{0}": (parts[0],), "\ud800": {"": parts[1:], "leaf_0": []}, "a": parts[0]},
]


def assert_right(op: str, found: Any, everyones: list[Any]) -> None:
    leaf, right = np.asarray(found), in_rank_order(op, everyones)
    assert leaf.dtype == right.dtype
    assert leaf.dtype.isnative
    assert leaf.shape == right.shape
    is_number = not isinstance(everyones[0], np.ndarray)
    assert isinstance(found, np.generic) if is_number else isinstance(found, np.ndarray)
    nan = leaf != leaf
    assert np.array_equal(nan, right != right), "NaN wins"
    assert bits(leaf[~nan]) == bits(right[~nan])


@settings(max_examples=part_of(150))
@given(
    name=st.sampled_from(list(THRESHOLDS)),
    op=st.sampled_from(["SUM", "MEAN", "MIN", "MAX", "PROD", "sum", ms.ReduceOp.MEAN]),
    plan=leaves,
    shape=st.sampled_from(range(len(NESTS))),
    way=st.integers(0, 2**SIZE - 1),
    seed=st.integers(0, 1000),
)
def test_either_way_gives_the_reduction_in_rank_order(
    strategies: dict[str, ms.Strategy], name: str, op: Any, plan: list[Any], shape: int, way: int, seed: int
) -> None:
    verb = ms.ReduceOp._parse(op, "").name
    if verb in ("MIN", "MAX"):
        plan = [p if np.asarray(leaf_of(0, p, seed)).dtype.kind != "c" else (np.dtype("f8"), (3,), 0) for p in plan]
    values = [NESTS[shape]([leaf_of(rank, p, seed + i) for i, p in enumerate(plan)], rank) for rank in RANKS]
    mine = values[RANK]
    before = [bits(leaf) for leaf in nest.flatten(mine)[0]]
    everyones = [nest.flatten(value)[0] for value in values]
    for call in (quick, general, functools.partial(either, way)):
        result = call(strategies[name], op, mine)
        found, structure = nest.flatten(result)
        assert structure.text == nest.flatten(mine)[1].text
        if isinstance(mine, dict):
            assert list(result) == list(mine), "in this rank's own order"
        assert same_everywhere(found)
        for i, leaf in enumerate(found):
            assert_right(verb, leaf, [theirs[i] for theirs in everyones])
    assert [bits(leaf) for leaf in nest.flatten(mine)[0]] == before


OVERLAPS = ("value and out", "in place", "apart but for the ends", "one array")


@pytest.mark.parametrize(("name", "shift", "case"), rows(4, THRESHOLDS, [0, 1, 30, 300, 3000, 20000], OVERLAPS))
def test_overlapping_memory(strategies: dict[str, ms.Strategy], name: str, shift: int, case: str) -> None:
    """All is read before anything is written; where results overlap, the later one is seen."""
    size = 20000
    results = []
    for call in (quick, general):
        memory = np.arange(4.0 * size) * (RANK + 1)
        first, second = memory[:size], memory[size - shift : 2 * size - shift]
        if case == "value and out":
            value, out = [first, memory[3 * size :]], [second, memory[shift : size + shift][::-1]]
        elif case == "in place":
            value = out = [first, second]
        elif case == "one array":
            value, out = memory[:size], memory[shift : size + shift]
        else:
            value, out = [first, second], [memory[2 * size :][:size], memory[3 * size - shift :][:size]]
        call(strategies[name], "SUM", value, out=out)
        results.append(memory)
    assert bits(results[0]) == bits(results[1])
    memory = np.arange(4.0 * size) * sum(rank + 1 for rank in RANKS)
    if case == "one array":
        assert bits(results[0][shift : size + shift]) == bits(memory[:size])
    if case == "in place":
        kept = memory[: 2 * size - shift]
        assert bits(results[0][: 2 * size - shift]) == bits(kept)


@pytest.mark.parametrize(("name", "size", "way"), rows(2, THRESHOLDS, [1, 100, 10_000, 100_000], [quick, general]))
def test_in_place_where_the_memory_has_gaps(
    strategies: dict[str, ms.Strategy], name: str, size: int, way: Callable[..., Any]
) -> None:
    for as_list in (False, True):
        memory = np.ones((2, size, 2))
        value = memory[:, :, 0].T  # cannot be made flat without a copy
        way(strategies[name], "SUM", [value] if as_list else value, out=[value] if as_list else value)
        assert np.all(memory == [SIZE, 1]), "the result is there, and nowhere else"


BAD_OUT: dict[str, tuple[Callable[[Array], Any], type[Exception]]] = {
    "another dtype": (lambda x: np.empty(x.shape, np.float32), errors.ShapeError),
    "another shape": (lambda x: np.empty(x.size + 1), errors.ShapeError),
    "another structure": (lambda x: [np.empty_like(x)], errors.StructureError),
    "no array": (lambda x: list(x), errors.MpiStrategyError),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("bad", "size", "as_list"),
    rows(2, [*BAD_OUT, "read-only", "the read-only value"], [1, 100, 100_000], [False, True]),
)
def test_a_bad_out_on_one_rank_raises_everywhere(strategy: ms.Strategy, bad: str, size: int, as_list: bool) -> None:
    value = np.ones(size)
    out: Any = value if "value" in bad else np.empty_like(value)
    quick(strategy, "SUM", [value] if as_list else value, out=[out] if as_list else out)  # worked out already
    if RANK == SIZE - 1:
        if "read-only" in bad:
            out = value if "value" in bad else value.copy()
            out.flags.writeable = False
        else:
            out = BAD_OUT[bad][0](value)
    given_value, given_out = ([value], [out]) if as_list else (value, out)
    ends = outcomes(lambda: quick(strategy, "SUM", given_value, out=given_out))
    assert all(end.error is not None for end in ends), ends
    if bad in BAD_OUT:
        assert all(end.error is not None and issubclass(end.error, errors.MpiStrategyError) for end in ends), ends
    assert still_works(strategy)


def test_one_array_twice_in_out(strategy: ms.Strategy) -> None:
    both = [np.ones(3), np.ones(3)]
    for call in (quick, general):
        with pytest.raises(errors.StructureError, match="one array twice"):
            call(strategy, "SUM", both, out=[both[0], both[0]])


# ------------------------------------------------------------------------------------- ranks that differ

A, B = np.arange(6.0), {"a": 1.0, "b": 2.0}
DIFFERENT: list[tuple[tuple[Any, Any], tuple[Any, Any]]] = [
    (("SUM", A), ("SUM", A.astype(np.float32))),
    (("SUM", A), ("SUM", A.reshape(2, 3))),
    (("SUM", A), ("MEAN", A)),
    (("SUM", A), ("SUM", [A])),
    (("SUM", A), ("SUM", np.arange(60_000.0))),
    (("SUM", np.arange(60_000.0)), ("SUM", np.arange(60_001.0))),
    (("SUM", 1.0), ("SUM", 1)),
    (("SUM", 1.0), ("SUM", np.float32(1))),
    (("SUM", 1.0), ("SUM", np.ones(1))),
    (("SUM", [1.0]), ("SUM", (1.0,))),
    (("SUM", B), ("SUM", {"a": 1.0, "c": 2.0})),
    (("SUM", B), ("SUM", {"a": 1.0, "b": 2})),
    (("SUM", B), ("SUM", {"a": 1.0, "b": [2.0]})),
    (("SUM", {1: 1.0}), ("SUM", {True: 1.0})),
    (("SUM", {1: 1.0}), ("SUM", {1.0: 1.0})),
    (("SUM", {"1": 1.0}), ("SUM", {1: 1.0})),
    (("SUM", [A] * 20), ("SUM", [A] * 21)),
    (("SUM", [A] * 20), ("SUM", [A] * 19 + [A.reshape(6, 1)])),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", range(len(DIFFERENT)))
@pytest.mark.parametrize("odd_one", [0, SIZE - 1])
def test_different_calls_raise_everywhere(strategy: ms.Strategy, case: int, odd_one: int) -> None:
    usual, other = DIFFERENT[case]
    for known in (False, True):
        for way in (quick, general):
            mine = other if odd_one == RANK else usual
            ends = outcomes(lambda: (way if odd_one == RANK else quick)(strategy, *mine))  # noqa: B023
            assert [end.error for end in ends] == [errors.CollectiveMismatchError] * SIZE, ends
            assert len({end.text.partition(" at ")[0] for end in ends}) == 1
            if not known:
                for op, value in (usual, other):
                    quick(strategy, op, value)
            assert quick(strategy, "SUM", 1.0) == SIZE
    assert still_works(strategy)


BAD_LEAVES = [
    None,
    "text",
    True,
    np.array(["a"]),
    np.ones(3, bool),
    object(),
    2**63,
    -(2**63) - 1,
    np.datetime64(1, "s"),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bad", range(len(BAD_LEAVES)))
@pytest.mark.parametrize("nested", [False, True])
def test_a_bad_leaf_on_one_rank_raises_everywhere(strategy: ms.Strategy, bad: int, nested: bool) -> None:
    for good in (1.0, 1, np.ones(3), np.ones(30_000)):
        leaf = BAD_LEAVES[bad] if RANK == SIZE - 1 else good
        value = {"a": good, "b": leaf} if nested else leaf
        ends = outcomes(lambda: quick(strategy, "SUM", value))  # noqa: B023
        assert all(end.error is not None and issubclass(end.error, errors.MpiStrategyError) for end in ends), ends
        assert still_works(strategy)


def test_a_huge_int_is_unsigned_or_refused_as_the_general_way_does(strategy: ms.Strategy) -> None:
    assert quick(strategy, "SUM", 7) == 7 * SIZE
    for value in (2**63, [2**63, 2**63], {"a": 1, "b": 2**63}, 2**64, [1, 2**64]):
        ends = outcomes(lambda: quick(strategy, "MAX", value))  # noqa: B023
        same = outcomes(lambda: general(strategy, "MAX", value))  # noqa: B023
        assert ends == same


def test_keys_that_are_equal_but_not_the_same(strategy: ms.Strategy) -> None:
    for keys in ([1, "a"], [True, "a"], [1.0, "a"], [1], [True], [1.0], ["1"], [(1, "x")], [None]):
        value = {key: float(RANK + i) for i, key in enumerate(keys)}
        for call in (quick, quick, general):
            result = call(strategy, "SUM", value)
            assert list(map(repr, result)) == list(map(repr, keys))
            assert [float(v) for v in result.values()] == [sum(RANKS) + SIZE * i for i in range(len(keys))]


def test_one_place_in_the_program_that_sees_many_kinds(strategy: ms.Strategy) -> None:
    """What it saw last is at hand there, and is not taken for what it only resembles."""
    floats, whole = {"a": 1.5, "b": 2.0}, {"a": 1, "b": 2}
    others = [{"b": 2.0, "a": 1.5}, {"a": 1.5, "c": 2.0}, {"a": 1.5}, {**floats, "c": 3.0}, {"a": 1.5, "b": 2}]
    seen = [
        floats,
        whole,
        1.5,
        np.ones(2),
        floats,
        *others,
        whole,
        {"a": np.float32(1.5), "b": np.float32(2.0)},
        floats,
    ]
    for op in ("SUM", "MEAN"):
        for value in [*seen, *reversed(seen)]:
            found, right = (nest.flatten(way(strategy, op, value))[0] for way in (quick, general))
            assert [(type(leaf), bits(leaf)) for leaf in found] == [(type(leaf), bits(leaf)) for leaf in right]


def test_equal_dictionaries_that_were_filled_in_another_order(strategy: ms.Strategy) -> None:
    names = [f"n{i}" for i in range(7)]
    for kind in (float, int, np.float32, lambda x: np.full(4, float(x)), lambda x: [float(x)]):
        order = names[RANK:] + names[:RANK]
        for _ in range(3):
            result = quick(strategy, "SUM", {name: kind(names.index(name)) for name in order})
            assert list(result) == order
            for name in names:
                assert np.all(np.asarray(result[name]) == SIZE * names.index(name))


# ------------------------------------------------------------------------------------- numbers at their limits


LIMITS = [
    (np.float64, 1.7e308, np.inf),
    (np.float32, 3.4e38, np.inf),
    (np.float16, 6e4, np.inf),
    (BFLOAT16, 3.3e38, np.inf),
    (np.int32, 2**31 - 1, None),
    (np.int64, 2**63 - 1, None),
    (np.int8, 127, None),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("limits", "shape", "strict"), rows(2, LIMITS, [(), (5,), (3, 4000), (50_000,)], [False, True])
)
def test_overflow_does_not_warn(strategy: ms.Strategy, limits: Any, shape: tuple[int, ...], strict: bool) -> None:
    dtype, most, right = limits
    value = np.full(shape, most, dtype)
    with np.errstate(all="raise" if strict else "warn"):
        for given_value in (value, [value, value], value[()] if shape == () else {"a": value}):
            for call in (quick, general):
                for op in ("SUM", "PROD", "MEAN"):
                    first = np.asarray(nest.flatten(call(strategy, op, given_value))[0][0])
                    # a MEAN of such floats is divided in float32, between nodes in float64
                    if right is not None and not (op == "MEAN" and dtype in (np.float16, np.float32)):
                        assert np.all(first == right), (op, first)
    assert same_everywhere(first)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, 5000, 40_000])
def test_underflow_and_invalid_do_not_raise(strategy: ms.Strategy, dtype: Any, size: int) -> None:
    value = np.full(size, ml_dtypes.finfo(dtype).smallest_subnormal if RANK == 0 else 0, dtype)
    small = np.full(size, ml_dtypes.finfo(dtype).smallest_normal, dtype)
    infinite = np.full(size, np.inf if RANK else -np.inf, dtype)
    with np.errstate(all="raise"):
        for call in (quick, general):
            for out in (None, value.copy()):
                call(strategy, "MEAN", value, out=out)
                call(strategy, "PROD", small, out=out)
                assert np.isnan(np.asarray(call(strategy, "SUM", infinite, out=out), np.float32)).all()


# ------------------------------------------------------------------------------------- what is kept, and who may call


@pytest.mark.parametrize("way", [quick, general])
def test_nothing_keeps_the_values_alive(strategy: ms.Strategy, way: Callable[..., Any]) -> None:
    class Kept(dict[str, Any]):
        """A dictionary that can be watched."""

    class Hashed(np.ndarray):  # as tensors of torch are
        __hash__ = object.__hash__

    class Gamma(NamedTuple):
        shape: Any
        rate: Any

    for build in (
        lambda x: x,
        lambda x: [x],
        lambda x: {"a": x},
        lambda x: {"b": {"c": x}, "a": [x.copy()]},
        lambda x: [{"a": x}, (x.copy(),)],
        lambda x: ({"a": [x]},),
        lambda x: Kept(a=x),
        lambda x: Gamma(x.view(Hashed), x.copy()),
    ):
        for size in (3, 3000, 100_000):
            array = np.ones(size)
            watched = weakref.ref(array)
            result = way(strategy, "SUM", build(array))
            del array
            gc.collect()
            assert watched() is None, "the value is still referred to"
            watched = weakref.ref(nest.flatten(result)[0][0])
            del result
            gc.collect()
            assert watched() is None, "the result is still referred to"


@pytest.mark.mpi(min_size=2)
def test_a_failed_call_keeps_neither_its_value_nor_its_out(strategy: ms.Strategy) -> None:
    def reduce(size: int, seen: list[weakref.ref[Array]]) -> None:
        for name in ("SUM", "SUM" if RANK else "MAX"):  # the second time the plan is there, and the ranks differ
            value, out = np.ones(size), np.empty(size)
            seen[:] = weakref.ref(value), weakref.ref(out)
            quick(strategy, name, value, out=out)

    for size in (3, 3000, 100_000, 2**21):
        seen: list[weakref.ref[Array]] = []
        with pytest.raises(errors.CollectiveMismatchError):
            reduce(size, seen)
        gc.collect()
        assert [each() is None for each in seen] == [True, True]


def test_the_error_of_what_has_no_plan_tells_of_no_other(strategy: ms.Strategy) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(errors.StructureError) as caught:
        general(strategy, "SUM", endless)
    assert caught.value.__context__ is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("value", [1.0, np.ones(3), [1.0, 2.0], np.ones(100_000), {"a": [np.ones(2)]}])
def test_a_second_thread_is_refused(strategy: ms.Strategy, value: Any) -> None:
    """Rank 0's first thread waits in a quick call until the second one has been refused."""
    quick(strategy, "SUM", value)
    guard = strategy.extended.communicator.guard
    refusals: list[str] = []
    told = threading.Event()

    def second() -> None:
        while guard.current is None:
            pass
        for call in (quick, general):
            try:
                call(strategy, "SUM", value)
            except errors.ContextError as error:
                refusals.append(str(error))
        told.set()

    if RANK == 0:
        thread = threading.Thread(target=second)
        thread.start()
        total = quick(strategy, "SUM", value)
        thread.join()
    else:
        _wait_for_rank_0(strategy)
        total = quick(strategy, "SUM", value)
    if RANK == 0:
        assert len(refusals) == 2, refusals
        assert all("another thread is in ReplicaContext.all_reduce" in text for text in refusals)
    assert same_everywhere(total)
    assert still_works(strategy)


def _wait_for_rank_0(strategy: ms.Strategy) -> None:
    """Give the second thread of rank 0 time: only a bound, the test is right however long it takes."""
    mailboxes = strategy.extended.communicator.mailboxes
    if mailboxes is not None:
        theirs = mailboxes.slots[(mailboxes.sequence + 1) & 1].peers[0]
        while theirs[0] != mailboxes.sequence + 1:
            pass
    end = threading.Event()
    end.wait(0.3)


def test_other_threads_one_after_another(strategy: ms.Strategy) -> None:
    totals: list[Any] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: totals.append(quick(strategy, "SUM", [1.0, np.ones(3)])))
        thread.start()
        thread.join()
    assert [float(total[0]) for total in totals] == [SIZE] * 3


def test_more_kinds_of_values_than_are_remembered(strategy: ms.Strategy) -> None:
    for number in range(1100):
        assert quick(strategy, "SUM", np.ones((1 + number % 5, 1 + number))).sum() == SIZE * (1 + number % 5) * (
            1 + number
        )
    assert len(strategy.extended._reducer._plans) <= 1024
    assert quick(strategy, "SUM", {f"key {number}": 1.0 for number in range(50)})["key 7"] == SIZE
    assert still_works(strategy)


# ------------------------------------------------------------------------------------- weights


@settings(max_examples=part_of(30))
@given(
    way=st.integers(0, 15),
    dtype=st.sampled_from(["float32", "float64", "int32", "complex64", "float16", BFLOAT16]),
    shape=st.sampled_from([(), (1,), (3, 2), (3000,)]),
    weights=st.lists(st.integers(0, 5) | st.floats(0, 1e3), min_size=4, max_size=4),
    with_out=st.booleans(),
)
def test_a_weighted_mean_is_the_same_either_way(
    strategy: ms.Strategy, way: int, dtype: Any, shape: tuple[int, ...], weights: list[float], with_out: bool
) -> None:
    array = np.full(shape, 3 * RANK + 1).astype(dtype)
    value, weight = {"b": [array], "a": array.copy()}, weights[RANK]
    expected = general(strategy, "MEAN", value, weight=weight)
    out = nest.flatten(expected)[1].pack([np.empty_like(leaf) for leaf in nest.flatten(expected)[0]])
    more = {"out": out} if with_out and shape else {}
    for _ in range(2):
        found = either(way, strategy, "MEAN", value, weight=weight, **more)
        assert all(map(np.array_equal, map(bits, nest.flatten(found)[0]), map(bits, nest.flatten(expected)[0])))
        assert same_everywhere(found)
        assert not more or all(map(operator.is_, nest.flatten(found)[0], nest.flatten(out)[0]))


def test_a_call_that_a_signal_interrupts_leaves_no_digest_of_the_call_before(
    strategies: dict[str, ms.Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = strategies["the defaults"].extended._reducer

    def summed(name: str) -> Array:
        with Call(reducer.communicator.guard, "a test", name) as call:
            return reducer.all_reduce_arrays(call, ms.ReduceOp.SUM, [np.ones(3)])[0]

    def interrupted(signature: Signature) -> int:
        raise InterruptedError(signature.name)

    summed("one")
    with monkeypatch.context() as patched:
        if RANK == SIZE - 1:
            patched.setattr(plan, "digest_of", interrupted)
        assert all(end.error is not None for end in outcomes(lambda: summed("two")))
    assert (summed("two") == SIZE).all()
    assert not reducer.communicator.guard.flag_was_seen  # as digests of equal calls that differ would tell
