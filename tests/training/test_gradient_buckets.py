"""Gradient buckets: cut alike everywhere, started in order, and the same step as from pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, OnNodes, bits, outcomes, same_everywhere, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array
from mpistrategy.optimizers import SGD, Adam, Optimizer
from mpistrategy.training.gradient_buckets import GradientBuckets

pytestmark = pytest.mark.mpi
several = pytest.mark.mpi(min_size=2)

SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((40, 3), "float32"),
    ((3,), "float32"),
    ((3, 50), "float32"),
    ((7,), "float64"),
    ((50,), "float32"),
    ((2, 2), "float64"),
    ((1,), "float32"),
]


@pytest.fixture(scope="module")
def two_nodes() -> ms.Strategy:
    """As many ranks as there are, every second one as if on another node; one node for one rank."""
    return OnNodes([rank % 2 for rank in RANKS], ms.MpiAllReduce())


@pytest.fixture(params=["one node", "two nodes"])
def place(request: pytest.FixtureRequest, strategy: ms.Strategy, two_nodes: ms.Strategy) -> ms.Strategy:
    return strategy if request.param == "one node" else two_nodes


def model(strategy: ms.Strategy) -> list[ms.Variable]:
    with strategy.scope():
        return [ms.Variable(np.linspace(-1, 1, int(np.prod(s)), dtype=d).reshape(s)) for s, d in SHAPES]


def gradients_for(variables: Sequence[ms.Variable], step: int) -> list[Array]:
    """Eighths, whose sums are exact in any order."""
    random = np.random.default_rng([step, RANK])
    return [np.asarray(random.integers(-50, 50, v.shape) / 8).astype(v.dtype) for v in variables]


def backward(buckets: GradientBuckets, gradients: Sequence[Array], order: Sequence[int]) -> None:
    for number in order:
        buckets.values[number][...] = gradients[number]
        buckets.ready(number if number % 2 else buckets.variables[number])


def state(optimizer: Optimizer, variables: Sequence[ms.Variable]) -> list[bytes]:
    slots = [slot for v in variables for slot in optimizer.slots_of(v).values()]
    return [bits(v.local_copy()) for v in (*variables, *slots)]


@pytest.mark.parametrize("bytes_per_bucket", [1, 600, 4 * 2**20])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("clipnorm", [None, 1.0])
def test_a_step_from_buckets_is_the_step_from_pairs(
    place: ms.Strategy, aggregation: str, clipnorm: float | None, bytes_per_bucket: int
) -> None:
    ours, theirs = model(place), model(place)
    one, two = (Adam(0.01, aggregation=aggregation, global_clipnorm=clipnorm) for _ in range(2))
    buckets = one.gradient_buckets(ours, bytes_per_bucket)
    backwards = list(range(len(ours)))[::-1]
    for step, order in enumerate([backwards, backwards[::-1], [], [3, 6], backwards]):
        gradients = gradients_for(ours, step)
        mine = np.roll(order, RANK).tolist()  # ranks may find them in other orders

        def run(gradients: Any = gradients, mine: Any = mine) -> None:
            backward(buckets, gradients, mine)
            for number in set(backwards) - set(mine):  # those that nobody calls ready
                buckets.values[number][...] = gradients[number]
            one.apply_gradients(buckets)
            two.apply_gradients(zip(gradients, theirs, strict=True))

        place.run(run)
        assert state(one, ours) == state(two, theirs)
    assert same_everywhere(ours)
    early = place.extended.communicator.size > 1 and max(place.extended.communicator.node_of) > 0
    assert buckets.starts_early == early
    assert (one.latest_path == "buckets") == early
    assert still_works(place)


def test_how_gradients_are_cut(strategy: ms.Strategy) -> None:
    variables = model(strategy)
    optimizer = SGD(0.1)
    whole = optimizer.gradient_buckets(variables)
    assert [bucket.members for bucket in whole._buckets] == [(5, 3), (6, 4, 2, 1, 0)]
    each = optimizer.gradient_buckets(variables, 1)
    assert [bucket.members for bucket in each._buckets] == [(6,), (5,), (4,), (3,), (2,), (1,), (0,)]
    some = optimizer.gradient_buckets(variables, 600)
    assert [bucket.members for bucket in some._buckets] == [(5, 3), (6, 4, 2), (1, 0)]
    for buckets in (whole, each, some):
        for bucket in buckets._buckets:
            for number in bucket.members:
                assert np.shares_memory(bucket.memory, buckets.values[number])
                assert bucket.memory.dtype == variables[number].dtype
        assert len(buckets) == len(variables)
        assert "7 variables" in repr(buckets)
        assert [v for _, v in buckets] == variables


def test_a_bucket_starts_when_those_before_it_have(two_nodes: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = model(two_nodes)
    optimizer = SGD(0.1)
    buckets = optimizer.gradient_buckets(variables, 1)
    started: list[str] = []
    start = ms.ReplicaContext.all_reduce_async

    def counted(self: Any, *given: Any, name: str, **options: Any) -> Any:
        started.append(name.split()[2])
        return start(self, *given, name=name, **options)

    monkeypatch.setattr(ms.ReplicaContext, "all_reduce_async", counted)

    def step() -> None:
        for number, expected in ((5, ""), (6, "01"), (3, "01"), (4, "0123")):
            buckets.ready(number)
            assert "".join(started) == (expected if buckets.starts_early else "")
        optimizer.apply_gradients(buckets)
        assert "".join(started) == ("0123456" if buckets.starts_early else "")

    two_nodes.run(step)


def test_mistakes(place: ms.Strategy) -> None:
    variables = model(place)
    optimizer = SGD(0.1)
    buckets = optimizer.gradient_buckets(variables)
    wrong: Any = "first"
    with pytest.raises(errors.ContextError), place.scope():
        buckets.ready(0)
    with pytest.raises(errors.OptionTypeError):
        place.run(buckets.ready, args=(wrong,))
    with pytest.raises(errors.OptionError, match="7 variables"):
        place.run(buckets.ready, args=(7,))
    with pytest.raises(errors.OptionError, match="7 variables"):
        place.run(lambda: buckets.ready(ms.Variable(0.0)) if SIZE == 1 else buckets.ready(-1))
    place.run(buckets.ready, args=(0,))
    with pytest.raises(errors.OptionError, match="ready already"):
        place.run(buckets.ready, args=(0,))
    buckets.reset()
    place.run(buckets.ready, args=(0,))
    buckets.reset()
    for number, kind in ((0, errors.OptionError), (1.5, errors.OptionTypeError), (True, errors.OptionTypeError)):
        with pytest.raises(kind, match="bytes_per_bucket"):
            optimizer.gradient_buckets(variables, number)  # type: ignore[arg-type]
    if buckets.starts_early:
        other = SGD(0.1, aggregation="MEAN")
        ended = outcomes(place.run, other.apply_gradients, (buckets,))
        assert {one.error for one in ended} == {errors.OptionError}
        assert "gradient_buckets" in ended[0].text
    assert still_works(place)


@several
def test_ranks_that_cut_differently_are_refused(place: ms.Strategy) -> None:
    variables = model(place)
    optimizer = SGD(0.1)
    ended = outcomes(optimizer.gradient_buckets, variables, 100 + RANK)
    assert {one.error for one in ended} == {errors.CollectiveMismatchError}
    ended = outcomes(optimizer.gradient_arena, variables if RANK else variables[1:])
    assert {one.error for one in ended} == {errors.CollectiveMismatchError}
    with place.scope():
        ended = outcomes(optimizer.gradient_arena, variables if RANK else [1, 2])
    assert {one.error for one in ended} == {errors.OptionError}
    assert still_works(place)


@several
def test_other_settings_on_one_rank_change_nothing(place: ms.Strategy) -> None:
    variables = model(place)
    optimizer = SGD(0.1)
    buckets = optimizer.gradient_buckets(variables, 600)
    gradients = gradients_for(variables, 0)

    def step() -> None:
        backward(buckets, gradients, range(len(variables))[::-1])
        optimizer.apply_gradients(buckets)

    before = state(optimizer, variables)
    optimizer.learning_rate = 0.1 + RANK
    ended = outcomes(place.run, step)
    assert {one.error for one in ended} == {errors.CollectiveMismatchError}
    assert state(optimizer, variables) == before
    buckets.reset()
    optimizer.learning_rate = 0.1
    place.run(step)
    assert same_everywhere(variables)
    assert still_works(place)


# ------------------------------------------------------------------------------------- with every algorithm


class Own(ms.CrossDeviceOps):
    """An algorithm of a program's own: sums on the last rank, and asks for its strategy as it may in a step."""

    def reduce_implementation(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return self.batch_reduce_implementation(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_implementation(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
        assert ms.get_strategy().num_replicas_in_sync == SIZE
        there = [(value, f"task:{SIZE - 1}") for value, _ in pairs]
        ms.MpiAllReduce().batch_reduce(reduce_op, there, options)
        everywhere = list(ms.get_strategy().devices_by_rank)
        return ms.ReductionToOneDevice(everywhere[-1]).batch_reduce(
            reduce_op, [(value, everywhere) for value, _ in pairs], options
        )


LAST = f"task:{SIZE - 1}"
EVERY_ALGORITHM: dict[str, ms.CrossDeviceOps] = {
    "MpiAllReduce": ms.MpiAllReduce(),
    "Hierarchical": ms.HierarchicalCopyAllReduce(),
    "Hierarchical in packs": ms.HierarchicalCopyAllReduce(num_packs=3),
    "Nccl": ms.NcclAllReduce(),
    "Ordered": ms.OrderedAllReduce(),
    "ReductionToOneDevice": ms.ReductionToOneDevice(),
    "ReductionToOneDevice, the last": ms.ReductionToOneDevice(LAST),
    "ReductionToOneDevice, in full": ms.ReductionToOneDevice("/job:worker/replica:0/task:0/device:CPU:0"),
    "ReductionToOneDevice, accumulation_fn": ms.ReductionToOneDevice(LAST, lambda values: np.sum(values, axis=0)),
    "a program's own": Own(),
}


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_algorithm_works_in_the_background(algorithm: str) -> None:
    """The background has a communicator of its own, which must know the devices of all ranks, too."""
    placed = OnNodes([rank % 2 for rank in RANKS], EVERY_ALGORITHM[algorithm])

    def start() -> Any:
        values = [np.full(size, RANK + 1, np.float32) for size in (1, 9, 100_000)]
        context = ms.get_replica_context()
        handles = [context.all_reduce_async("SUM", value) for value in values]
        handles += [context.all_reduce_async("MEAN", {"a": np.arange(3) + RANK, "b": 2.5})]
        return [handle.wait() for handle in handles]

    *sums, means = placed.run(start)
    for found in sums:
        np.testing.assert_array_equal(found, np.full(found.shape, SIZE * (SIZE + 1) / 2))
    np.testing.assert_array_equal(means["a"], np.arange(3) + (SIZE - 1) / 2)
    assert means["b"] == 2.5
    variables, optimizer = model(placed), SGD(1.0)
    before = [v.numpy().copy() for v in variables]
    buckets = optimizer.gradient_buckets(variables, 600)
    for step in range(2):
        gradients = gradients_for(variables, step)
        placed.run(lambda g=gradients: (backward(buckets, g, range(len(g))), optimizer.apply_gradients(buckets)))
    for number, variable in enumerate(variables):
        random = [[np.random.default_rng([step, rank]) for rank in RANKS] for step in range(2)]
        every = [[each.integers(-50, 50, v.shape) / 8 for v in variables] for of_one in random for each in of_one]
        wanted = before[number].astype(np.float64) - np.sum([one[number] for one in every], axis=0)
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert same_everywhere(variables)
    assert still_works(placed)
    placed.close()
