"""A reduction is what NumPy makes of the ranks' arrays, however it is asked for and whatever route it takes.

Exact values: the bits are those of the reduction in rank order, rounded once.  Rounded values: the result lies within
the bound of the additions.  MIN and MAX: -0.0 is less than +0.0, NaN wins and is NumPy's.  All ranks get the same bits,
each with another memory layout.  Thresholds are so low that short arrays have many chunks, pieces and packs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import gpu_here
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from replicas import (
    ALL,
    DTYPES,
    LAYOUTS,
    RANK,
    RANKS,
    SIXTEEN_BITS,
    SIZE,
    OnNodes,
    all_reduce,
    bits,
    context,
    expected,
    laid_out,
    part_of,
    pieces_of,
    same_everywhere,
    unaligned,
    value_of,
)

import mpistrategy as ms
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.over_mpi import ranks as communicator
from mpistrategy.mpi.shared_memory import node_sum
from mpistrategy.mpi.shared_memory.segments import private_memory
from mpistrategy.mpi.tuning.thresholds import Thresholds, trying
from mpistrategy.reduction import transfer

pytestmark = pytest.mark.mpi

OPS = [op.name for op in ms.ReduceOp]
CHUNK = 4096
LAST = f"task:{SIZE - 1}"


# ------------------------------------------------------------------------------------- values, and what is right


def nans_of(dtype: np.dtype[Any]) -> Array:
    """Return NaN of several patterns: of either sign, with a payload, and signaling."""
    if dtype.char in "gG":
        return np.array([np.nan, -np.longdouble(np.nan)], dtype)
    infinite, quiet = (int(np.array(each, dtype).view(f"u{dtype.itemsize}")[()]) for each in (np.inf, np.nan))
    sign = 1 << (8 * dtype.itemsize - 1)
    patterns = [quiet, sign | quiet, quiet | 5, sign | quiet | 3, infinite | 1]
    return np.array(patterns, f"u{dtype.itemsize}").view(dtype)


def chosen_from(op: str, dtype: np.dtype[Any]) -> Array:
    """Return numbers whose products are exact; for MIN and MAX those that may be taken for each other."""
    if op == "PROD":
        factors = np.array([-2, -1, -0.5, 0.5, 1, 2, 0, 1.5])
        return (factors * (1 + 1j) if dtype.kind == "c" else factors).astype(dtype)
    with np.errstate(all="ignore"):
        least = np.nextafter(np.array(0, dtype), np.array(1, dtype)).astype(dtype)
        plain = np.array([0, -0.0, 0, -0.0, 1, -1, np.inf, -np.inf, least, -least], dtype)
    return np.concatenate([np.tile(plain, 3), nans_of(dtype)])


def array_of(op: str, rank: int, dtype: Any, shape: tuple[int, ...], seed: int, *, rounded: bool) -> Array:
    """Return rank's array."""
    dtype, random = np.dtype(dtype), np.random.default_rng([seed, rank])
    if dtype.kind in "iu":
        return value_of(rank, dtype, shape, seed)
    if op in ("MIN", "MAX") or (op == "PROD" and not rounded):
        some = chosen_from(op, dtype)
        return np.asarray(some[random.integers(0, some.size, shape)])
    if rounded:
        real = np.asarray(random.uniform(0.1, 4, shape) * random.choice([-1, 1], shape))
        return (real + 1j * random.uniform(0.1, 4, shape) if dtype.kind == "c" else real).astype(dtype)
    array = value_of(rank, dtype, shape, seed)
    if seed % 3 == 0 and dtype.kind != "c":
        array[random.random(shape) < 0.1] = random.choice([np.nan, np.inf])
    return array


def extreme(op: str, arrays: Sequence[Array]) -> Array:
    """Return the minimum, or the maximum, by the definition."""
    if SIZE == 1:
        return arrays[0]
    dtype, least = arrays[0].dtype, op == "MIN"
    if dtype.kind in "iu":
        return np.asarray((np.min if least else np.max)(np.stack(arrays), axis=0))
    wide = np.stack([array.astype(np.longdouble) for array in arrays])
    is_nan, signs = np.isnan(wide), np.stack([np.signbit(array.astype(np.longdouble)) for array in arrays])
    found = (np.min if least else np.max)(np.where(is_nan, 0, wide), axis=0)
    negative = signs.any(axis=0) if least else signs.all(axis=0)
    found = np.where(found == 0, np.where(negative, -np.longdouble(0), np.longdouble(0)), found)
    return np.asarray(np.where(is_nan.any(axis=0), np.longdouble(np.nan), found).astype(dtype))


@np.errstate(all="ignore")
def right(op: str, arrays: Sequence[Array]) -> Array:
    """Return the reduction by the definition: in rank order, rounded once."""
    if op in ("MIN", "MAX"):
        return extreme(op, arrays)
    if op != "PROD":
        return expected(op, arrays)
    dtype = arrays[0].dtype
    return np.asarray(np.prod(np.stack(arrays), axis=0, dtype=np.float32 if dtype in SIXTEEN_BITS else dtype), dtype)


def is_near(op: str, arrays: Sequence[Array], found: Array) -> bool:
    """Return whether a reduction of floats lies within the bound of its additions."""
    dtype = arrays[0].dtype
    wide = np.clongdouble if dtype.kind == "c" else np.longdouble
    together, combine, divisor = np.stack(arrays).astype(wide), np.sum, SIZE if op == "MEAN" else 1
    if op == "PROD":
        combine = np.prod
    total, most = combine(together, axis=0) / divisor, combine(abs(together), axis=0) / divisor
    bound = SIZE * np.finfo(np.float32 if dtype in SIXTEEN_BITS else dtype).eps * most
    if dtype in SIXTEEN_BITS:
        bound = bound + ml_dtypes.finfo(dtype).eps * abs(total)
    return bool(np.all(abs(found.astype(wide) - total) <= bound))


def native(leaf: Any) -> Array:
    """Return an array in C's order, of the processor's bytes."""
    array = np.asarray(leaf)
    return np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)


@np.errstate(all="ignore")  # of signaling NaN
def check(op: str, found: Any, everyones: Sequence[Sequence[Array]], *, rounded: bool) -> None:
    """Check the leaves of a result, given the arrays of all ranks for each."""
    leaves = list(map(native, nest.flatten(found)[0]))
    assert same_everywhere(leaves)
    for leaf, arrays in zip(leaves, everyones, strict=True):
        wanted = right(op, arrays)
        assert (leaf.dtype, leaf.shape) == (wanted.dtype, wanted.shape)
        if op in ("MIN", "MAX") and SIZE > 1:
            assert bits(leaf) == bits(wanted)
        elif rounded and op not in ("MIN", "MAX") and arrays[0].dtype.kind not in "iu":
            assert is_near(op, arrays, leaf)
        else:  # 0.0 and -0.0 are one number, and so are NaN
            assert np.all((leaf == wanted) | ((leaf != leaf) & (wanted != wanted)))


# ------------------------------------------------------------------------------------- the routes

LOW = Thresholds(64, 0, CHUNK, 512)
BY_MPI = Thresholds(64, 2**40, CHUNK, 512, lanes_bytes=2**40)
TWO, UNEVEN = [rank % 2 for rank in RANKS], [min(rank, 1) for rank in RANKS]


@dataclass(frozen=True)
class Route:
    """A strategy, the thresholds that it is made with, and what `explain` says of each buffer: one of these words."""

    words: tuple[str, ...]
    strategy: Callable[[], ms.Strategy] = ms.MirroredStrategy
    thresholds: Thresholds = LOW


def by(algorithm: Callable[[], ms.CrossDeviceOps]) -> Callable[[], ms.Strategy]:
    return lambda: ms.MirroredStrategy(cross_device_ops=algorithm())


def on(node_of_rank: Sequence[int], algorithm: Callable[[], ms.CrossDeviceOps] = ms.MpiAllReduce) -> Any:
    return lambda: OnNodes(node_of_rank, algorithm())


def without_shared_memory(node_of_rank: Sequence[int]) -> Callable[[], ms.Strategy]:
    """Return what makes a strategy whose nodes have no room for memory that their ranks share."""

    def make() -> ms.Strategy:
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patched.setattr(communicator, "share", lambda nbytes, *_, **options: (private_memory(nbytes), "no room"))
            return OnNodes(node_of_rank, ms.MpiAllReduce())

    return make


ON_NODE, FIRST, ALLREDUCE = "through memory of the node", "in the first message of the call", "by MPI's Allreduce"
ROOT, SHARES = "by MPI's Reduce to one rank", "from rank to rank"
#: On nodes of one rank each, MPI does it all.
LANES = "by MPI's Allreduce between the nodes" if 2 * len({*TWO}) <= SIZE else ALLREDUCE
ALL_LANES = replace(LOW, lanes_bytes=1)
ROUTES = {
    "mailboxes": Route(("in the ranks' mailboxes",), thresholds=Thresholds(2**19, 1, CHUNK, 512)),
    "one node": Route((ON_NODE,)),
    "one node, hierarchical": Route((ON_NODE, "in the ranks' mailboxes"), by(ms.HierarchicalCopyAllReduce)),
    "two nodes": Route((LANES, FIRST), on(TWO), ALL_LANES),
    "two nodes, uneven": Route((ALLREDUCE, FIRST), on(UNEVEN), ALL_LANES),
    "two nodes, hierarchical": Route((ALLREDUCE,), on(TWO, ms.HierarchicalCopyAllReduce)),
    "nodes of one rank": Route((ALLREDUCE,), on(RANKS, lambda: ms.HierarchicalCopyAllReduce(3))),
    "MPI": Route((ALLREDUCE,), thresholds=BY_MPI),
    "MPI, two nodes": Route((ALLREDUCE, FIRST), on(TWO), BY_MPI),
    "root": Route((ROOT,), by(ms.ReductionToOneDevice)),
    "root, two nodes": Route((ROOT,), on(TWO, lambda: ms.ReductionToOneDevice(LAST))),
    "ordered, one node": Route((ON_NODE,), by(ms.OrderedAllReduce)),
    "ordered, two nodes": Route((SHARES,), on(TWO, ms.OrderedAllReduce)),
    "no shared memory": Route((ALLREDUCE, FIRST), without_shared_memory([0 for _ in RANKS])),
    "no shared memory, two nodes": Route((ALLREDUCE, FIRST), without_shared_memory(UNEVEN)),
}
#: More than 3 ranks have nodes of 2; fewer show the other routes.
NAMES = [name for name in ROUTES if SIZE <= 3 or ALL or "two nodes" in name]
Strategies = Callable[[str], ms.Strategy]


@pytest.fixture(scope="module")
def strategies() -> Iterator[Strategies]:
    """Return what gives a strategy by the name of its route.  What the ranks combine at a time is short, too."""
    made: dict[str, ms.Strategy] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.setattr(node_sum, "_CACHE_BYTES", CHUNK)
        patched.setattr(node_sum, "_LEAST_PIECE_BYTES", 256)
        patched.setattr(transfer, "_LEAST_DIRECT", 1)

        def make(name: str) -> ms.Strategy:
            if name not in made:
                with trying(ROUTES[name].thresholds):
                    made[name] = stack.enter_context(closing(ROUTES[name].strategy()))
            return made[name]

        yield make


def assert_took(words: Sequence[str], strategy: ms.Strategy, value: Any, op: str) -> None:
    """Check that every buffer of a value takes this route, unless one node pretends to be several."""
    lines = [line for line in strategy.explain(value, op).splitlines()[1:-1] if line[2] != " "]
    if "MPIR_CVAR_NUM_CLIQUES" not in os.environ and SIZE > 1:
        assert lines, "explain says nothing of the buffers, or in other words"
        assert all(any(word in line for word in words) for line in lines if " 0 B:" not in line), lines


# ------------------------------------------------------------------------------------- the ways to ask


def again(strategy: ms.Strategy, op: str, value: Any, layout: int) -> Any:
    """The first call of a place and the later ones differ inside."""
    results = [all_reduce(strategy, op, value) for _ in range(3)]
    kept = {b"".join(map(bits, nest.flatten(result)[0])) for result in results}
    assert len(kept) == 1
    return results[0]


def looked_at_each_time(strategy: ms.Strategy, op: str, value: Any, layout: int) -> Any:
    """The values of some ranks have no plan."""
    is_odd = (layout + RANK) % 2
    return again(strategy, op, nest.map_structure(lambda leaf: ms.PerReplica((leaf,)), value) if is_odd else value, 0)


def target_for(op: str, leaf: Array, layout: int) -> Array:
    """Return memory for a result, of another kind on each rank."""
    dtype = expected(op, [native(leaf)]).dtype if op == "MEAN" else native(leaf).dtype
    writeable = [0, 1, 2, 3, 4, 6]
    return laid_out(np.zeros(leaf.shape, dtype), writeable[(layout + RANK) % 6])


def into(strategy: ms.Strategy, op: str, value: Any, layout: int) -> Any:
    leaves, structure = nest.flatten(value)
    if not all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return all_reduce(strategy, op, value)
    targets = [target_for(op, leaf, layout + at) for at, leaf in enumerate(leaves)]
    found = all_reduce(strategy, op, value, out=structure.pack(targets))
    assert all(leaf is target for leaf, target in zip(nest.flatten(found)[0], targets, strict=True))
    return found


def in_place(strategy: ms.Strategy, op: str, value: Any, layout: int) -> Any:
    leaves, structure = nest.flatten(value)
    if not all(isinstance(leaf, np.ndarray) and (op != "MEAN" or leaf.dtype.kind not in "iu") for leaf in leaves):
        return all_reduce(strategy, op, value)
    targets = [target_for(op, leaf, layout + at) for at, leaf in enumerate(leaves)]
    for target, leaf in zip(targets, leaves, strict=True):
        target[...] = leaf
    own = structure.pack(targets)
    return all_reduce(strategy, op, own, out=own)


def in_the_background(strategy: ms.Strategy, op: str, value: Any, layout: int) -> Any:
    handles = strategy.run(lambda: [context().all_reduce_async(op, value) for _ in range(2)])
    return [handle.wait() for handle in handles][layout % 2]


def in_an_arena(strategy: ms.Strategy, op: str, value: Any, layout: int) -> Any:
    leaves = nest.flatten(value)[0]
    if op == "MEAN" and any(np.asarray(leaf).dtype.kind in "iu" for leaf in leaves):
        return all_reduce(strategy, op, value)  # a mean of integers has another dtype: refused
    with closing(strategy.arena(value, shared_result=layout % 2 == 0)) as arena:
        for _ in range(2):  # in the same memory
            targets = nest.flatten(arena.values)[0]
            for target, leaf in zip(targets, leaves, strict=True):
                target[...] = leaf
            found = all_reduce(strategy, op, arena)
        for target, leaf in zip(targets, leaves, strict=True) if layout % 2 == 0 else ():
            assert bits(target) == bits(np.asarray(leaf, target.dtype)), "its own values were changed"
        return nest.map_structure(np.array, found)


def with_options(strategy: ms.Strategy, op: str, value: Any, layout: int) -> Any:
    """Small packs; and bfloat16 between nodes, which rounds sums alone."""
    wire = "bfloat16" if op in ("MIN", "MAX", "PROD") else None
    options = ms.CommunicationOptions(bytes_per_pack=(0, 1, 8, 100, 1024)[layout % 5], wire=wire)
    return all_reduce(strategy, op, value, options=options)


def outside(strategy: ms.Strategy, op: str, value: Any, layout: int) -> Any:
    if layout % 2:
        return strategy.reduce(op, value)
    leaves, structure = nest.flatten(value)
    return structure.pack([each.numpy() for each in strategy.extended.batch_reduce_to(op, [(x, x) for x in leaves])])


def to_one_rank(strategy: ms.Strategy, op: str, value: Any, layout: int) -> Any:
    """Return what the last rank got, from there."""
    leaves, structure = nest.flatten(value)
    there = strategy.extended.batch_reduce_to(op, [(ms.PerReplica((leaf,)), LAST) for leaf in leaves])
    own = [each.numpy() for each in there] if RANK == SIZE - 1 else None
    return structure.pack(MPI.COMM_WORLD.bcast(own, SIZE - 1))


WAYS = (
    again, looked_at_each_time, into, in_place, in_the_background, in_an_arena, with_options, outside, to_one_rank,
)  # fmt: skip


# ------------------------------------------------------------------------------------- the tables

Make = Callable[..., Array]
VALUES: dict[str, Callable[[Make], Any]] = {
    "a float": lambda make: float(make("float64", ())),
    "an int": lambda make: int(make("int64", ())),
    "an array": lambda make: make("float32", (5003,)),
    "whole chunks": lambda make: make("int32", (8, CHUNK // 4)),
    "Fortran's order": lambda make: np.asfortranarray(make("int64", (29, 43))),
    "unaligned on a rank": lambda make: (unaligned if RANK == SIZE - 1 else np.array)(make("float32", (3001,))),
    "another byte order on a rank": lambda make: make("float64", (41, 61)).astype(f"{'>' if RANK % 2 else '<'}f8"),
    "a nest": lambda make: {
        "w": [make("float32", (33, 50)), make("float32", (50,), 1)],
        "b": (float(make("float64", ())),),
    },
    "many small ones": lambda make: [make("float32", (1 + i % 12,), i) for i in range(40)],
    "many dtypes": lambda make: [make(dtype, (501,), i) for i, dtype in enumerate(DTYPES) if dtype.kind != "c"],
    "large and small": lambda make: [make("float32", (n,), n) for n in (3000, 1, 5, 2000, 0, 7)],
}
#: Routes whose strategies have mailboxes, which take what is tiny.
LISTS, TINY = ("one node", "MPI"), ("a float", "an int")
ON_THE_HOST_ONLY = ("a float", "an int", "a nest", "many dtypes", "another byte order on a rank")
ON_GPUS = [name for name in VALUES if name not in ON_THE_HOST_ONLY]


def values_of(value: str, op: str) -> tuple[Any, list[list[Array]]]:
    """Return this rank's value, and the arrays of all ranks for each leaf."""

    def make(rank: int, dtype: Any, shape: tuple[int, ...], seed: int = 1) -> Array:
        return array_of(op, rank, dtype, shape, seed, rounded=True)

    every = [nest.flatten(VALUES[value](partial(make, rank)))[0] for rank in RANKS]
    return VALUES[value](partial(make, RANK)), [list(map(native, leaves)) for leaves in zip(*every, strict=True)]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in NAMES for v in VALUES if not (n in LISTS and v in TINY)])
def test_in_the_hosts_memory(strategies: Strategies, name: str, value: str) -> None:
    strategy, place = strategies(name), NAMES.index(name) + list(VALUES).index(value)
    for row, op in enumerate(OPS):
        mine, everyones = values_of(value, op)
        assert_took(ROUTES[name].words, strategy, mine, op)
        for column, ask in enumerate(WAYS):
            if not ALL and column and (place + row + column) % len(OPS):
                continue  # each way with one operation of each value; MPISTRATEGY_TEST_ALL=1 tries them all
            check(op, ask(strategy, op, mine, place), everyones, rounded=True)


@pytest.mark.skipif(SIZE > 3 and not ALL, reason="three ranks show it")
@pytest.mark.parametrize("value", ON_GPUS)
@pytest.mark.parametrize("path", gpu_here.PATHS)
def test_in_gpu_memory(cupy: Any, monkeypatch: pytest.MonkeyPatch, path: str, value: str) -> None:
    monkeypatch.setenv("MPISTRATEGY_GPU_PATH", path)
    with closing(gpu_here.strategy()) as strategy:
        for op in OPS:
            mine, everyones = values_of(value, op)
            placed = nest.map_structure(cupy.asarray, mine)
            for with_out in (False, True, False):
                out = None
                if with_out and (op != "MEAN" or all(arrays[0].dtype.kind not in "iu" for arrays in everyones)):
                    out = nest.map_structure(lambda leaf: cupy.zeros(leaf.shape, leaf.dtype), placed)
                found = all_reduce(strategy, op, placed, out=out)
                check(op, nest.map_structure(cupy.asnumpy, found), everyones, rounded=True)
            assert_took((f"({path}: ",), strategy, placed, op)


# ------------------------------------------------------------------------------------- any values


def as_dict(parts: list[Any], rank: int) -> dict[str, Any]:
    """Each rank fills its dictionary in another order."""
    return {f"k{i}": parts[i] for i in ((number + rank) % len(parts) for number in range(len(parts)))}


NESTS: list[Callable[[list[Any], int], Any]] = [
    lambda parts, rank: parts[0],
    lambda parts, rank: parts,
    lambda parts, rank: tuple(parts),
    as_dict,
    lambda parts, rank: {"z": as_dict(parts[1:], rank), "a": [parts[0]]},
    lambda parts, rank: [(parts[0], parts[1:]), {1: parts[0]}],
    lambda parts, rank: {"it's \n\"\\{0}": (parts[0],), "\ud800": {"": parts[1:], "leaf_0": []}, "a": parts[0]},
]
#: Beyond the layouts: a scalar of NumPy, and a number of Python.
SCALAR, NUMBER = len(LAYOUTS), len(LAYOUTS) + 1
BORDERS = [CHUNK // 4 - 1, CHUNK // 4, CHUNK // 4 + 1, 2 * CHUNK + 3]
shapes = st.sampled_from([(), (0,), (1,), (7,), (17,), (65,), (13, 3), (2, 0, 3), (4, 3, 2), *[(n,) for n in BORDERS]])
leaves_drawn = st.tuples(st.sampled_from(DTYPES), shapes, st.integers(0, NUMBER))


def lists(least: int, most: int) -> Any:
    return st.lists(leaves_drawn, min_size=least, max_size=most)


def brought(array: Array, layout: int, rank: int) -> Any:
    if layout == NUMBER and not array.shape and array.dtype.char in "dlD":
        return array.item()
    return array[()] if layout >= SCALAR and not array.shape else laid_out(array, layout + rank)


@settings(max_examples=part_of(720))
@given(
    name=st.sampled_from(NAMES),
    op=st.sampled_from(OPS),
    ask=st.sampled_from(WAYS),
    plan=lists(1, 2) | lists(1, 5) | lists(18, 20),
    shape=st.integers(0, len(NESTS) - 1),
    layout=st.integers(0, 29),
    pieces=st.sampled_from([2**30, 2**30, 61]),
    rounded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_call(
    strategies: Strategies,
    name: str,
    op: str,
    ask: Any,
    plan: list[Any],
    shape: int,
    layout: int,
    pieces: int,
    rounded: bool,
    seed: int,
) -> None:
    if op in ("MIN", "MAX") or (op == "PROD" and (rounded or "ordered" in name)):
        # complex numbers have no order, and no product that is independent of it
        plan = [leaf for leaf in plan if leaf[0].kind != "c"] or [(DTYPES[9], (5,), 0)]
    arrays = [[array_of(op, r, d, s, seed + i, rounded=rounded) for r in RANKS] for i, (d, s, _) in enumerate(plan)]
    parts = [brought(each[RANK], where, RANK) for each, (_, _, where) in zip(arrays, plan, strict=True)]
    mine = NESTS[shape](parts, RANK)
    before = [bits(leaf) for leaf in nest.flatten(mine)[0]]
    numbered = nest.flatten(NESTS[shape](list(range(len(parts))), RANK))[0]
    with pieces_of(strategies(name), pieces):
        result = ask(strategies(name), op, mine, layout)
    found, structure = nest.flatten(result)
    assert structure.text == nest.flatten(mine)[1].text
    assert not isinstance(mine, dict) or list(result) == list(mine), "in this rank's own order"
    check(op, result, [arrays[number] for number in numbered], rounded=rounded)
    assert [bits(leaf) for leaf in nest.flatten(mine)[0]] == before, "an input was changed"
    if ask not in (into, in_place):
        own, given = ([np.asarray(leaf) for leaf in leaves] for leaves in (found, nest.flatten(mine)[0]))
        assert not any(np.shares_memory(one, other) for one in own for other in given)
        assert not any(np.shares_memory(one, other) for one, other in combinations(own, 2))
