"""The paths of an optimizer's step: to the bit the same, whichever is taken, whatever changes between two steps."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optimizing import OPTIMIZERS, SHAPES, Shapes, apply, asked, gradients_for, model, state
from replicas import (
    RANK,
    RANKS,
    SIZE,
    OnNodes,
    all_raise,
    bits,
    new_variable,
    outcomes,
    part_of,
    same_everywhere,
    several,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array
from mpistrategy.optimizers import SGD, Adam, Optimizer
from mpistrategy.training import kernels

pytestmark = pytest.mark.mpi
PATH = "sliced" if SIZE > 1 and "MPIR_CVAR_NUM_CLIQUES" not in os.environ else "plain"  # on one node


@pytest.fixture
def fresh() -> Iterator[ms.MirroredStrategy]:
    with closing(ms.MirroredStrategy()) as made:
        yield made


class Twins:
    """A model and its twin: one optimizer takes the path under test, the other one the plain path."""

    def __init__(self, strategy: ms.Strategy, one: Optimizer, two: Optimizer, shapes: Shapes = SHAPES) -> None:
        self.strategy, self.one, self.two = strategy, one, asked(two)
        self.ours, self.theirs = model(strategy, shapes), model(strategy, shapes)

    def step(self, mine: Sequence[Any], gradients: Sequence[Any], part: slice = slice(None)) -> None:
        """Both make a step, with the same gradients in other clothes, and have the same bits."""
        apply(self.strategy, self.one, mine[part], self.ours[part])
        here = state(self.one, self.ours)  # at once: no rank may still be at work on this one's copies
        apply(self.strategy, self.two, gradients[part], self.theirs[part])
        assert here == state(self.two, self.theirs) == state(self.one, self.ours)
        assert same_everywhere([v.local_copy() for v in self.ours])


def twins(strategy: ms.Strategy, name: str, shapes: Shapes = SHAPES, **options: Any) -> Twins:
    return Twins(strategy, OPTIMIZERS[name](0.1, **options), OPTIMIZERS[name](0.1, **options), shapes)


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_paths_give_the_same_bits(strategy: ms.Strategy, name: str, aggregation: str) -> None:
    """With several dtypes and odd sizes in one model, and variables without gradients."""
    pair = twins(strategy, name, aggregation=aggregation)
    updating = asked(OPTIMIZERS[name](0.1, aggregation=aggregation), "update")
    third = model(strategy)
    for step in range(4):
        gradients: list[Any] = gradients_for(pair.ours, step)
        if step == 2:
            gradients[0] = gradients[3] = None
        kept = pair.ours[0].local_copy()
        mine = list(gradients)
        if step == 3:
            mine[1] = ms.PerReplica((gradients[1],))
            mine[2] = gradients[2][()]
            mine[3] = np.asfortranarray(gradients[3])
        pair.step(mine, gradients)
        assert np.array_equal(pair.ours[0], kept) == (step == 2)
        apply(strategy, updating, gradients, third)
        assert state(updating, third) == state(pair.two, pair.theirs)
        assert (pair.one.latest_path, pair.two.latest_path) == (PATH, "plain")
    assert int(pair.one.iterations or 0) == 4


@several
@settings(max_examples=part_of(60))
@example(name="Adam", shapes=[((n % 7 + 1,), "float32") for n in range(300)], chunk=64, built=False)
@given(
    name=st.sampled_from(["SGD", "nesterov", "Adam"]),
    shapes=st.lists(
        st.tuples(st.tuples(st.integers(0, 120)), st.sampled_from(["float32", "float64"])), min_size=1, max_size=6
    ),
    chunk=st.sampled_from([64, 256, 2**19]),
    built=st.booleans(),
)
def test_shares_of_any_layout(strategy: ms.Strategy, name: str, shapes: Any, chunk: int, built: bool) -> None:
    """Odd sizes, fewer elements than ranks, several dtypes, hundreds of variables, and pieces of any size."""
    pair = twins(strategy, name, shapes)
    if built:  # the slots of one variable after the other
        with strategy.scope():
            for variable in pair.ours:
                pair.one.build([variable])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK_BYTES", chunk)
        for step in range(2):
            gradients = gradients_for(pair.ours, step)
            pair.step(gradients, gradients)
    assert pair.one.latest_path == PATH


LARGE: Shapes = [
    ((7,), "float32"),
    ((500, 701), "float32"),
    ((3,), "float32"),
    ((260_000,), "float32"),
    ((90_001,), "float64"),
    ((130_000,), "float32"),
]


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_large_gradients_are_read_where_they_are(strategy: ms.Strategy, name: str) -> None:
    """Not all of them are copied to where the peers see them, and the user's arrays stay as they are."""
    pair = twins(strategy, name, LARGE)
    for step in range(3):
        gradients: list[Any] = gradients_for(pair.ours, step)
        if step == 1:
            gradients[1] = np.asfortranarray(gradients[1])
            gradients[3] = np.repeat(gradients[3], 2)[::2]
        if step == 2:
            gradients[1].flags.writeable = False
            gradients[3], gradients[5] = np.zeros(390_000, np.float32)[130_000:], gradients[5][::-1]
        before = [gradient.copy() for gradient in gradients]
        pair.step(gradients, gradients)
        assert [bits(gradient) for gradient in gradients] == [bits(kept) for kept in before]
        assert pair.one.latest_path == PATH


def test_gradients_may_be_views_of_what_is_updated(strategy: ms.Strategy) -> None:
    """As in a weight decay by hand: the step must not read what it has just written."""
    pair = twins(strategy, "momentum", [((150_000,), "float32")] * 4)
    with strategy.scope():
        pair.one.build(pair.ours)
    views, slot = [np.asarray(v) for v in pair.ours], np.asarray(pair.one.slots_of(pair.ours[1])["momentum"])
    for _ in range(3):
        given = [views[1], views[0], slot, views[3]]
        pair.step(given, [array.copy() for array in given])
    assert pair.one.latest_path == PATH


# ------------------------------------------------------------------------------------------------- the arena


def test_gradients_in_the_arena_are_used_where_they_are(strategy: ms.Strategy) -> None:
    """The arena comes later, and some steps are of a few of its variables."""
    pair = twins(strategy, "Adam")
    for step in range(4):
        gradients = gradients_for(pair.ours, step)
        mine: Any = gradients
        if step:
            mine = pair.one.gradient_arena(pair.ours).values
            for value, gradient in zip(mine, gradients, strict=True):
                value[...] = gradient
        pair.step(mine, gradients, slice(None) if step % 2 else slice(1, 4))
        assert [(v.shape, v.dtype, bits(v)) for v in mine] == [(g.shape, g.dtype, bits(g)) for g in gradients]
        assert pair.one.latest_path == PATH
    assert pair.one.gradient_arena(pair.ours) is pair.one.gradient_arena(pair.ours)


def test_some_in_the_arena_and_some_in_anothers_place(strategy: ms.Strategy) -> None:
    pair = twins(strategy, "SGD", [((4, 3), "float32")] * 4)
    places = pair.one.gradient_arena(pair.ours).values
    for step, order in enumerate(([1, 0, 2, 3], [1, 2, 3, 0], [0, 0, 0, 0], [3, 2, 1, 0])):
        for place, gradient in zip(places, gradients_for(pair.ours, step), strict=True):
            place[...] = gradient
        mixed = [places[n] for n in order]
        mixed[step] = mixed[step] * 2
        mixed[2] = mixed[2][::-1]
        pair.step(mixed, [np.array(gradient) for gradient in mixed])


# ------------------------------------------------------------------------------------------------- the plain path


def sparse(variable: ms.Variable) -> ms.IndexedSlices:
    return ms.IndexedSlices(np.ones((1, *variable.shape[1:]), variable.dtype), np.array([0]), variable.shape)


@pytest.mark.parametrize(
    ("options", "second", "path"),
    [
        ({}, lambda v, g: g, PATH),
        ({"global_clipnorm": 1.0}, lambda v, g: g, "plain"),
        ({}, lambda v, g: sparse(v), "plain"),
        ({}, lambda v, g: g.astype(np.float64), "plain"),
        ({"aggregation": "MEAN"}, lambda v, g: ms.Mirrored((g,)), "plain"),
    ],
)
def test_what_cannot_be_sliced_takes_the_plain_path(
    strategy: ms.Strategy, options: dict[str, Any], second: Callable[[ms.Variable, Array], Any], path: str
) -> None:
    variables, optimizer = model(strategy, [((4, 2), "float32")] * 2), SGD(0.1, **options)
    ones = np.ones((4, 2), np.float32)
    apply(strategy, optimizer, [ones, second(variables[1], ones)], variables)
    assert optimizer.latest_path == path
    apply(strategy, optimizer, [ones, ones], [variables[0]] * 2)
    assert optimizer.latest_path == "plain"
    assert same_everywhere(variables)


def test_copies_that_may_differ_take_the_plain_path(strategy: ms.Strategy) -> None:
    variable = new_variable(strategy, np.zeros(2), synchronization="ON_READ", aggregation="MEAN")
    strategy.run(lambda: variable.assign(np.full(2, float(RANK))))
    optimizer = SGD(0.5)
    apply(strategy, optimizer, [np.ones(2)], [variable])
    assert optimizer.latest_path == "plain"
    np.testing.assert_array_equal(variable.local_copy(), [RANK - 0.5 * SIZE] * 2)


@pytest.mark.parametrize("missing", ["one node", "the order of sums", "memory for variables", "memory for slots"])
def test_strategies_that_take_the_plain_path(missing: str) -> None:
    algorithm = ms.ReductionToOneDevice() if missing == "the order of sums" else ms.MpiAllReduce()
    made: ms.Strategy = ms.MirroredStrategy(cross_device_ops=algorithm)
    if missing == "one node":
        made = OnNodes([rank % 2 for rank in RANKS], algorithm)
    ranks: Any = made.extended.communicator
    ranks.shares_memory = ranks.shares_memory and missing != "memory for variables"
    variables, optimizer = model(made), Adam(0.1)
    ranks.shares_memory = ranks.shares_memory and missing != "memory for slots"
    for step in range(2):
        apply(made, optimizer, gradients_for(variables, step), variables)
        assert optimizer.latest_path == "plain"
    assert same_everywhere(variables)
    made.close()


# ------------------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        ("optimizer", "learning_rate", 0.5),
        ("optimizer", "momentum", 0.25),
        ("optimizer", "nesterov", True),
        ("optimizer", "aggregation", ms.ReduceOp.MEAN),
        ("optimizer", "global_clipnorm", 0.01),
        ("optimizer", "nonfinite", "skip"),
        ("strategy", "cross_device_ops", ms.ReductionToOneDevice()),
        ("strategy", "options", ms.CommunicationOptions(bytes_per_pack=64)),
    ],
)
def test_what_changes_between_steps_counts(fresh: ms.Strategy, of: str, name: str, value: Any) -> None:
    pair = twins(fresh, "momentum")
    for number in range(6):
        if number == 3:
            for changed in (pair.one, pair.two) if of == "optimizer" else (fresh.extended,):
                setattr(changed, name, value)
        before = state(pair.one, pair.ours)
        gradients = gradients_for(pair.ours, number)
        pair.step(gradients, gradients)
        assert before != state(pair.one, pair.ours)
    assert int(pair.one.iterations or 0) == 6


def test_a_momentum_may_be_off_for_a_while(strategy: ms.Strategy) -> None:
    """And a variable that joins in the meantime has no slot at first."""
    pair = twins(strategy, "momentum")
    for number, (momentum, count) in enumerate([(0.9, 1), (0.0, 2), (0.9, 2)]):
        pair.one.momentum = pair.two.momentum = momentum
        gradients = gradients_for(pair.ours, number)
        pair.step(gradients, gradients, slice(count))


def test_a_counter_of_the_programs_own_counts_on(fresh: ms.Strategy) -> None:
    variables, optimizer = model(fresh), Adam(0.1)
    mine, other = (
        new_variable(fresh, np.int64(10), aggregation="ONLY_FIRST_REPLICA"),
        new_variable(fresh, np.float32(0)),
    )
    for number, counter in enumerate((mine, mine, other)):
        optimizer.iterations = counter
        apply(fresh, optimizer, gradients_for(variables, number), variables)
    assert (int(mine), float(other), optimizer.next_step()) == (12, 1.0, 2)


@several
def test_other_variables_in_every_step_take_no_more_memory(fresh: ms.Strategy) -> None:
    """As where a part of the model is left out by chance: shared memory for gradients is made twice, and no more."""
    pair, paths = twins(fresh, "SGD"), []
    for first in (0, 1, 2, 3, 0):
        gradients = gradients_for(pair.ours, first)
        pair.step(gradients, gradients, slice(first, first + 2))
        paths.append(pair.one.latest_path)
    assert paths in (["sliced", "sliced", "plain", "plain", "sliced"], ["plain"] * 5)  # on several nodes


def test_optimizers_that_come_and_go_leave_nothing(strategy: ms.Strategy) -> None:
    maps, counts = Path("/proc/self/maps"), []
    if not maps.exists():
        pytest.skip("needs Linux")
    for _ in range(12):
        variables, optimizer = model(strategy, [((50_000,), "float32"), ((3,), "float64")]), Adam(0.1)
        for step in range(2):
            apply(strategy, optimizer, gradients_for(variables, step), variables)
        del variables, optimizer
        gc.collect()
        counts.append(sum("mpistrategy" in line for line in maps.read_text().splitlines()))
    assert max(counts[6:]) <= max(counts[:6])


# ------------------------------------------------------------------------------------------------- mistakes


@several
@pytest.mark.parametrize("dtype", ["float64", "float16"], ids=["prepared", "plain"])
def test_a_rank_that_is_a_step_ahead_is_found(strategy: ms.Strategy, dtype: str) -> None:
    variables, optimizer = model(strategy, [((3, 5), dtype)]), SGD(0.1)
    apply(strategy, optimizer, gradients_for(variables, 0), variables)
    before = state(optimizer, variables)
    with strategy.scope():
        optimizer.variables[0].assign(np.int64(2 + RANK))  # each rank writes its own copy
    all_raise(
        errors.CollectiveMismatchError,
        apply,
        strategy,
        optimizer,
        gradients_for(variables, 1),
        variables,
        words=["they differ in: step"],
    )
    assert state(optimizer, variables) == before


@several
def test_after_a_setting_that_differed_equal_steps_work(strategy: ms.Strategy) -> None:
    pair = twins(strategy, "momentum")
    for number in range(4):
        gradients = gradients_for(pair.ours, number)
        pair.one.nonfinite = "skip" if number == 2 and RANK else None
        if number == 2:
            all_raise(errors.CollectiveMismatchError, apply, strategy, pair.one, gradients, pair.ours)
        else:
            pair.step(gradients, gradients)


@pytest.mark.skipif(PATH == "plain", reason="each rank updates all of its copies")
def test_an_overflow_that_raises_in_one_share_raises_everywhere() -> None:
    strategy = ms.MirroredStrategy(on_error="raise")
    (variable,) = model(strategy, [((4096,), "float32")])
    optimizer, gradient = SGD(1e30), np.zeros(4096, np.float32)
    gradient[-1] = 1e30  # the last rank's share

    def step() -> None:
        with np.errstate(over="raise"):
            optimizer.apply_gradients([(gradient, variable)])

    ended = outcomes(strategy.run, step)
    assert [one.error for one in ended] == [errors.RemoteError] * (SIZE - 1) + [Exception], ended
    assert "FloatingPointError" in ended[-1].text
    strategy.close()
