"""Gradient buckets: cut alike everywhere, started in order, and the same step as from pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from optimizing import gradients_for, model, state
from replicas import RANK, RANKS, SIZE, OnNodes, all_raise, outcomes, same_everywhere, several, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array
from mpistrategy.optimizers import SGD, Adam
from mpistrategy.training.gradient_buckets import GradientBuckets

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["one node", "two nodes"])
def place(request: pytest.FixtureRequest, strategy: ms.Strategy, two_nodes: ms.Strategy) -> ms.Strategy:
    return strategy if request.param == "one node" else two_nodes


def backward(buckets: GradientBuckets, gradients: Sequence[Array], order: Sequence[int]) -> None:
    for number in order:
        buckets.values[number][...] = gradients[number]
        buckets.ready(number if number % 2 else buckets.variables[number])


@pytest.mark.parametrize("bytes_per_bucket", [1, 600, 4 * 2**20])
@pytest.mark.parametrize("options", [{}, {"aggregation": "MEAN"}, {"global_clipnorm": 1.0}], ids=str)
def test_a_step_from_buckets_is_the_step_from_pairs(place: ms.Strategy, options: Any, bytes_per_bucket: int) -> None:
    ours, theirs = model(place), model(place)
    one, two = (Adam(0.01, **options) for _ in range(2))
    buckets = one.gradient_buckets(ours, bytes_per_bucket)
    assert len(buckets._buckets) == {1: 7, 600: 3, 4 * 2**20: 2}[bytes_per_bucket]  # of two dtypes
    backwards = list(range(len(ours)))[::-1]
    for step, order in enumerate([backwards, backwards[::-1], [], [3, 6]]):
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
    assert buckets.starts_early == early == (one.latest_path == "buckets")
    assert still_works(place)


def test_mistakes(place: ms.Strategy) -> None:
    variables, optimizer = model(place), SGD(0.1)
    buckets = optimizer.gradient_buckets(variables)
    with pytest.raises(errors.ContextError), place.scope():
        buckets.ready(0)
    place.run(buckets.ready, args=(0,))
    with pytest.raises(errors.OptionError, match=r"expected apply_gradients\(buckets\)"):
        iter(buckets)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ("first", errors.OptionTypeError, "first"),
        (8, errors.OptionError, "8 variables"),
        (-1, errors.OptionError, "8 variables"),
        (0, errors.OptionError, "ready already"),
    ]
    for number, kind, told in wrong:
        with pytest.raises(kind, match=told):
            place.run(buckets.ready, args=(number,))
    buckets.reset()
    place.run(buckets.ready, args=(0,))
    buckets.reset()
    for size, kind in ((0, errors.OptionError), (1.5, errors.OptionTypeError), (True, errors.OptionTypeError)):
        last = place.extended.communicator.size - 1
        given: Any = size if place.extended.communicator.rank == last else 1
        all_raise(kind, optimizer.gradient_buckets, variables, given, words=["bytes_per_bucket"])
    if buckets.starts_early:
        own, buckets.values[0] = buckets.values[0], np.zeros(buckets.values[0].shape)  # type: ignore[index]
        all_raise(errors.StructureError, place.run, optimizer.apply_gradients, (buckets,))
        buckets.values[0] = own  # type: ignore[index]
        all_raise(
            errors.OptionError,
            place.run,
            SGD(0.1, aggregation="MEAN").apply_gradients,
            (buckets,),
            words=["gradient_buckets"],
        )
    pairs = [(np.zeros(variable.shape, variable.dtype), variable) for variable in variables]
    for _ in range(2):
        optimizer.gradient_arena(variables).close()
        place.run(optimizer.apply_gradients, args=(pairs,))
    assert still_works(place)


@several
def test_ranks_that_cut_differently_are_refused(place: ms.Strategy) -> None:
    variables, optimizer = model(place), SGD(0.1)
    all_raise(errors.CollectiveMismatchError, optimizer.gradient_buckets, variables, 100 + RANK)
    all_raise(errors.CollectiveMismatchError, optimizer.gradient_arena, variables if RANK else variables[1:])
    with place.scope():  # numbers do not say whose they are
        ended = outcomes(optimizer.gradient_arena, variables if RANK else [1, 2])
    assert {one.error for one in ended} == {errors.OptionError}
    assert still_works(place)


# ------------------------------------------------------------------------------------- with every algorithm


class Own(ms.MpiAllReduce):
    """An algorithm of a program's own, which asks for its strategy as it may in a step."""

    def batch_reduce_implementation(self, *args: Any) -> Any:
        assert ms.get_strategy().num_replicas_in_sync == SIZE
        return super().batch_reduce_implementation(*args)


LAST = f"task:{SIZE - 1}"
EVERY_ALGORITHM: dict[str, ms.CrossDeviceOps] = {
    "MpiAllReduce": ms.MpiAllReduce(),
    "Hierarchical": ms.HierarchicalCopyAllReduce(),
    "Hierarchical in packs": ms.HierarchicalCopyAllReduce(num_packs=3),
    "Nccl": ms.NcclAllReduce(),
    "Ordered": ms.OrderedAllReduce(),
    "ReductionToOneDevice": ms.ReductionToOneDevice(),
    "ReductionToOneDevice, accumulation_fn": ms.ReductionToOneDevice(LAST, lambda values: np.sum(values, axis=0)),
    "a program's own": Own(),
}


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_algorithm_works_in_the_background(algorithm: str) -> None:
    """The background has a communicator of its own, which must know the devices of all ranks, too."""
    placed = OnNodes([rank % 2 for rank in RANKS], EVERY_ALGORITHM[algorithm])

    variables, optimizer = model(placed), SGD(1.0)
    wanted = [v.numpy().astype(np.float64) for v in variables]
    buckets = optimizer.gradient_buckets(variables, 600)
    for step in range(2):
        gradients = gradients_for(variables, step)
        placed.run(lambda g=gradients: (backward(buckets, g, range(len(g))), optimizer.apply_gradients(buckets)))
        for rank in RANKS:
            random = np.random.default_rng([step, rank])
            wanted = [w - random.integers(-50, 50, w.shape) / 8 for w in wanted]
    for variable, right in zip(variables, wanted, strict=True):
        np.testing.assert_allclose(variable.numpy(), right, rtol=1e-5, atol=1e-5)
    assert same_everywhere(variables)
    assert still_works(placed)
    placed.close()
