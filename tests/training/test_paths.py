"""The two paths of an optimizer's step: to the bit the same, and which one is taken."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import BFLOAT16, RANK, RANKS, SIZE, OnNodes, bits, outcomes, part_of, same_everywhere, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array
from mpistrategy.optimizers import SGD, Adam, AdamW, Optimizer
from mpistrategy.training import kernels

pytestmark = pytest.mark.mpi
several = pytest.mark.mpi(min_size=2)

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda **o: SGD(0.1, **o),
    "momentum": lambda **o: SGD(0.03, momentum=0.9, **o),
    "nesterov": lambda **o: SGD(0.03, momentum=0.9, nesterov=True, **o),
    "Adam": lambda **o: Adam(0.01, 0.8, 0.99, 1e-5, **o),
    "AdamW": lambda **o: AdamW(0.01, 0.05, 0.8, 0.99, 1e-5, **o),
    "Adam without epsilon": lambda **o: Adam(0.01, epsilon=0, **o),
}
SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((3, 5), "float32"),
    ((1,), "float32"),
    ((), "float32"),
    ((70, 31), "float32"),
    ((7,), "float64"),
    ((0, 4), "float32"),
    ((2, 2, 2), "float64"),
    ((16,), "float32"),
]


def plain(optimizer: Optimizer) -> Optimizer:
    """Return the same optimizer, as one that is asked what to change: it takes the plain path."""
    kind: Any = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (kind,), {"change": lambda self, g, slots: kind.change(self, g, slots)})
    return optimizer


def model(strategy: ms.Strategy, shapes: Sequence[Any] = SHAPES) -> list[ms.Variable]:
    with strategy.scope():
        return [ms.Variable(np.linspace(-1, 1, int(np.prod(s)), dtype=d).reshape(s)) for s, d in shapes]


def gradients_for(variables: Sequence[ms.Variable], step: int) -> list[Array]:
    random = np.random.default_rng([step, RANK])
    return [np.asarray(random.standard_normal(v.shape)).astype(v.dtype) + v.dtype.type(0.5) for v in variables]


def apply(strategy: ms.Strategy, optimizer: Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))


def state(optimizer: Optimizer, variables: Sequence[ms.Variable]) -> list[bytes]:
    slots = [slot for v in variables for slot in optimizer.slots_of(v).values()]
    return [bits(v.local_copy()) for v in (*variables, *slots)]


PATH = "sliced" if SIZE > 1 else "plain"


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_paths_give_the_same_bits(strategy: ms.Strategy, name: str, aggregation: str) -> None:
    """With several dtypes and odd sizes in one model, learning rates that change, and variables without gradients."""
    ours, theirs = model(strategy), model(strategy)
    one = OPTIMIZERS[name](aggregation=aggregation)
    two = plain(OPTIMIZERS[name](aggregation=aggregation))
    for step in range(6):
        gradients: list[Any] = gradients_for(ours, step)
        if step == 3:
            one.learning_rate = two.learning_rate = 0.002
        if step == 4:
            gradients[0] = gradients[3] = None
        if step == 5:
            gradients[1] = ms.PerReplica((gradients[1],))
            gradients[2] = gradients[2][()]
            gradients[3] = np.asfortranarray(gradients[3])
        apply(strategy, one, gradients, ours)
        here = state(one, ours)  # at once: no rank may still be at work on this one's copies
        apply(strategy, two, gradients, theirs)
        assert here == state(two, theirs)
        assert here == state(one, ours)
        assert same_everywhere([v.local_copy() for v in ours])
        assert (one.latest_path, two.latest_path) == (PATH, "plain")
    assert one.iterations is not None
    assert int(one.iterations) == 6


def test_hundreds_of_small_variables_are_one_run(strategy: ms.Strategy) -> None:
    ours, theirs = (model(strategy, [((n % 7 + 1,), "float32") for n in range(300)]) for _ in range(2))
    one, two = SGD(0.1, momentum=0.5), plain(SGD(0.1, momentum=0.5))
    for step in range(2):
        gradients = gradients_for(ours, step)
        apply(strategy, one, gradients, ours)
        apply(strategy, two, gradients, theirs)
    assert state(one, ours) == state(two, theirs)
    assert one.latest_path == PATH


@several
@settings(max_examples=part_of(60))
@given(
    name=st.sampled_from(["SGD", "nesterov", "Adam"]),
    shapes=st.lists(
        st.tuples(st.tuples(st.integers(0, 120)), st.sampled_from(["float32", "float64"])), min_size=1, max_size=6
    ),
    chunk=st.sampled_from([64, 256, 2**19]),
    built=st.booleans(),
)
def test_shares_of_any_layout(strategy: ms.Strategy, name: str, shapes: Any, chunk: int, built: bool) -> None:
    """Odd sizes, fewer elements than ranks, several dtypes, other variables in between, and pieces of any size."""
    ours, theirs = model(strategy, shapes), model(strategy, shapes)
    one, two = OPTIMIZERS[name](), plain(OPTIMIZERS[name]())
    if built:  # the slots of one variable after the other
        with strategy.scope():
            for variable in ours:
                one.build([variable])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK_BYTES", chunk)
        for step in range(2):
            gradients = gradients_for(ours, step)
            apply(strategy, one, gradients, ours)
            apply(strategy, two, gradients, theirs)
    assert state(one, ours) == state(two, theirs)
    assert one.latest_path == PATH


LARGE: list[tuple[tuple[int, ...], str]] = [
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
    ours, theirs = model(strategy, LARGE), model(strategy, LARGE)
    one, two = OPTIMIZERS[name](), plain(OPTIMIZERS[name]())
    for step in range(4):
        gradients: list[Any] = gradients_for(ours, step)
        if step == 1:
            gradients[1] = np.asfortranarray(gradients[1])
            gradients[3] = np.repeat(gradients[3], 2)[::2]
        if step == 2:
            gradients[1].flags.writeable = False
            gradients[3], gradients[5] = np.zeros(390_000, np.float32)[130_000:], gradients[5][::-1]
        before = [gradient.copy() for gradient in gradients]
        apply(strategy, one, gradients, ours)
        apply(strategy, two, gradients, theirs)
        for gradient, kept in zip(gradients, before, strict=True):
            np.testing.assert_array_equal(gradient, kept)
        assert state(one, ours) == state(two, theirs)
        assert same_everywhere([v.local_copy() for v in ours])
        assert one.latest_path == PATH


def test_gradients_may_be_views_of_what_is_updated(strategy: ms.Strategy) -> None:
    """As in a weight decay by hand: the step must not read what it has just written."""
    shapes: list[tuple[tuple[int, ...], str]] = [((150_000,), "float32")] * 4
    ours, theirs = model(strategy, shapes), model(strategy, shapes)
    one, two = SGD(0.1, momentum=0.5), plain(SGD(0.1, momentum=0.5))
    for _ in range(3):
        for optimizer, variables in ((one, ours), (two, theirs)):
            with strategy.scope():
                optimizer.build(variables)
            views = [np.asarray(v) for v in variables]
            slot = np.asarray(next(iter(optimizer.slots_of(variables[1]).values())))
            given = [views[1], views[0], slot, views[3]]
            apply(strategy, optimizer, given if optimizer is one else [array.copy() for array in given], variables)
        assert state(one, ours) == state(two, theirs)
    assert one.latest_path == PATH


class TestGradientArena:
    """Gradients that are written where the ranks of the node see them."""

    def test_gradients_in_the_arena_are_used_where_they_are(self, strategy: ms.Strategy) -> None:
        ours, theirs = model(strategy), model(strategy)
        one, two = Adam(0.01), plain(Adam(0.01))
        arena = one.gradient_arena(ours)
        assert arena is one.gradient_arena(ours)
        assert [v.shape for v in arena.values] == [v.shape for v in ours]
        assert [v.dtype for v in arena.values] == [v.dtype for v in ours]
        for step in range(3):
            gradients = gradients_for(ours, step)
            for value, gradient in zip(arena.values, gradients, strict=True):
                value[...] = gradient
            apply(strategy, one, arena.values, ours)
            apply(strategy, two, gradients, theirs)
            assert state(one, ours) == state(two, theirs)
            assert [bits(value) for value in arena.values] == [bits(gradient) for gradient in gradients]
        assert one.latest_path == PATH

    def test_some_in_the_arena_and_some_in_anothers_place(self, strategy: ms.Strategy) -> None:
        shapes = [((4, 3), "float32")] * 4
        ours, theirs = model(strategy, shapes), model(strategy, shapes)
        one, two = SGD(0.1), plain(SGD(0.1))
        places = one.gradient_arena(ours).values
        for step, order in enumerate(([1, 0, 2, 3], [1, 2, 3, 0], [0, 0, 0, 0], [3, 2, 1, 0])):
            for place, gradient in zip(places, gradients_for(ours, step), strict=True):
                place[...] = gradient
            mixed = [places[n] for n in order]
            mixed[step] = mixed[step] * 2
            mixed[2] = mixed[2][::-1]
            copies = [np.array(gradient) for gradient in mixed]
            apply(strategy, one, mixed, ours)
            apply(strategy, two, copies, theirs)
            assert state(one, ours) == state(two, theirs)

    def test_an_arena_that_comes_later_and_one_for_more_variables(self, strategy: ms.Strategy) -> None:
        ours, theirs = model(strategy), model(strategy)
        one, two = SGD(0.1), plain(SGD(0.1))
        some = slice(1, 4)
        for step in range(4):
            gradients = gradients_for(ours, step)
            mine: Any = gradients
            if step >= 1:
                mine = one.gradient_arena(ours).values
                for value, gradient in zip(mine, gradients, strict=True):
                    value[...] = gradient
            part = some if step % 2 == 0 else slice(None)
            apply(strategy, one, mine[part], ours[part])
            apply(strategy, two, gradients[part], theirs[part])
            assert [bits(v) for v in ours] == [bits(v) for v in theirs]
            assert one.latest_path == PATH

    def test_mistakes(self, strategy: ms.Strategy) -> None:
        optimizer, wrong = SGD(0.1), [np.ones(2)]
        with pytest.raises(errors.OptionError, match="Variable"):
            optimizer.gradient_arena(wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.EmptyBatchError):
            optimizer.gradient_arena([])
        other = ms.OneDeviceStrategy("CPU:0")
        with pytest.raises(errors.OptionError, match="another strategy"):
            optimizer.gradient_arena([*model(strategy), *model(other)])


# ------------------------------------------------------------------------------------------------- the plain path


def one_step(strategy: ms.Strategy, optimizer: Optimizer, variables: Sequence[ms.Variable], gradients: Any) -> str:
    apply(strategy, optimizer, gradients, variables)
    return optimizer.latest_path


def sparse(variable: ms.Variable) -> ms.IndexedSlices:
    return ms.IndexedSlices(np.ones((1, *variable.shape[1:]), variable.dtype), np.array([0]), variable.shape)


def test_what_cannot_be_sliced_takes_the_plain_path(strategy: ms.Strategy) -> None:
    variables = model(strategy, [((4, 2), "float32")] * 2)
    ones = [np.ones((4, 2), np.float32)] * 2

    assert one_step(strategy, SGD(0.1), variables, ones) == PATH
    assert one_step(strategy, SGD(0.1, global_clipnorm=1.0), variables, ones) == "plain"
    assert one_step(strategy, SGD(0.1), variables, [ones[0], sparse(variables[1])]) == "plain"
    assert one_step(strategy, SGD(0.1), variables, [ones[0], ones[1].astype(np.float64)]) == "plain"
    assert one_step(strategy, SGD(0.1, aggregation="MEAN"), variables, [ones[0], ms.Mirrored((ones[1],))]) == "plain"
    assert one_step(strategy, SGD(0.1), [variables[0]] * 2, ones) == "plain"
    assert one_step(strategy, plain(SGD(0.1)), variables, ones) == "plain"
    assert same_everywhere(variables)


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "longdouble", "complex64"], ids=str)
def test_dtypes_that_take_the_plain_path(strategy: ms.Strategy, dtype: Any) -> None:
    with strategy.scope():
        variables = [ms.Variable(np.zeros(3, dtype)), ms.Variable(np.zeros(3, np.float32))]
    optimizer = SGD(0.5)
    assert one_step(strategy, optimizer, variables, [np.ones(3, dtype), np.ones(3, np.float32)]) == "plain"
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy().real.astype(float), [-0.5 * SIZE] * 3)


def test_copies_that_may_differ_take_the_plain_path(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable(np.zeros(2), synchronization="ON_READ", aggregation="MEAN")
    strategy.run(lambda: variable.assign(np.full(2, float(RANK))))
    assert one_step(strategy, SGD(0.5), [variable], [np.ones(2)]) == "plain"
    np.testing.assert_array_equal(variable.local_copy(), [RANK - 0.5 * SIZE] * 2)


@pytest.mark.parametrize("what", ["nodes", "algorithm", "update"])
def test_strategies_that_take_the_plain_path(what: str) -> None:
    made: ms.Strategy
    if what == "nodes":
        made = OnNodes([rank % 2 for rank in RANKS], ms.MpiAllReduce())
    elif what == "algorithm":
        made = ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice())
    else:
        made = ms.MirroredStrategy()
        made.extended.__class__ = type("Own", (type(made.extended),), {"update": ms.StrategyExtended.update})
        made.extended.__class__.update = lambda self, *a, **k: ms.StrategyExtended.update(self, *a, **k)  # type: ignore[method-assign]
    ours = model(made, SHAPES)
    optimizer = Adam(0.1)
    for _ in range(2):
        assert one_step(made, optimizer, ours, [np.ones(v.shape, v.dtype) for v in ours]) == "plain"
    assert same_everywhere(ours)
    if what != "nodes":
        made.close()


@pytest.mark.parametrize("when", ["before the variables", "before the slots", "before the arena"])
def test_without_shared_memory_it_is_the_plain_path(when: str) -> None:
    made = ms.MirroredStrategy()
    ranks: Any = made.extended.communicator
    optimizer, shapes = Adam(0.1), [((200_000,), "float32"), ((3,), "float32")]
    ranks.shares_memory = ranks.shares_memory and when != "before the variables"
    variables = model(made, shapes)
    ranks.shares_memory = ranks.shares_memory and when != "before the slots"
    with made.scope():
        optimizer.build(variables)
    ranks.shares_memory = False
    for step in range(2):
        apply(made, optimizer, gradients_for(variables, step), variables)
        assert optimizer.latest_path == "plain"
    assert same_everywhere(variables)
    made.close()


# ------------------------------------------------------------------------------------------------- mistakes


@several
def test_one_rank_that_cannot_make_the_step_changes_nothing(strategy: ms.Strategy) -> None:
    variables = model(strategy, [((4, 2), "float32")] * 2)
    optimizer = Adam(0.1)
    gradients = gradients_for(variables, 0)
    last = RANK == SIZE - 1

    def refused(mine: Any, kind: type[Exception], optimizer: Optimizer = optimizer) -> None:
        before = state(optimizer, variables)
        ended = outcomes(apply, strategy, optimizer, mine if last else gradients, variables)
        assert {one.error for one in ended} == {kind}, ended
        assert state(optimizer, variables)[: len(before)] == before
        assert still_works(strategy)

    for built in (False, True):  # slots and arenas not made yet, and made
        refused([gradients[0], np.ones((2, 4), np.float32)], errors.ShapeError)
        refused([gradients[0], np.ones((4, 2), bool)], errors.DTypeError)
        refused([gradients[0], sparse(variables[1])], errors.CollectiveMismatchError)
        refused([gradients[0], gradients[1].astype(np.float64)], errors.CollectiveMismatchError)
        refused([gradients[0], None], errors.CollectiveMismatchError)
        if not built:
            apply(strategy, optimizer, gradients, variables)
            assert optimizer.latest_path == "sliced"
    optimizer.learning_rate = 0.2 if last else 0.1
    refused(gradients, errors.CollectiveMismatchError)
    optimizer.learning_rate = 0.1
    apply(strategy, optimizer, gradients, variables)
    assert same_everywhere(variables)


@several
def test_an_overflow_that_raises_in_one_share_raises_everywhere() -> None:
    strategy = ms.MirroredStrategy(on_error="raise")
    (variable,) = model(strategy, [((4096,), "float32")])
    optimizer = SGD(1e30)
    gradient = np.zeros(4096, np.float32)
    gradient[-1] = 1e30  # the last rank's share

    def step() -> None:
        with np.errstate(over="raise"):
            optimizer.apply_gradients([(gradient, variable)])

    ended = outcomes(strategy.run, step)
    assert [one.error for one in ended] == [errors.RemoteError] * (SIZE - 1) + [Exception], ended
    assert "FloatingPointError" in ended[-1].text
    strategy.close()


def test_optimizers_that_come_and_go_leave_nothing(strategy: ms.Strategy) -> None:
    def mappings() -> int:
        return sum("mpistrategy" in line for line in Path("/proc/self/maps").read_text().splitlines())

    def once() -> None:
        variables = model(strategy, [((50_000,), "float32"), ((3,), "float64")])
        optimizer = Adam(0.1)
        for step in range(2):
            apply(strategy, optimizer, gradients_for(variables, step), variables)
        assert optimizer.latest_path == PATH

    if not Path("/proc/self/maps").exists():
        pytest.skip("needs Linux")
    counts = []
    for _ in range(12):
        once()
        gc.collect()
        counts.append(mappings())
    assert max(counts[6:]) <= max(counts[:6])
