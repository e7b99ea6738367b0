"""Where variables lie: at the same places on every rank, and nowhere where something else is still looked at."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, RANKS, SIZE, OnNodes, gather_texts, new_variable, outcomes, same_everywhere, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory import segments
from mpistrategy.variables.variable import VariableSlot

pytestmark = pytest.mark.mpi

MIB = 2**20


@pytest.fixture
def fresh() -> Iterator[ms.MirroredStrategy]:
    with closing(ms.MirroredStrategy()) as made:
        yield made


def slot_of(variable: ms.Variable) -> VariableSlot:
    assert variable._memory_slot is not None
    return variable._memory_slot


def bytes_in_use() -> int:
    """Return the bytes of shared memory that this rank still holds, for each rank of its node."""
    gc.collect()
    return sum(nbytes for _, nbytes, _ in segments._mappings.values()) // SIZE


# ------------------------------------------------------------------------------------------------- places


def test_variables_of_one_replica_lie_in_its_own_memory() -> None:
    alone = ms.OneDeviceStrategy()
    with alone.scope():
        assert ms.Variable(np.ones(3))._memory_slot is None

    def program() -> bool:
        strategy = ms.MirroredStrategy()
        made = [new_variable(strategy, np.full(n, 2.0), aggregation="SUM") for n in (3, 2 * MIB)]
        strategy.run(lambda: [variable.assign_add(np.ones(variable.shape)) for variable in made])
        return all(variable._memory_slot is None and (variable.numpy() == 4).all() for variable in made)

    assert ms.testing.run_replicas(program, 2) == [True, True]
    for nodes in (list(RANKS), [min(rank, 1) for rank in RANKS]):
        with OnNodes(nodes, ms.MpiAllReduce()) as strategy, strategy.scope():
            variable = ms.Variable(np.full(3, RANK), name="v")
            assert variable.numpy().tolist() == [0, 0, 0]
            assert (variable._memory_slot is None) == (max(map(nodes.count, nodes)) == 1)


def test_writes_stay_in_the_same_memory(strategy: ms.Strategy) -> None:
    variable = new_variable(strategy, np.zeros((2, 3), np.float32), aggregation="SUM")
    view, address = np.asarray(variable), variable.local_view.ctypes.data
    strategy.run(lambda: variable.assign_add(np.ones((2, 3), np.float32)))
    variable.scatter_add(ms.IndexedSlices(np.ones((1, 3), np.float32), [1]))
    assert view.tolist() == [[SIZE] * 3, [SIZE + 1] * 3]
    assert variable.local_view.ctypes.data == address
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


# ----------------------------------------------------------------------------------------------- given back


@pytest.mark.mpi(min_size=2)
def test_slabs_that_nobody_looks_into_are_given_back(fresh: ms.Strategy) -> None:
    held, before = [], bytes_in_use()
    with fresh.scope():
        for number in range(1600):
            variable = ms.Variable(np.full(MIB // 64, float(number)))
            if number % 400 == 7 and number // 400 % SIZE == RANK:  # one rank alone holds on to it
                held.append(np.asarray(variable)[3::7].reshape(-1, 1).T)
    assert bytes_in_use() - before < 200 * MIB  # of 255
    assert all((view % 400 == 7).all() for view in held)


ACTIONS = st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 5), st.integers(0, SIZE)), min_size=1, max_size=60)


@given(actions=ACTIONS)
@settings(max_examples=15)
def test_places_stay_equal_and_values_stay_theirs(strategy: ms.Strategy, actions: Any) -> None:
    """Make variables of some sizes, drop some: on one rank later than on the others, or never."""
    alive: list[tuple[ms.Variable, int]] = []
    late: list[tuple[Array, int]] = []
    places = []
    with strategy.scope():
        for number, (size, drop, who) in enumerate(actions):
            variable = ms.Variable(np.full(size, number, np.float32))
            alive.append((variable, number))
            places.append("" if variable._memory_slot is None else str(slot_of(variable).offset))
            if drop < len(alive) and drop > 1:
                gone, value = alive.pop(drop)
                if who == RANK:
                    late.append((np.asarray(gone), value))
                del gone
            if len(late) > 5:
                late.pop(0)
            for one, value in alive:
                assert (one.local_view == value).all()
            for view, value in late:
                assert (view == value).all()
    assert len(set(gather_texts("\n".join(places)))) == 1


@pytest.mark.mpi(min_size=2)
def test_a_refused_creation_leaves_the_places_equal(strategy: ms.Strategy) -> None:
    with strategy.scope():
        for wrong in (
            lambda: ms.Variable(np.zeros(100 + RANK)),
            lambda: ms.Variable("text" if RANK == 0 else np.zeros(9)),
            lambda: ms.Variable(np.zeros(5), name="a" if RANK else "b"),
        ):
            assert all(outcome.error is not None for outcome in outcomes(wrong))
        variable = ms.Variable(np.full(3, RANK))
    assert same_everywhere(np.int64(slot_of(variable).offset))
    assert variable.numpy().tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------------------ the end of things


def test_variables_and_views_outlive_the_strategy() -> None:
    with ms.MirroredStrategy() as strategy, strategy.scope():
        variable = ms.Variable(np.arange(100_000.0))
        view = np.asarray(ms.Variable(np.arange(7)))[2:]
    del strategy
    gc.collect()
    variable.assign(variable + 1)
    assert variable[99_999] == 100_000
    assert view.tolist() == [2, 3, 4, 5, 6]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("refusing", [0, SIZE - 1])
def test_no_room_on_one_rank_means_own_memory_for_all(
    fresh: ms.Strategy, monkeypatch: pytest.MonkeyPatch, refusing: int
) -> None:
    """A full /dev/shm, seen by one rank alone: variables work as ever, and one warning says so."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with fresh.scope():
        first = ms.Variable(np.ones(3))
        if refusing == RANK:
            monkeypatch.setattr(os, "posix_fallocate", full)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            large = ms.Variable(np.full(MIB, 2.0), aggregation="SUM")
            others = [ms.Variable(np.full(MIB // 16, RANK)) for _ in range(12)]
        monkeypatch.undo()
        assert {warning.category for warning in told} == ({errors.FallbackWarning} if RANK == 0 else set())
        assert len(told) <= 2
    assert first._memory_slot is not None
    assert large._memory_slot is None
    assert others[-1]._memory_slot is None
    fresh.run(lambda: large.assign_add(np.ones(MIB)))
    assert (np.asarray(large) == 2 + SIZE).all()
    assert same_everywhere([np.asarray(variable) for variable in others])
    assert still_works(fresh)
