"""One place in the program that sees many kinds of values and memory: what was prepared there is never misused."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import launching
import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, all_reduce, bits, made, outcomes, rows, several

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Thresholds, trying
from mpistrategy.reduction import reducer

pytestmark = pytest.mark.mpi
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
            found = all_reduce(strategy, op, value)
            leaves, given = nest.flatten(found)[0], nest.flatten(value)[0]
            right = [np.asarray(each) if op == "MAX" else np.mean([each], axis=0, dtype=np.float64) for each in given]
            assert [float(np.max(leaf)) for leaf in leaves] == [float(np.max(each)) for each in right]
            if op == "MAX":
                assert [np.asarray(leaf).dtype for leaf in leaves] == [each.dtype for each in right]
            assert not isinstance(value, dict) or list(map(repr, found)) == list(map(repr, value))


A, B = np.arange(6.0), {"a": 1.0, "b": 2.0}
DIFFERENT: list[tuple[Any, Any]] = [
    (A, A.astype(np.float32)),
    (A, [A]),
    (np.arange(60_000.0), np.arange(60_001.0)),
    (1.0, 1),
    (1.0, np.float32(1)),
    (B, {"a": 1.0, "b": 2}),
    ({1: 1.0}, {True: 1.0}),
    ({1: 1.0}, {1.0: 1.0}),
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
        ends = outcomes(lambda: all_reduce(strategy, op, value))  # noqa: B023
        assert [end.error for end in ends] == [errors.CollectiveMismatchError] * SIZE, ends
        assert len({end.text.partition(" at ")[0] for end in ends}) == 1
        for op, value in (usual, other):
            all_reduce(strategy, op, value)


def test_more_kinds_of_values_than_are_remembered(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "MOST_PLANS", 50)
    for number in range(120):
        assert all_reduce(strategy, "SUM", np.ones(1 + number)).sum() == SIZE * (1 + number)
    assert len(strategy.extended._reducer._plans) <= 50
    assert all_reduce(strategy, "SUM", {f"key {number}": 1.0 for number in range(50)})["key 7"] == SIZE


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
    all_reduce(strategies[name], "SUM", value, out=out)
    assert bits(memory) == bits(right)


@pytest.mark.parametrize(("name", "size"), rows(1, THRESHOLDS, [1, 100, 10_000, 100_000]))
def test_in_place_where_the_memory_has_gaps(strategies: dict[str, ms.Strategy], name: str, size: int) -> None:
    for as_list in (False, True):
        memory = np.ones((2, size, 2))
        value = memory[:, :, 0].T  # cannot be made flat without a copy
        all_reduce(strategies[name], "SUM", [value] if as_list else value, out=[value] if as_list else value)
        assert np.all(memory == [SIZE, 1]), "the result is there, and nowhere else"


@several
@pytest.mark.parametrize(("size", "as_list", "in_place"), rows(1, [1, 100_000], [False, True], [False, True]))
def test_an_out_that_one_rank_cannot_write_any_more(
    strategy: ms.Strategy, size: int, as_list: bool, in_place: bool
) -> None:
    value = np.ones(size)
    out = value if in_place else np.empty_like(value)

    def call() -> Any:
        return all_reduce(strategy, "SUM", [value] if as_list else value, out=[out] if as_list else out)

    call()
    out.flags.writeable = RANK != SIZE - 1
    assert all(end.error is not None for end in outcomes(call))
    both = [np.ones(3), np.ones(3)]
    with pytest.raises(errors.StructureError, match="one array twice"):
        all_reduce(strategy, "SUM", both, out=[both[0], both[0]])


class Kept(dict[str, Any]):
    """A dictionary that can be watched."""


class Hashed(np.ndarray):  # as tensors of torch are
    __hash__ = object.__hash__


Gamma = namedtuple("Gamma", "shape rate")


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
        result = all_reduce(strategy, "SUM", build(array))
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
            all_reduce(strategy, op, value, out=out)

    for size in (3, 3000, 100_000, 2**21):
        seen: list[weakref.ref[Array]] = []
        with pytest.raises(errors.CollectiveMismatchError):
            reduce(size, seen)
        gc.collect()
        assert [each() is None for each in seen] == [True, True]


# ------------------------------------------------------------------------------------- memory besides the arrays

#: Counts NumPy's memory, and that of shared segments; whatever else runs on the machine changes nothing.
PROGRAM = """
import gc
import tracemalloc
import numpy as np
import mpistrategy as ms

ALGORITHMS = [ms.MpiAllReduce(), ms.HierarchicalCopyAllReduce(), ms.OrderedAllReduce()]
ALGORITHMS += [ms.ReductionToOneDevice("task:1")]
tracemalloc.start()

def mapped():
    # Each rank maps the segments of all ranks of its node.
    with open("/proc/self/maps") as lines:
        ends = [line.split()[0].split("-") for line in lines if line.split()[1][3] == "s"]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ends) / on_node

def check(what, most, right, reduce):
    gc.collect()
    before, segments = tracemalloc.get_traced_memory()[0], mapped()
    for _ in range(2):
        tracemalloc.reset_peak()
        result = reduce()
        taken = tracemalloc.get_traced_memory()[1] - before + mapped() - segments
        assert taken <= most * NBYTES + 2**20, f"{what}: {taken / NBYTES:.2f} times the array"
        assert np.array_equal(np.asarray(result).reshape(-1)[::1001], right.reshape(-1)[::1001]), what
        del result

for algorithm in ALGORITHMS:
    # The room for the pieces of ordered sums has a size of its own, and is little beside this.
    NBYTES = (16 if isinstance(algorithm, ms.OrderedAllReduce) else 3) * 2**20
    with ms.MirroredStrategy(cross_device_ops=algorithm) as strategy:
        node_of, rank = strategy.extended.communicator.node_of, strategy.replica_id_in_sync_group
        assert (max(node_of) > 0) == ON_NODES
        on_node, size = node_of.count(node_of[rank]), strategy.num_replicas_in_sync

        def all_reduce(*arguments, **options):
            return strategy.run(lambda: ms.get_replica_context().all_reduce(*arguments, **options))

        def in_the_background(*arguments):
            return strategy.run(lambda: ms.get_replica_context().all_reduce_async(*arguments)).wait()

        for reduce in (all_reduce, in_the_background):  # what is made once
            reduce("SUM", np.ones(3 * NBYTES // 32))
        for dtype in (np.uint16, np.int8):
            name = f"{type(algorithm).__name__}, {np.dtype(dtype)}"
            every = [np.arange(NBYTES // np.dtype(dtype).itemsize).astype(dtype) * dtype(1 + r) for r in range(size)]
            x, total, greatest = every[rank], sum(every[1:], every[0]), np.max(every, axis=0)
            out, some = np.empty_like(x), x[: 5 * 2**20]  # a mean takes 34 times as much
            mean = np.mean([each[: some.size] for each in every], axis=0, dtype=np.float64).astype(np.float32)
            del every
            check(f"{name}: SUM", 2, total, lambda: all_reduce("SUM", x))
            if dtype is np.uint16:
                continue
            check(f"{name}: MAX", 2, greatest, lambda: all_reduce("MAX", x))
            check(f"{name}: SUM of a list", 2, total, lambda: all_reduce("SUM", [x, x[:50]])[0])
            check(f"{name}: SUM with out=", 1, total, lambda: all_reduce("SUM", x, out=out))
            # Integers are added in 64 bits for a mean.
            most = (2 + 4 * 8 / x.itemsize) * some.nbytes / NBYTES
            check(f"{name}: MEAN", most, mean, lambda: all_reduce("MEAN", some))
            check(f"{name}: along an axis", 0.5, total.reshape(16, -1).sum(axis=0, dtype=dtype),
                  lambda: strategy.reduce("SUM", x.reshape(16, -1), axis=0))
            check(f"{name}: in the background", 2, total, lambda: in_the_background("SUM", x))
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_integers_of_8_and_16_bits_take_twice_the_array_at_most(
    launch: Callable[..., launching.Finished], nodes: int
) -> None:
    if nodes > 1 and not launching.LIBRARY.startswith("MPICH"):
        pytest.skip("only MPICH pretends to run on several nodes")
    source = f"ON_NODES = {nodes > 1}\n{PROGRAM}"
    launch(2, source, env={"MPIR_CVAR_NUM_CLIQUES": str(nodes)}, timeout=100).check()


def test_a_lone_number_keeps_no_pack_alive(strategy: ms.Strategy) -> None:
    value = [np.array(1.0), np.ones(1), *[np.full(900, 1.0) for _ in range(20)], 2.0]
    for number in (0, 1, -1):
        kept = all_reduce(strategy, "SUM", value)[number]
        base = getattr(kept, "base", None)
        assert base is None or base.nbytes <= 4096, "a few bytes hold the memory of a whole pack"
