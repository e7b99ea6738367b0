"""`Strategy.assert_mirrored`: one bit that differs is found, on the right rank; nothing else is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from replicas import (
    BFLOAT16,
    RANK,
    RANKS,
    SIZE,
    all_raise,
    gather_texts,
    new_variable,
    outcomes,
    part_of,
    rows,
    several,
    still_works,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import digests
from mpistrategy.arrays.dtypes import Array
from mpistrategy.objects.shown import ranks_in_words
from mpistrategy.optimizers import SGD, Adam, AdamW, Optimizer

pytestmark = pytest.mark.mpi

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda **o: SGD(0.01, **o),
    "momentum": lambda **o: SGD(0.01, momentum=0.9, **o),
    "Adam": lambda **o: Adam(0.01, **o),
    "AdamW": lambda **o: AdamW(0.01, **o),
}


@pytest.fixture(scope="module")
def model(strategy: ms.Strategy) -> list[ms.Variable]:
    dtypes: list[Any] = ["float32", "float64", "int8", "bool", "complex64", BFLOAT16, "float16", "longdouble"]
    made = [new_variable(strategy, np.ones((3, n % 3 + 1), dtype), name=f"v{n}") for n, dtype in enumerate(dtypes)]
    special = new_variable(strategy, np.array([0.0, np.nan]), name="special")
    return [
        *made,
        new_variable(strategy, np.ones((700, 300)), name="large"),
        new_variable(strategy, np.float32(1)),
        special,
    ]


def storage_of(var: ms.Variable) -> Array:
    """Return this rank's copy as bytes that can be written."""
    return var._storage.reshape(-1).view(np.uint8)


def flip(strategy: ms.Strategy, var: ms.Variable, bit: int, ranks: tuple[int, ...]) -> None:
    """Change one bit of the copies of some ranks."""
    memory = storage_of(var)
    if RANK in ranks:
        memory[bit // 8] ^= 1 << bit % 8


def told_everywhere(check: Callable[[], None]) -> str:
    """Return the text of the ReplicasDivergedError that `check` raises on every rank, the same on all."""
    ended = outcomes(check)
    assert {one.error for one in ended} == {errors.ReplicasDivergedError}, ended
    assert len({one.text for one in ended}) == 1
    return ended[0].text


@several
@settings(max_examples=part_of(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    which=st.integers(0, 10), place=st.floats(0, 1, exclude_max=True), rank=st.integers(0, SIZE - 1), all_=st.booleans()
)
@example(which=8, place=0.0, rank=SIZE - 1, all_=False)  # large arrays are compared from their beginning
@example(which=8, place=1 - 2.0**-40, rank=SIZE - 1, all_=False)  # to their end
def test_one_flipped_bit_is_found(
    strategy: ms.Strategy, model: list[ms.Variable], which: int, place: float, rank: int, all_: bool
) -> None:
    var = model[which]
    bit = int(place * storage_of(var).size * 8)
    if var.dtype == np.longdouble and np.finfo(np.longdouble).nmant == 63:
        bit = bit // 128 * 128 + bit % 80  # the rest is padding
    flip(strategy, var, bit, (rank,))
    text = told_everywhere(lambda: strategy.assert_mirrored(None if all_ else model))
    flip(strategy, var, bit, (rank,))
    assert f"{var._key} " in text
    assert f"{list(var.shape)}" in text
    assert "copies that differ in 1 of " in text
    others = [other for other in RANKS if other != rank]
    if SIZE > 2:
        assert f"rank {rank} differs from {ranks_in_words(others)}" in text
    else:
        assert "rank 1 differs from rank 0" in text
    strategy.assert_mirrored(None if all_ else model)


@pytest.mark.one_rank
@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble", [("few", "i1"), ("wide", "longdouble", 2)]], ids=str)
def test_padding_does_not_count(dtype: Any) -> None:
    memory = [np.full(3 * np.dtype(dtype).itemsize, byte, np.uint8).view(dtype) for byte in (0, 255)]
    for array in memory:
        for part in [array] if array.dtype.names is None else [array[name] for name in array.dtype.names]:
            part[...] = 1
    assert digests.digest(memory[0]) == digests.digest(memory[1])


@several
def test_several_that_differ_are_listed_and_many_are_counted(strategy: ms.Strategy) -> None:
    many = [new_variable(strategy, np.zeros(2), name=f"part{n}") for n in range(25)]
    for var in many[3:]:
        flip(strategy, var, 0, tuple(RANKS[1:]))
    text = told_everywhere(lambda: strategy.assert_mirrored(many))
    assert "copies that differ in 22 of 25 variables" in text
    assert "  part3 (variable" in text
    assert "part13" not in text
    assert text.splitlines()[-2] == "  and 12 more"
    if SIZE >= 3:
        assert f"rank 0 differs from {ranks_in_words(RANKS[1:])}" in text
    for rank in RANKS:
        flip(strategy, many[0], rank + 1, (rank,))
    row = told_everywhere(lambda: strategy.assert_mirrored([many[0]])).splitlines()[-2]
    assert f"{ranks_in_words(RANKS[1:])} differ" in row
    assert row.endswith("rank 0" if SIZE == 2 else f"rank 0, in {SIZE - 1} ways")


@pytest.mark.mpi(min_size=4)
def test_two_halves_are_no_majority(strategy: ms.Strategy) -> None:
    var = new_variable(strategy, np.zeros(2))
    flip(strategy, var, 5, (0, 2))
    text = told_everywhere(lambda: strategy.assert_mirrored(var))
    assert "ranks 1, 3 differ from ranks 0, 2" in text


def test_slots_and_steps_are_checked_too(strategy: ms.Strategy) -> None:
    var = new_variable(strategy, np.zeros(3), name="weights")
    adam = Adam(0.1)
    strategy.run(lambda: adam.apply_gradients([(np.ones(3), var)]))
    assert [v.name for v in adam.variables] == ["Adam/iterations", "weights/Adam/m", "weights/Adam/v"]
    for slot in adam.variables:
        strategy.assert_mirrored()
        strategy.assert_mirrored({"model": [var], "optimizer": adam})
        if SIZE == 1:
            continue
        flip(strategy, slot, 3, (SIZE - 1,))
        for what in (None, adam, [var, adam]):
            assert slot._key in told_everywhere(lambda what=what: strategy.assert_mirrored(what))  # type: ignore[misc]
        strategy.assert_mirrored(var)
        flip(strategy, slot, 3, (SIZE - 1,))


@pytest.mark.parametrize("place", ["one node", "two nodes"])
def test_in_every_context_and_across_nodes(strategy: ms.Strategy, two_nodes: ms.Strategy, place: str) -> None:
    where = strategy if place == "one node" else two_nodes
    with where.scope():
        var = ms.Variable(np.zeros(3))
        where.assert_mirrored(var)
    checks: list[Callable[[], Any]] = [
        where.assert_mirrored,
        lambda: where.run(lambda: where.assert_mirrored(var)),
        lambda: where.run(lambda: ms.get_replica_context().merge_call(lambda s: s.assert_mirrored())),
        lambda: where.extended.update(var, lambda v: where.assert_mirrored(v)),
    ]
    for check in checks:
        check()
        flip(where, var, 1, (SIZE - 1,))
        if SIZE > 1:
            told_everywhere(check)
        flip(where, var, 1, (SIZE - 1,))
    ms.get_strategy().assert_mirrored()
    assert still_works(where)


def test_on_read_variables_may_differ(strategy: ms.Strategy) -> None:
    own = new_variable(strategy, 0.0, synchronization="ON_READ", aggregation="SUM")
    var = new_variable(strategy, 0.0)
    strategy.run(lambda: own.assign(RANK + 1.0))
    strategy.assert_mirrored()

    class Model:
        variables = (own, var)

    strategy.assert_mirrored(Model())
    all_raise(errors.OptionError, strategy.assert_mirrored, [var, own], words=["ON_READ"])


def test_what_some_ranks_have_collected_is_left_out(strategy: ms.Strategy) -> None:
    gc.collect()
    with strategy.scope():
        var: Any = ms.Variable(np.zeros(3), name="gone here")
        kept = ms.Variable(np.zeros(3), name="kept")
    watched = weakref.ref(var)
    if RANK == 0:
        del var
        assert watched() is None, "the list of variables keeps none alive"
    strategy.assert_mirrored()
    flip(strategy, kept, 9, (SIZE - 1,))
    if SIZE > 1:
        with pytest.raises(errors.ReplicasDivergedError) as raised:
            strategy.assert_mirrored()
        (text,) = set(gather_texts("\n".join(str(raised.value).splitlines()[1:])))  # but for the counts
        assert "kept" in text
        assert "gone here" not in text
    flip(strategy, kept, 9, (SIZE - 1,))


# ------------------------------------------------------------------------------------------- in training


SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((3, 5), "float32"),
    ((), "float32"),
    ((70,), "float64"),
    ((0, 2), "float32"),
]


@pytest.mark.parametrize(("name", "path"), rows(2, OPTIMIZERS, ["usual", "plain", "buckets"]))
def test_checked_steps_give_no_alarm(strategy: ms.Strategy, two_nodes: ms.Strategy, name: str, path: str) -> None:
    where = two_nodes if path == "buckets" else strategy
    variables = [new_variable(where, np.linspace(-1, 1, int(np.prod(s)), dtype=d).reshape(s)) for s, d in SHAPES]
    own = new_variable(where, np.zeros(2), synchronization="ON_READ", aggregation="SUM")
    optimizer = OPTIMIZERS[name](mirrored_check_steps=1, global_clipnorm=1e9 if path == "plain" else None)
    random = np.random.default_rng([7, RANK])
    buckets = optimizer.gradient_buckets(variables) if path == "buckets" else None

    def step() -> None:
        gradients = [random.standard_normal(var.shape).astype(var.dtype) for var in variables]
        if buckets is None:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            for target, gradient in zip(buckets.values, gradients, strict=True):
                target[...] = gradient
            optimizer.apply_gradients(buckets)
        own.assign_add(np.full(2, float(RANK)))

    for _ in range(10):
        where.run(step)
    where.assert_mirrored()


@several
@pytest.mark.parametrize("path", ["sliced", "plain"])
def test_every_third_step_finds_what_has_drifted(strategy: ms.Strategy, path: str) -> None:
    with strategy.scope():
        var, still = ms.Variable(np.zeros(3), name="moves"), ms.Variable(np.zeros(3), name="stays")
        optimizer = SGD(0.1, momentum=0.9, mirrored_check_steps=3, global_clipnorm=1e9 if path == "plain" else None)
        optimizer.build([var, still])

    def step() -> None:
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), var)]))

    for target in (still, optimizer.slots_of(still)["momentum"]):
        for number in range(1, 7):
            if number == 4:
                flip(strategy, target, 60, (0,))
            if number == 6:
                text = told_everywhere(step)
                assert target._key in text
                assert "SGD.apply_gradients: found copies that differ in 1 of 5 variables" in text
            else:
                step()
        flip(strategy, target, 60, (0,))
