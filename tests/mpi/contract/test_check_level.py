"""Between nodes calls are compared always, at first and now and then, or never; what differed is found all the same."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import a_row_a_rank
from replicas import RANK, RANKS, SIZE, OnNodes, context, part_of

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.contract import check_level
from mpistrategy.mpi.contract.check_level import EVERY, Sparingly

Launch = Callable[..., launching.Finished]
ONE = np.ones(3)


class Counting:
    """A guard's channel that counts the comparisons."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual
        self.compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def all_equal(self, digest: int) -> bool:
        self.compared += 1
        return bool(self._usual.all_equal(digest))


@pytest.fixture
def apart(request: pytest.FixtureRequest) -> Iterator[tuple[ms.Strategy, Counting]]:
    """Each rank on a node of its own, at the level that the test names."""
    strategy = OnNodes(range(SIZE), ms.MpiAllReduce())
    guard: Any = strategy.extended.communicator.guard
    guard.check_as(request.param)
    channel = guard._channel = Counting(guard._channel)
    yield strategy, channel
    strategy.close()


def first() -> Any:
    return context().all_reduce("SUM", ONE)


def second() -> Any:
    return context().all_reduce("SUM", 10 * ONE)


at = pytest.mark.parametrize("apart", check_level.LEVELS, indirect=True, ids=str)
only_first = pytest.mark.parametrize("apart", ["first"], indirect=True)
several = pytest.mark.mpi(min_size=2)


@several
@at
def test_how_often_calls_are_compared(apart: tuple[ms.Strategy, Counting], request: pytest.FixtureRequest) -> None:
    strategy, channel = apart
    level = request.node.callspec.params["apart"]
    for _ in range(100):
        assert np.array_equal(strategy.run(first), SIZE * ONE)
        assert np.array_equal(strategy.run(second), 10 * SIZE * ONE)
    assert channel.compared == {"always": 200, "first": 2 + 200 // EVERY, "off": 0}[level]
    for count in range(3):  # what is a meeting of the ranks always is one
        before = channel.compared
        strategy.barrier()
        assert channel.compared == before + 1, count


@several
@only_first
def test_what_is_new_is_compared_before_its_data_moves(apart: tuple[ms.Strategy, Counting]) -> None:
    strategy, _ = apart
    for _ in range(5):
        strategy.run(first)
    mine = ONE.astype("f4") if RANK else ONE.astype("f2")
    with pytest.raises(errors.CollectiveMismatchError, match=r"differ in: values[\s\S]*Nothing was sent"):
        strategy.run(lambda: context().all_reduce("SUM", mine))
    assert np.array_equal(strategy.run(first), SIZE * ONE)


@several
@only_first
@pytest.mark.parametrize("when", [2, 15, 16, 40])
def test_swapped_calls_that_were_seen_before_are_found_late_and_named(
    apart: tuple[ms.Strategy, Counting], when: int
) -> None:
    strategy, _ = apart
    caught: list[tuple[int, str]] = []
    for step in range(when + EVERY):
        calls = [second, first] if step == when and RANK == SIZE - 1 else [first, second]
        try:
            for call in calls:
                strategy.run(call)
        except errors.CollectiveMismatchError as error:
            caught.append((step, str(error)))
            break
    ((step, text),) = caught
    text = a_row_a_rank(text)
    assert step - when <= EVERY // 2, "found at the next comparison"
    assert f"call #{2 * when + 1} of this strategy differed in: place" in text
    places = [code.co_firstlineno + 1 for code in (first.__code__, second.__code__)]
    for rank in range(SIZE):
        line = places[rank == SIZE - 1]
        assert re.search(rf"rank {rank}: call=ReplicaContext.all_reduce  place=test_check_level.py:{line}:", text), text
    assert "may be mixed" in text
    assert "MPISTRATEGY_CHECK=always" in text
    for call in (lambda: strategy.run(first), strategy.barrier, lambda: strategy.run(second)):
        with pytest.raises(errors.CollectiveMismatchError, match="found late"):  # at once, and without a message
            call()


@several
@only_first
def test_a_call_too_many_is_found(apart: tuple[ms.Strategy, Counting]) -> None:
    strategy, _ = apart
    for _ in range(3):
        strategy.run(first)
        strategy.run(second)
    strategy.run(second if RANK == 0 else first)
    with pytest.raises(errors.CollectiveMismatchError, match=r"call #7 of this strategy differed in: place"):
        strategy.barrier()


@given(st.lists(st.integers(0, 5), max_size=150), st.data())
@settings(max_examples=part_of(100), deadline=None)
def test_ranks_compare_at_the_same_calls_and_find_every_difference(calls: list[int], data: st.DataObject) -> None:
    mine, theirs = Sparingly("first"), Sparingly("first")
    for call in calls:
        numbers = [rank.number_to_compare(call, None, due=call == 5) for rank in (mine, theirs)]
        assert numbers[0] == numbers[1]
        assert numbers[0] is not None or call != 5
        if numbers[0] is not None:
            mine.agreed(), theirs.agreed()
    odd = data.draw(st.integers(0, 4))
    expected = data.draw(st.integers(0, 4).filter(lambda call: call != odd))
    mine.number_to_compare(odd, None, due=False)
    theirs.number_to_compare(expected, None, due=False)
    numbers = [rank.number_to_compare(5, None, due=True) for rank in (mine, theirs)]
    assert numbers[0] != numbers[1]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("size", [8, 50_000])
def test_the_result_of_a_node_stays_until_all_its_ranks_reduce_again(size: int) -> None:
    with OnNodes([rank // 2 for rank in RANKS], ms.MpiAllReduce()) as strategy:
        strategy.extended.communicator.guard.check_as("first")
        arena = strategy.arena(np.zeros(size), shared_result=True)
        for step in range(5):
            arena.values[...] = step + RANK
            result = strategy.run(lambda: context().all_reduce("SUM", arena))
            looks_end = time.monotonic() + 0.02 * (RANK % 2)
            while True:  # the first rank of the node is in the next call meanwhile, or waits to get there
                assert (result == SIZE * step + sum(RANKS)).all(), step
                if time.monotonic() >= looks_end:
                    break


def test_unknown_levels_are_refused() -> None:
    for level in ("sometimes", "", 1, True):
        with pytest.raises(errors.OptionError, match='expected "always" or "first" or "off"'):
            ms.MirroredStrategy(check=level)  # type: ignore[arg-type]
    for level in (*check_level.LEVELS, "Always"):
        ms.MirroredStrategy(check=level).close()


@several
def test_the_level_is_equal_on_all_ranks() -> None:
    with pytest.raises(
        errors.CollectiveMismatchError, match=r"check=always[\s\S]*check=off|check=off[\s\S]*check=always"
    ):
        ms.MirroredStrategy(check="off" if RANK else "always")


# ------------------------------------------------------------------------------------- whole jobs

PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
import mpistrategy as ms
from mpistrategy.arrays.devices import Device
from mpistrategy.mpi.over_mpi.communicator import MpiCommunicator

what, rank = sys.argv[1], MPI.COMM_WORLD.rank


class Apart(ms.Strategy):
    def __init__(self):
        ranks = MpiCommunicator(MPI.COMM_WORLD, node_key=rank)
        ranks.share_device(Device(rank, "CPU", 0))
        super().__init__(ms.StrategyExtended(self, ranks))


strategy = Apart()
strategy.extended.communicator.guard.check_as("first")


def first():
    return ms.get_replica_context().all_reduce("SUM", np.ones(2))


def second():
    return ms.get_replica_context().all_reduce("SUM", np.zeros(2))


for step in range(5):
    calls = [second, first] if step == 4 and rank == 1 and what == "swapped last" else [first, second]
    for call in calls:
        strategy.run(call)
if what == "bad input" and rank == 1:
    strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", ["no number"]))
if what == "bad input":
    strategy.run(first)
if what == "error caught":
    def send(value):
        return strategy.experimental_local_results(strategy.extended.broadcast_to(value, everywhere))[0]

    with strategy.scope():
        everywhere = ms.Variable(np.zeros(2))
    try:
        for value in (np.zeros(2), np.array([None]) if rank == 1 else np.full(2, 5.0)):
            send(value)  # one place: the second is compared now and then only
        strategy.barrier()
    except ms.errors.LeafError:
        print("caught", flush=True)
    print("received", send(np.full(2, 7.0)), flush=True)
print("the end", flush=True)
"""


def test_calls_at_the_end_that_were_not_compared_are_found_there(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, [launching.program(PROGRAM, tmp_path), "swapped last"])
    assert job.returncode == 1, job
    assert job.stdout.count("the end") == 2
    assert re.search(r"call #9 of this strategy differed in: place", job.stderr), job


@pytest.mark.each_mpi
def test_an_error_that_the_peers_cannot_be_told_ends_the_job(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, [launching.program(PROGRAM, tmp_path), "bad input"])
    assert job.returncode == 1, job
    assert job.seconds < 20
    assert re.search(r"\[rank 1/2\] mpistrategy.errors.DTypeError: .*strings", job.stderr), job
    assert re.search(r"program_\w+\.py\", line \d+, in <module>", job.stderr), job
    assert "cannot be told" in job.stderr


@pytest.mark.each_mpi
@pytest.mark.parametrize("level", ["first", "off"])
def test_what_a_peer_has_sent_past_an_error_is_never_taken_for_other_data(
    level: str, launch: Launch, tmp_path: Path
) -> None:
    program = PROGRAM.replace('check_as("first")', f'check_as("{level}")')
    job = launch(2, [launching.program(program, tmp_path), "error caught"])
    assert job.returncode == 1, job
    assert "received [5. 5.]" not in job.stdout, job
    assert re.search(r"\[rank 1/2\] mpistrategy.errors.LeafError: ", job.stderr), job
    assert "the end" not in job.stdout
