"""By every route each rank gets the same bits, wherever its array and its target lie; those of MIN and MAX are given.

-0.0 is less than +0.0; NaN wins, and is the one of NumPy.  A rank may bring an array that is not aligned, as read from
the middle of a file, or write to one, while the others do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from replicas import (
    ALL,
    BFLOAT16,
    DTYPES,
    LAYOUTS,
    RANK,
    RANKS,
    SIZE,
    OnNodes,
    bits,
    context,
    expected,
    laid_out,
    made,
    part_of,
    rows,
    same_everywhere,
    unaligned,
    value_of,
)

import mpistrategy as ms
from mpistrategy.arrays import dtypes
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.over_mpi import ranks as communicator
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.mpi

TWO = [rank % 2 for rank in RANKS]
UNEVEN = [min(rank, 1) for rank in RANKS]
LAST = f"task:{SIZE - 1}"


def without_shared_memory(node_of_rank: list[int]) -> ms.Strategy:
    """Return a strategy whose nodes have no room for memory that their ranks share."""
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(communicator, "share", lambda *arguments, **options: "no room")
        return OnNodes(node_of_rank, ms.MpiAllReduce())


STRATEGIES: dict[str, Callable[[], ms.Strategy]] = {
    "one node": ms.MirroredStrategy,
    "one node, hierarchical": lambda: ms.MirroredStrategy(cross_device_ops=ms.HierarchicalCopyAllReduce()),
    "one node, one device": lambda: ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice(LAST)),
    "one node, ordered": lambda: ms.MirroredStrategy(cross_device_ops=ms.OrderedAllReduce()),
    "one node, no shared memory": lambda: without_shared_memory([0 for _ in RANKS]),
    "nodes": lambda: OnNodes(TWO, ms.MpiAllReduce()),
    "nodes, hierarchical": lambda: OnNodes(UNEVEN, ms.HierarchicalCopyAllReduce()),
    "nodes, one device": lambda: OnNodes(TWO, ms.ReductionToOneDevice(LAST)),
    "nodes, ordered": lambda: OnNodes(TWO, ms.OrderedAllReduce()),
    "nodes, no shared memory": lambda: without_shared_memory(UNEVEN),
    "every rank a node": lambda: OnNodes(list(RANKS), ms.MpiAllReduce()),
}
#: More than 3 ranks have nodes of 2; fewer show the others.
NAMES = [name for name in STRATEGIES if SIZE <= 3 or ALL or name.startswith("nodes")]


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    yield from made(STRATEGIES)


# ------------------------------------------------------------------------------------- values, and what must come out


def nans_of(dtype: np.dtype[Any]) -> Array:
    """Return NaN of several patterns: of either sign, with a payload, and signaling."""
    if dtype.char in "gG":
        return np.array([np.nan, -np.longdouble(np.nan)], dtype)
    infinite = int(np.array(np.inf, dtype).view(f"u{dtype.itemsize}")[()])
    quiet = int(np.array(np.nan, dtype).view(f"u{dtype.itemsize}")[()])
    sign = 1 << (8 * dtype.itemsize - 1)
    patterns = [quiet, sign | quiet, quiet | 5, sign | quiet | 3, infinite | 1]
    return np.array(patterns, f"u{dtype.itemsize}").view(dtype)


def special(rank: int, dtype: Any, shape: Any, seed: int = 0) -> Array:
    """Return rank's array, of numbers that a minimum may take for each other: zeros, NaN, the least above zero."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "fV":
        return value_of(rank, dtype, shape, seed)
    random = np.random.default_rng([seed, rank])
    with np.errstate(all="ignore"):
        least = np.nextafter(np.array(0, dtype), np.array(1, dtype)).astype(dtype)
        plain = np.array([0, -0.0, 0, -0.0, 1, -1, np.inf, -np.inf, least, -least], dtype)
    chosen = np.concatenate([np.tile(plain, 3), nans_of(dtype)])
    return np.asarray(chosen[random.integers(0, chosen.size, shape)])


def right(op: str, arrays: list[Array]) -> Array:
    """Return the minimum, or the maximum, by the definition."""
    dtype = arrays[0].dtype
    least = op == "MIN"
    if dtype.kind in "iu":
        return np.asarray((np.min if least else np.max)(np.stack(arrays), axis=0))
    with np.errstate(all="ignore"):
        wide = np.stack([array.astype(np.longdouble) for array in arrays])
        is_nan, signs = np.isnan(wide), np.stack([np.signbit(array.astype(np.longdouble)) for array in arrays])
        found = (np.min if least else np.max)(np.where(is_nan, 0, wide), axis=0)
        negative = signs.any(axis=0) if least else signs.all(axis=0)
        found = np.where(found == 0, np.where(negative, -np.longdouble(0), np.longdouble(0)), found)
        return np.asarray(np.where(is_nan.any(axis=0), np.longdouble(np.nan), found).astype(dtype))


FLOATS = [dtype for dtype in DTYPES if dtype.kind == "f" or dtype == BFLOAT16]


@pytest.mark.one_rank
@pytest.mark.parametrize("dtype", [np.dtype(each) for each in ("float16", "float32", "float64", "longdouble", "int8")])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (97,), (1001,)], ids=str)
def test_extremes_are_commutative_associative_and_as_defined(
    dtype: np.dtype[Any], shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "_CHUNK_BYTES", 1024)
    one, other, third = (special(rank, dtype, shape) for rank in range(3))
    with np.errstate(all="ignore"):
        for op, combine in (("MIN", dtypes.minimum), ("MAX", dtypes.maximum)):
            wanted = bits(right(op, [one, other]))
            for these, those in ((one, other), (other, one), (unaligned(one), other)):
                assert bits(combine(these, those)) == wanted
                for out in (np.empty(shape, dtype), unaligned(one), np.empty((*shape, 2), dtype)[..., 0]):
                    assert combine(these, those, out=out) is out
                    assert bits(out) == wanted
                into_one, into_other = these.copy(), those.copy()
                assert bits(combine(into_one, those, out=into_one)) == wanted
                assert bits(combine(these, into_other, out=into_other)) == wanted
            left, right_ = combine(combine(one, other), third), combine(one, combine(other, third))
            assert bits(left) == bits(right_) == bits(right(op, [one, other, third]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1]], ids=str)
@pytest.mark.one_rank
def test_simulated_ranks(dtype: np.dtype[Any], op: str, nodes: list[int]) -> None:
    def program() -> Any:
        strategy = ms.MirroredStrategy()
        mine = special(strategy.extended.communicator.rank, dtype, (300,))
        return strategy.reduce(op, mine), strategy.reduce(op, mine, axis=0)

    wanted = right(op, [special(rank, dtype, (300,)) for rank in range(3)])
    for found, along in run_replicas(program, 3, nodes=nodes):
        assert bits(found) == bits(wanted)
        assert bits(along) == bits(right(op, list(wanted)))


# ------------------------------------------------------------------------------------- by every route

#: Where results are written to; another place on each rank.
TARGETS: list[Callable[[Array], Array]] = [
    np.empty_like,
    unaligned,
    lambda like: np.empty((*like.shape, 2), like.dtype)[..., 1],
]


def target_for(like: Array, layout: int) -> Array:
    native = like if like.dtype.isnative else like.astype(like.dtype.newbyteorder("="))
    return TARGETS[(layout + RANK) % len(TARGETS)](np.asarray(native, order="C"))


def in_step(strategy: ms.Strategy, *arguments: Any, **options: Any) -> Any:
    return strategy.run(lambda: context().all_reduce(*arguments, **options))


def several_times(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    """The first calls of a size go another way than those after them."""
    results = [in_step(strategy, op, value) for _ in range(4)]
    assert len({bits(result) for result in results}) == 1
    return results[-1]


def into(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    out = target_for(value, layout)
    assert in_step(strategy, op, value, out=out) is out
    return out


def in_place(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    own = target_for(value, layout)
    own[...] = value
    assert in_step(strategy, op, own, out=own) is own
    return own


def in_a_nest(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    others = {"b": [value[:1] if value.ndim else value], "c": np.float32(RANK)}
    return in_step(strategy, op, {"a": value, **others})["a"]


def into_a_nest(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    nest = [value, np.ones(3, value.dtype)]
    out = [target_for(array, layout + at) for at, array in enumerate(nest)]
    return in_step(strategy, op, nest, out=out)[0]


def in_the_background(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    out = target_for(value, layout)
    handles = strategy.run(lambda: [context().all_reduce_async(op, value, out=out) for _ in range(2)])
    results = [handle.wait() for handle in handles]
    assert results[0] is out
    return out


def in_an_arena(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    arena = strategy.arena({"a": value, "empty": value.reshape(-1)[:0]}, shared_result=bool(layout % 2))
    arena.values["a"][...] = value
    result = in_step(strategy, op, arena)["a"].copy()
    arena.close()
    return result


def with_bfloat16_between_nodes(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    # Sums would be rounded; all other things travel as they are.
    options = ms.CommunicationOptions(wire="bfloat16") if op != "SUM" else None
    return in_step(strategy, op, value, options)


def with_small_packs(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    return in_step(strategy, op, [value, value], ms.CommunicationOptions(bytes_per_pack=100))[1]


def to_one_rank_and_from_there(strategy: ms.Strategy, op: str, value: Array, layout: int) -> Any:
    there = strategy.extended.reduce_to(op, ms.PerReplica((value,)), LAST)
    told = np.zeros(value.nbytes, np.uint8)
    if RANK == SIZE - 1:
        told[...] = np.frombuffer(np.asarray(there.numpy()).tobytes(), np.uint8)
    MPI.COMM_WORLD.Bcast(told, SIZE - 1)
    native = value.dtype if value.dtype.isnative else value.dtype.newbyteorder("=")
    return told.view(native).reshape(value.shape)


WAYS = {
    way.__name__: way
    for way in (
        several_times, into, in_place, in_a_nest, into_a_nest, in_the_background, in_an_arena,
        with_bfloat16_between_nodes, with_small_packs, to_one_rank_and_from_there,
    )
}  # fmt: skip


def check(strategy: ms.Strategy, way: str, op: str, dtype: Any, shape: Any, layout: int, seed: int = 0) -> None:
    make = special if op in ("MIN", "MAX") else value_of  # of the latter sums are exact in any order
    everyone = [make(rank, dtype, shape, seed) for rank in RANKS]
    mine = laid_out(everyone[RANK], layout + RANK)
    before = bits(mine)
    found = np.asarray(WAYS[way](strategy, op, mine, layout))
    assert bits(mine) == before
    wanted = expected(op, everyone) if op == "SUM" else right(op, everyone)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if SIZE > 1 or op == "SUM":  # one replica's value is its own minimum as it is
        zero = found.dtype.type(0)
        given = (found + zero, wanted + zero) if op == "SUM" else (found, wanted)
        assert bits(given[0]) == bits(given[1])
    assert same_everywhere(found)


@pytest.mark.parametrize(("name", "way"), rows(2, NAMES, WAYS))
def test_unaligned_arrays_and_targets_on_some_ranks(strategies: dict[str, ms.Strategy], name: str, way: str) -> None:
    for op in ("SUM", "MIN", "MAX"):
        for shape in ((), (5,), (3001,), (70_001,)):
            check(strategies[name], way, op, "float32", shape, LAYOUTS.index(unaligned))


shapes = st.sampled_from([(), (0,), (1,), (7,), (13, 3), (3001,), (70_001,), (3, 50, 401)])


@settings(max_examples=part_of(120))
@given(
    name=st.sampled_from(NAMES),
    way=st.sampled_from(list(WAYS)),
    op=st.sampled_from(["SUM", "MIN", "MAX", "MIN", "MAX"]),
    dtype=st.sampled_from(DTYPES),
    shape=shapes,
    layout=st.integers(0, len(LAYOUTS) - 1),
    seed=st.integers(0, 99),
)
def test_the_bits_of_every_route(
    strategies: dict[str, ms.Strategy], name: str, way: str, op: str, dtype: Any, shape: Any, layout: int, seed: int
) -> None:
    if dtype.kind == "c":
        op = "SUM"
    check(strategies[name], way, op, dtype, shape, layout, seed)


# ------------------------------------------------------------------------------------- what else takes arrays


def odd(array: Any) -> Array:
    """Return an array that is not aligned on the last rank, and is on the others."""
    array = np.asarray(array)
    return unaligned(array) if RANK == SIZE - 1 else array


def gradients(strategy: ms.Strategy, size: int) -> Any:
    with strategy.scope():
        variable = ms.Variable(odd(np.ones(size, np.float32)))
    optimizer = ms.optimizers.SGD(0.5)
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients([(odd(np.full(size, RANK + 1, np.float32)), variable)]))
    return variable, 1 - 1.5 * SIZE * (SIZE + 1) / 2


def assigned(strategy: ms.Strategy, size: int) -> Any:
    with strategy.scope():
        variable = ms.Variable(np.zeros(size, np.float32), aggregation="SUM")
    strategy.run(lambda: variable.assign(odd(np.full(size, RANK + 1, np.float32))))
    strategy.run(lambda: variable.assign_add(odd(np.full(size, RANK + 1, np.float32))))
    return variable, SIZE * (SIZE + 1)


def assigned_outside(strategy: ms.Strategy, size: int) -> Any:
    with strategy.scope():
        variable = ms.Variable(np.zeros(size, np.float32), aggregation="ONLY_FIRST_REPLICA")
    variable.assign(odd(np.full(size, 3, np.float32)))
    strategy.run(lambda: variable.assign_add(odd(np.full(size, RANK + 1, np.float32))))
    return variable, 4


def scattered(strategy: ms.Strategy, size: int) -> Any:
    with strategy.scope():
        variable = ms.Variable(np.zeros((size, 2), np.float32), aggregation="SUM")
    slices = ms.IndexedSlices(odd(np.full((size, 2), RANK + 1, np.float32)), odd(np.arange(size)), (size, 2))
    strategy.run(lambda: variable.scatter_add(slices))
    return variable, SIZE * (SIZE + 1) / 2


def sparse(strategy: ms.Strategy, size: int) -> Any:
    slices = ms.IndexedSlices(odd(np.full((size, 2), RANK + 1, np.float32)), odd(np.arange(size)), (size, 2))
    return in_step(strategy, "SUM", slices).to_dense(), SIZE * (SIZE + 1) / 2


def broadcast(strategy: ms.Strategy, size: int) -> Any:
    sent = odd(np.full(size, RANK + 7, np.float32))
    return strategy.extended.broadcast_to(sent, sent).numpy(), 7


def gathered(strategy: ms.Strategy, size: int) -> Any:
    rows = odd(np.full((size + RANK, 2), 9, np.float32))
    found = strategy.gather(rows, 0)
    assert found.shape == (SIZE * size + SIZE * (SIZE - 1) // 2, 2)
    return found, 9


def weighted(strategy: ms.Strategy, size: int) -> Any:
    return in_step(strategy, "MEAN", odd(np.full(size, 4, np.float32)), weight=RANK + 1), 4


def along_an_axis(strategy: ms.Strategy, size: int) -> Any:
    return strategy.reduce("MEAN", odd(np.full((3, size), 4, np.float32)), axis=0), 4


def buckets(strategy: ms.Strategy, size: int) -> Any:
    with strategy.scope():
        variable = ms.Variable(np.zeros(size, np.float32))
    optimizer = ms.optimizers.SGD(1.0)
    parts = optimizer.gradient_buckets([variable])

    def step() -> None:
        parts.values[0][...] = odd(np.full(size, RANK + 1, np.float32))
        parts.ready(0)
        optimizer.apply_gradients(parts)

    strategy.run(step)
    return variable, -SIZE * (SIZE + 1) / 2


OTHERS = (
    gradients, assigned, assigned_outside, scattered, sparse, broadcast, gathered, weighted, along_an_axis, buckets,
)  # fmt: skip


@pytest.mark.parametrize(("name", "what"), rows(2, NAMES, OTHERS))
def test_unaligned_arrays_elsewhere(strategies: dict[str, ms.Strategy], name: str, what: Any) -> None:
    for size in (3, 5000, 80_000):
        found, value = what(strategies[name], size)
        np.testing.assert_array_equal(np.asarray(found), np.float32(value))
        assert same_everywhere(np.asarray(found))
