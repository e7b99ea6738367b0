"""Between nodes every call is compared in its first message, or only those that need a barrier."""

from __future__ import annotations

import re
import time
from pathlib import Path

import launching
import numpy as np
import pytest
from declared import IN_STEPS, called
from replicas import RANK, RANKS, SIZE, OnNodes, context, several

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.contract.guard import LEVELS


@several
def test_without_the_check_sums_are_right_and_meetings_are_compared() -> None:
    with OnNodes(range(SIZE), ms.MpiAllReduce()) as strategy:
        strategy.extended.communicator.guard.check_as("off")
        for method in IN_STEPS:
            strategy.run(lambda method=method: called(method))
        for size in (1, 2, 300_000):
            found = strategy.run(lambda size=size: context().all_reduce("SUM", np.full(size, RANK + 1.0)))
            assert (found == SIZE * (SIZE + 1) / 2).all()
        with pytest.raises(errors.CollectiveMismatchError, match="name"):
            strategy.barrier("one" if RANK else "other")


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
    for level in (*LEVELS, "Always"):
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
        ranks.devices = tuple(Device(peer, "CPU", 0) for peer in range(ranks.size))
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
def test_what_a_peer_has_sent_past_an_error_is_never_taken_for_other_data(
    launch: launching.Launch, tmp_path: Path
) -> None:
    job = launch(2, [launching.program(PROGRAM, tmp_path)])
    assert job.returncode == 1, job
    assert "received [5. 5.]" not in job.stdout, job
    assert re.search(r"\[rank 1/2\] mpistrategy.errors.LeafError: ", job.stderr), job
    assert "the end" not in job.stdout
