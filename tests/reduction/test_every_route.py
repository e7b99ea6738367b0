"""Every route gives what NumPy gives, for every kind of value, operation and way to ask.

Integers, minima and maxima are exact; floats lie within the bound of their additions; all ranks get the same bits.
`Strategy.explain` says that the value took the route of its row.  Thresholds are so low that short arrays have many
chunks, pieces and packs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cupy_here
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from replicas import ALL, BFLOAT16, DTYPES, RANK, RANKS, SIXTEEN_BITS, SIZE, OnNodes, context, part_of, same_everywhere

import mpistrategy as ms
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory import node_sum
from mpistrategy.mpi.tuning.thresholds import Thresholds, trying

pytestmark = pytest.mark.mpi

OPS = [op.name for op in ms.ReduceOp]
CHUNK = 4096


# ------------------------------------------------------------------------------------- what is right


def numbers(rank: int, dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return rank's array: integers of the whole range, floats whose sums must be rounded."""
    dtype, random = np.dtype(dtype), np.random.default_rng([seed, rank])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(random.integers(limits.min, limits.max, shape, dtype, endpoint=True))
    real = np.asarray(random.uniform(0.1, 4, shape) * random.choice([-1, 1], shape))
    return (real + 1j * random.uniform(0.1, 4, shape) if dtype.kind == "c" else real).astype(dtype)


def right(op: str, arrays: Sequence[Array]) -> tuple[Array, Any]:
    """Return the reduction by the definition, in the result's dtype or a wider one, and how far a result may be off."""
    dtype, together = arrays[0].dtype, np.stack(arrays)
    if op in ("MIN", "MAX"):
        return np.asarray((np.min if op == "MIN" else np.max)(together, axis=0)), 0
    reduction = np.prod if op == "PROD" else np.sum
    if dtype.kind in "iu":
        total = reduction(together, axis=0, dtype=f"{dtype.kind}8" if op == "MEAN" else dtype)
        wide = np.float32 if dtype.itemsize < 4 else np.float64
        return np.asarray(np.true_divide(total, SIZE).astype(wide) if op == "MEAN" else total), 0
    together = together.astype(np.clongdouble if dtype.kind == "c" else np.longdouble)
    divisor = SIZE if op == "MEAN" else 1
    total = np.asarray(reduction(together, axis=0) / divisor)
    bound = SIZE * np.finfo(np.float32 if dtype in SIXTEEN_BITS else dtype).eps * reduction(abs(together), axis=0)
    rounded_once = ml_dtypes.finfo(dtype).eps * abs(total) if dtype in SIXTEEN_BITS else 0
    return total, bound / divisor + rounded_once


def wanted_of(op: str, everyones: Sequence[Sequence[Any]]) -> list[tuple[Array, Any]]:
    """Return what is right for each leaf."""
    return [right(op, list(map(np.asarray, leaves))) for leaves in zip(*everyones, strict=True)]


def check(wanted: Sequence[tuple[Array, Any]], found: Any, mine: Any) -> list[Any]:
    """Return the leaves of a result, which are right."""
    leaves = nest.flatten(found)[0]
    for leaf, (total, bound), brought in zip(leaves, wanted, nest.flatten(mine)[0], strict=True):
        is_integer = np.asarray(brought).dtype.kind in "iu"
        dtype = total.dtype if is_integer else np.asarray(brought).dtype
        assert (np.asarray(leaf).dtype.newbyteorder("="), np.shape(leaf)) == (dtype, total.shape)
        if is_integer:
            np.testing.assert_array_equal(leaf, total)
        else:
            assert np.all(abs(np.asarray(leaf).astype(total.dtype) - total) <= bound)
    return leaves


# ------------------------------------------------------------------------------------- the routes

WITHOUT_MAILBOXES = Thresholds(64, 0, CHUNK, 512)
BY_MPI = Thresholds(64, 2**40, CHUNK, 512, lanes_bytes=2**40)
TWO = [rank % 2 for rank in RANKS]


@dataclass(frozen=True)
class Route:
    """A row: a strategy, the thresholds that it is made with, and what `explain` says of each buffer.

    Attributes:
        words: what it says, or one of these.
        strategy: makes the strategy.
        thresholds: the thresholds.
        kind: "host", "arena" or a transport of arrays in GPU memory.
    """

    words: str | tuple[str, ...]
    strategy: Callable[[], ms.Strategy] = ms.MirroredStrategy
    thresholds: Thresholds = WITHOUT_MAILBOXES
    kind: str = "host"


def by(algorithm: Callable[[], ms.CrossDeviceOps]) -> Callable[[], ms.Strategy]:
    return lambda: ms.MirroredStrategy(cross_device_ops=algorithm())


def on(node_of_rank: Sequence[int], algorithm: Callable[[], ms.CrossDeviceOps] = ms.MpiAllReduce) -> Any:
    return lambda: OnNodes(node_of_rank, algorithm())


ON_NODE, FIRST = "through memory of the node", "in the first message of the call"
#: On nodes of one rank each, MPI does it all.
LANES = ("by MPI's Allreduce between the nodes" if 2 * len({*TWO}) <= SIZE else "by MPI's Allreduce", FIRST)
ALL_LANES = replace(WITHOUT_MAILBOXES, lanes_bytes=1)
ROUTES = {
    "mailboxes": Route("in the ranks' mailboxes", thresholds=Thresholds(2**19, 1, CHUNK, 512)),
    "one node": Route(ON_NODE),
    "one node, hierarchical": Route((ON_NODE, "in the ranks' mailboxes"), by(ms.HierarchicalCopyAllReduce)),
    "in place": Route("where the arrays are", kind="arena"),
    "two nodes": Route(LANES, on(TWO), ALL_LANES),
    "two nodes, uneven": Route(("by MPI's Allreduce", FIRST), on([min(rank, 1) for rank in RANKS]), ALL_LANES),
    "two nodes, hierarchical": Route("by MPI's Allreduce between the nodes", on(TWO, ms.HierarchicalCopyAllReduce)),
    "two nodes, in place": Route(LANES, on(TWO), ALL_LANES, kind="arena"),
    "MPI": Route("by MPI's Allreduce", thresholds=BY_MPI),
    "MPI, two nodes": Route(("by MPI's Allreduce", FIRST), on(TWO), BY_MPI),
    "root": Route("by MPI's Reduce to one rank", by(ms.ReductionToOneDevice)),
    "ordered, one node": Route(ON_NODE, by(ms.OrderedAllReduce)),
    "ordered, two nodes": Route("from rank to rank", on(TWO, ms.OrderedAllReduce)),
    **{f"GPU, {path}": Route("", cupy_here.strategy, kind=path) for path in cupy_here.PATHS},
}
#: More than 3 ranks have nodes of 2; fewer show the other routes.
NAMES = [name for name in ROUTES if SIZE <= 3 or ALL or "two nodes" in name]
HOST = [name for name in NAMES if ROUTES[name].kind == "host"]
ARENAS = [name for name in NAMES if ROUTES[name].kind == "arena"]


@pytest.fixture(scope="module")
def strategies() -> Iterator[Callable[[str], ms.Strategy]]:
    made: dict[str, ms.Strategy] = {}
    with ExitStack() as stack:

        def make(name: str) -> ms.Strategy:
            if name not in made:
                with trying(ROUTES[name].thresholds):
                    made[name] = stack.enter_context(closing(ROUTES[name].strategy()))
            return made[name]

        yield make


@pytest.fixture(autouse=True)
def many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks combine at a time is short, too."""
    monkeypatch.setattr(node_sum, "_CACHE_BYTES", CHUNK)
    monkeypatch.setattr(node_sum, "_LEAST_PIECE_BYTES", 256)


def assert_took(route: Route, strategy: ms.Strategy, value: Any, op: str) -> None:
    """Check that every buffer of a value takes this route, unless one node pretends to be several."""
    if "MPIR_CVAR_NUM_CLIQUES" in os.environ:
        return
    lines = [line for line in strategy.explain(value, op).splitlines()[1:-1] if line[2] != " "]
    words = (route.words,) if isinstance(route.words, str) else route.words
    words = words if route.words else (f"({route.kind}: ",)
    assert lines or all(not np.size(leaf) for leaf in nest.flatten(value)[0])
    assert SIZE == 1 or all(any(word in line for word in words) for line in lines if " 0 B:" not in line), lines


# ------------------------------------------------------------------------------------- the values


def strided(array: Array) -> Array:
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


def big_endian(array: Array) -> Array:
    return array if array.dtype == BFLOAT16 else array.astype(array.dtype.newbyteorder(">"))


Make = Callable[..., Array]
VALUES: dict[str, Callable[[Make], Any]] = {
    "a float": lambda make: float(make("float64", ())),
    "an int": lambda make: int(make("int64", ())),
    "a scalar of NumPy": lambda make: make("float32", ())[()],
    "no dimension": lambda make: make("float32", ()),
    "no elements": lambda make: make("float32", (3, 0)),
    "an array": lambda make: make("float32", (5003,)),
    "whole chunks": lambda make: make("int32", (8, CHUNK // 4)),
    "strided": lambda make: strided(make("float64", (41, 61))),
    "Fortran's order": lambda make: np.asfortranarray(make("int64", (29, 43))),
    "a nest": lambda make: {
        "w": [make("float32", (33, 50)), make("float32", (50,), 1)],
        "b": (float(make("float64", ())),),
    },
    "many small ones": lambda make: [make("float32", (1 + i % 12,), i) for i in range(40)],
    "many dtypes": lambda make: [make(dtype, (501,), i) for i, dtype in enumerate(DTYPES) if dtype.kind != "c"],
    "large and small": lambda make: [make("float32", (n,), n) for n in (3000, 1, 5, 2000, 0, 7)],
}
TINY = ("a float", "an int", "a scalar of NumPy", "no dimension")
#: Routes whose strategies have mailboxes, which take what is tiny.
LISTS = ("one node", "MPI")
ON_GPUS = [name for name in VALUES if name not in ("a float", "an int", "a scalar of NumPy", "a nest", "many dtypes")]


def of_all_ranks(value: Callable[[Make], Any]) -> list[list[Any]]:
    """Return every rank's leaves."""
    return [nest.flatten(value(partial(numbers, rank)))[0] for rank in RANKS]


# ------------------------------------------------------------------------------------- the ways to ask


def in_step(strategy: ms.Strategy, op: str, value: Any, **more: Any) -> Any:
    return strategy.run(lambda: context().all_reduce(op, value, **more))


def again(strategy: ms.Strategy, op: str, value: Any) -> Any:
    """The first call of a place and the later ones differ inside."""
    results = [in_step(strategy, op, value) for _ in range(3)]
    kept = [[np.asarray(leaf).tobytes() for leaf in nest.flatten(result)[0]] for result in results]
    assert kept[0] == kept[1] == kept[2] or any(np.asarray(leaf).dtype.char in "gG" for leaf in nest.flatten(value)[0])
    return results[0]


def into(strategy: ms.Strategy, op: str, value: Any, make: Callable[[Array], Array] = np.array) -> Any:
    leaves, structure = nest.flatten(value)
    if not all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return in_step(strategy, op, value)
    dtypes = [right(op, [leaf] * SIZE)[0].dtype if leaf.dtype.kind in "iu" else leaf.dtype for leaf in leaves]
    targets = [make(np.zeros(leaf.shape, dtype)) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    name = "" if make is big_endian and RANK % 2 else None  # odd ranks look at everything once more
    found = in_step(strategy, op, value, out=structure.pack(targets), name=name)
    assert all(leaf is target for leaf, target in zip(nest.flatten(found)[0], targets, strict=True))
    return found


def in_place(strategy: ms.Strategy, op: str, value: Any) -> Any:
    leaves, structure = nest.flatten(value)
    if not all(isinstance(leaf, np.ndarray) and (op != "MEAN" or leaf.dtype.kind not in "iu") for leaf in leaves):
        return in_step(strategy, op, value)
    own = structure.pack([leaf.copy("K") for leaf in leaves])
    return in_step(strategy, op, own, out=own)


def outside(strategy: ms.Strategy, op: str, value: Any) -> Any:
    leaves, structure = nest.flatten(value)
    if len(leaves) == 1:
        return structure.pack([strategy.reduce(op, ms.PerReplica((leaves[0],)))])
    values = [ms.PerReplica((leaf,)) for leaf in leaves]
    return structure.pack(
        [found.numpy() for found in strategy.extended.batch_reduce_to(op, list(zip(values, values, strict=True)))]
    )


def to_one_rank(strategy: ms.Strategy, op: str, value: Any) -> Any:
    """Return what the last rank got, from there."""
    leaves, structure = nest.flatten(value)
    last = f"task:{SIZE - 1}"
    there = strategy.extended.batch_reduce_to(op, [(ms.PerReplica((leaf,)), last) for leaf in leaves])
    own = [each.numpy() for each in there] if RANK == SIZE - 1 else None
    return structure.pack(MPI.COMM_WORLD.bcast(own, SIZE - 1))


WAYS = (again, into, partial(into, make=strided), partial(into, make=big_endian), in_place, outside, to_one_rank)


# ------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in HOST for v in VALUES if not (n in LISTS and v in TINY)])
def test_in_the_hosts_memory(strategies: Callable[[str], ms.Strategy], name: str, value: str) -> None:
    strategy, everyones = strategies(name), of_all_ranks(VALUES[value])
    results = []
    place = HOST.index(name) + list(VALUES).index(value)
    for row, op in enumerate(OPS):
        mine = VALUES[value](partial(numbers, RANK))
        assert_took(ROUTES[name], strategy, mine, op)
        wanted = wanted_of(op, everyones)
        for column, ask in enumerate(WAYS):
            if not ALL and column and (place + row + column) % 3:
                continue  # each way with some operations of each value; MPISTRATEGY_TEST_ALL=1 tries them all
            found = ask(strategy, op, mine)
            assert nest.flatten(found)[1].text == nest.flatten(mine)[1].text
            results += check(wanted, found, mine)
        check(wanted_of("MAX", [everyones[RANK]]), mine, mine)  # nothing was written there
    assert same_everywhere(results)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ARENAS)
def test_in_arenas(strategies: Callable[[str], ms.Strategy], name: str, value: str, shared: bool) -> None:
    strategy, everyones = strategies(name), of_all_ranks(VALUES[value])
    mine = VALUES[value](partial(numbers, RANK))
    results = []
    with closing(strategy.arena(mine, shared_result=shared)) as arena:
        for op in OPS:
            if op == "MEAN" and any(np.asarray(leaf).dtype.kind in "iu" for leaf in everyones[RANK]):
                continue  # a mean of integers has another dtype: refused
            assert_took(ROUTES[name], strategy, arena, op)
            wanted = wanted_of(op, everyones)
            for _ in range(2):
                for target, leaf in zip(nest.flatten(arena.values)[0], everyones[RANK], strict=True):
                    target[...] = leaf
                found = in_step(strategy, op, arena)
                results += [np.array(leaf) for leaf in check(wanted, found, mine)]
    assert same_everywhere(results)


@pytest.mark.skipif(SIZE > 3 and not ALL, reason="three ranks show it")
@pytest.mark.parametrize("value", ON_GPUS)
@pytest.mark.parametrize("path", cupy_here.PATHS)
def test_in_gpu_memory(monkeypatch: pytest.MonkeyPatch, path: str, value: str) -> None:
    monkeypatch.setenv("MPISTRATEGY_GPU_PATH", path)
    if not cupy_here.IS_REAL:
        monkeypatch.setenv("MPISTRATEGY_CUDA_AWARE", "1")  # the double's memory is the host's
    everyones = of_all_ranks(VALUES[value])
    results: list[Any] = []
    with cupy_here.installed() as cupy, cupy_here.strategy() as strategy:

        def placed(value: Any) -> Any:
            leaves, structure = nest.flatten(value)
            return structure.pack([cupy.asarray(leaf) for leaf in leaves])

        for op in OPS:
            mine = VALUES[value](partial(numbers, RANK))
            leaves, structure = nest.flatten(mine)
            wanted = wanted_of(op, everyones)
            for with_out in (False, True, False):
                out = None
                if with_out and (op != "MEAN" or all(leaf.dtype.kind not in "iu" for leaf in leaves)):
                    out = placed(structure.pack([np.zeros_like(leaf, order="C") for leaf in leaves]))
                found = in_step(strategy, op, placed(mine), out=out)
                host = structure.pack([leaf.get() for leaf in nest.flatten(found)[0]])
                results += check(wanted, host, mine)
            assert_took(ROUTES[f"GPU, {path}"], strategy, placed(mine), op)
    assert same_everywhere(results)


sizes = st.sampled_from([0, 1, 7, CHUNK // 4 - 1, CHUNK // 4, CHUNK // 4 + 1, 2 * CHUNK + 3]) | st.integers(0, CHUNK)


@settings(max_examples=part_of(240), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(HOST),
    op=st.sampled_from(OPS),
    ask=st.sampled_from(WAYS),
    leaves=st.lists(st.tuples(st.sampled_from(DTYPES), sizes), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_dtypes_and_sizes(
    strategies: Callable[[str], ms.Strategy], name: str, op: str, ask: Any, leaves: list[Any], seed: int
) -> None:
    if op in ("MIN", "MAX", "PROD"):  # complex numbers have no order, and no product that is independent of it
        leaves = [leaf for leaf in leaves if leaf[0].kind != "c"] or [(BFLOAT16, 5)]
    everyones = [[numbers(rank, *(d, (n,)), seed + i) for i, (d, n) in enumerate(leaves)] for rank in RANKS]
    found = ask(strategies(name), op, everyones[RANK])
    assert same_everywhere(check(wanted_of(op, everyones), found, everyones[RANK]))
