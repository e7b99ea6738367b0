"""Between nodes every call is compared in its first message, or only those that need a barrier."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from declared import IN_STEPS, called
from launching import a_row_a_rank
from replicas import RANK, RANKS, SIZE, OnNodes, context

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.contract import check_level

Launch = Callable[..., launching.Finished]
ONE = np.ones(3)


class Counting:
    """A guard's channel that counts the comparisons."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual
        self.compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def all_equal(self, digest: int, look: Any = None) -> bool:
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
always = pytest.mark.parametrize("apart", ["always"], indirect=True)
several = pytest.mark.mpi(min_size=2)


@several
@at
def test_how_often_calls_are_compared(apart: tuple[ms.Strategy, Counting], request: pytest.FixtureRequest) -> None:
    strategy, channel = apart
    level = request.node.callspec.params["apart"]
    for _ in range(100):
        assert np.array_equal(strategy.run(first), SIZE * ONE)
        assert np.array_equal(strategy.run(second), 10 * SIZE * ONE)
    assert channel.compared == {"always": 200, "off": 0}[level]
    for count in range(3):  # what is a meeting of the ranks always is one
        before = channel.compared
        strategy.barrier()
        assert channel.compared == before + 1, count


@several
@pytest.mark.parametrize("apart", ["off"], indirect=True)
@pytest.mark.parametrize("method", IN_STEPS)
def test_a_check_is_left_out_where_the_collective_is_declared_so(
    apart: tuple[ms.Strategy, Counting], method: str
) -> None:
    strategy, channel = apart
    for _ in range(2):  # the first call in the background is compared in any case
        before = channel.compared
        strategy.run(lambda: called(method))
    assert (channel.compared == before) == IN_STEPS[method].may_skip_check


@several
@always
@pytest.mark.parametrize("when", [0, 3])
def test_one_ranks_variant_is_found_at_its_own_call(apart: tuple[ms.Strategy, Counting], when: int) -> None:
    """Whichever rank makes it, also after many equal calls; sizes from one number to a large array."""
    strategy, _ = apart
    for value in (1.5, np.float32(2), np.ones(1, np.int64), np.ones(2), np.ones(3), np.ones(5000), np.ones(200_000)):
        for odd in (np.ones(4, np.float32), {"a": 1.0}, np.ones(70_000), 2):
            for rank in RANKS[:2]:

                def total(value: Any) -> Any:
                    return context().all_reduce("SUM", value)

                for _ in range(when):
                    strategy.run(total, args=(value,))
                with pytest.raises(errors.CollectiveMismatchError, match="Nothing was sent"):
                    strategy.run(total, args=(odd if rank == RANK else value,))
                assert np.array_equal(strategy.run(total, args=(value,)), SIZE * np.asarray(value))


@several
@always
def test_swapped_calls_are_found_before_data_moves(apart: tuple[ms.Strategy, Counting]) -> None:
    strategy, _ = apart
    for _ in range(5):
        strategy.run(first)
        strategy.run(second)
    with pytest.raises(errors.CollectiveMismatchError, match=r"differ in: place") as caught:
        strategy.run(second if RANK == SIZE - 1 else first)
    text = a_row_a_rank(str(caught.value))
    for rank in range(SIZE):
        line = (second if rank == SIZE - 1 else first).__code__.co_firstlineno + 1
        assert re.search(rf"rank {rank}: call=ReplicaContext.all_reduce  place=test_check_level.py:{line}:", text), text
    assert np.array_equal(strategy.run(first), SIZE * ONE)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("size", [8, 50_000])
def test_the_result_of_a_node_stays_until_all_its_ranks_reduce_again(size: int) -> None:
    with OnNodes([rank // 2 for rank in RANKS], ms.MpiAllReduce()) as strategy:
        strategy.extended.communicator.guard.check_as("off")
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
    for level in ("sometimes", "first", "", 1, True):
        with pytest.raises(errors.OptionError, match='expected "always" or "off"'):
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
import numpy as np
from mpi4py import MPI
import mpistrategy as ms
from mpistrategy.arrays.devices import Device
from mpistrategy.mpi.over_mpi.ranks import MpiRanks

rank = MPI.COMM_WORLD.rank


class Apart(ms.Strategy):
    def __init__(self):
        ranks = MpiRanks(MPI.COMM_WORLD, node_key=rank)
        ranks.share_device(Device(rank, "CPU", 0))
        super().__init__(ms.StrategyExtended(self, ranks))


strategy = Apart()
strategy.extended.communicator.guard.check_as("off")


def send(value):
    return strategy.run(lambda: ms.get_replica_context().all_reduce("MEAN", value))


try:
    for value in (np.zeros(2), np.array([None]) if rank == 1 else np.full(2, 5.0)):
        send(value)
    strategy.barrier()
except ms.errors.LeafError:
    print("caught", flush=True)
print("received", send(np.full(2, 7.0)), flush=True)
print("the end", flush=True)
"""


@pytest.mark.each_mpi
def test_what_a_peer_has_sent_past_an_error_is_never_taken_for_other_data(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, [launching.program(PROGRAM, tmp_path)])
    assert job.returncode == 1, job
    assert "received [5. 5.]" not in job.stdout, job
    assert re.search(r"\[rank 1/2\] mpistrategy.errors.LeafError: ", job.stderr), job
    assert "the end" not in job.stdout


OUT_OF_MEMORY = """
import numpy as np
from mpi4py import MPI
import mpistrategy as ms
from mpistrategy.arrays.devices import Device
from mpistrategy.mpi.over_mpi.ranks import MpiRanks

rank = MPI.COMM_WORLD.rank


class Apart(ms.Strategy):
    def __init__(self):
        ranks = MpiRanks(MPI.COMM_WORLD, node_key=rank)
        ranks.share_device(Device(rank, "CPU", 0))
        super().__init__(ms.StrategyExtended(self, ranks))


def no_memory(*_, **__):
    raise MemoryError("there is none")


strategy = Apart()
if rank == 1:
    MpiRanks.allreduce = no_memory  # where the messages of a large array begin
try:
    strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(100_000)))
except MemoryError:
    print("caught", flush=True)
"""


@pytest.mark.each_mpi
def test_a_rank_without_memory_after_the_agreement_ends_the_job(launch: Launch, tmp_path: Path) -> None:
    """Between nodes the others are in a call of MPI, and would wait for the timeout."""
    job = launch(2, [launching.program(OUT_OF_MEMORY, tmp_path)])
    assert job.returncode == 1, job
    assert job.seconds < 20
    assert "caught" not in job.stdout
    assert re.search(r"\[rank 1/2\] [\s\S]*MemoryError: there is none[\s\S]*the whole job ends here", job.stderr), job
