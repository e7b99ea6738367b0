"""Replays cases on ranks, exactly as many as the cases were recorded with, real or simulated; rank 0 judges."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import mpistrategy as ms
from mpistrategy.mpi import over_threads

from . import on_device, programs
from .environment import Env, kind_of, run_program
from .judge import Judge, Result
from .rules import load_table
from .tensorflow import program_named
from .values import Json, UnsupportedProgramError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiRanks", "SimulatedRanks", "programs", "replay"]
MAX_RESYNC = 100


class MpiRanks:
    """The ranks of an mpi4py communicator that belongs to the caller; nothing but `gather_json` uses it."""

    #: Shared by all replays of this process, since strategies on the same ranks serve them all.
    strategies: dict[Any, Any] = {}  # noqa: RUF012

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self.rank = comm, comm.rank

    def gather_json(self, outcome: Json) -> list[Json]:
        """Gather JSON bytes through buffer calls."""
        data = np.frombuffer(json.dumps(outcome).encode(), np.uint8)
        sizes = np.zeros(self._comm.size, np.int64)
        self._comm.Allgather(np.array([data.size], np.int64), sizes)
        received = np.empty(int(sizes.sum()), np.uint8)
        self._comm.Allgatherv(data, [received, sizes])
        parts = np.split(received, np.cumsum(sizes)[:-1])
        return [json.loads(part.tobytes()) for part in parts] if self.rank == 0 else []


class SimulatedRanks:
    """The replicas of `mpistrategy.testing.run_replicas`, seen from one of them."""

    def __init__(self) -> None:
        world = over_threads.world()
        if world is None:
            raise RuntimeError("SimulatedRanks are to be made in a program that run_replicas runs")
        self._replicas = world.duplicate()
        self.rank = self._replicas.rank
        self.strategies: dict[Any, Any] = {}

    def gather_json(self, outcome: Json) -> list[Json]:
        """Gather the same text that would travel over MPI."""
        texts = self._replicas.allgather_text(json.dumps(outcome))
        return [json.loads(text) for text in texts] if self.rank == 0 else []


#: Who takes part: a rank's number, what its cases have made so far for the next ones, and a way to bring outcomes
#: together that no case can disturb.
Ranks = MpiRanks | SimulatedRanks


def replay(cases: list[Json], ranks: Ranks, ended: Callable[[Result], None] = lambda result: None) -> list[Result]:
    """Replay cases on all ranks; every rank must give the same list.

    Args:
        cases: cases whose num_replicas is the number of ranks.
        ranks: who takes part.
        ended: called on rank 0 after each case.

    Returns:
        the results, on rank 0; an empty list elsewhere.
    """
    judge = Judge(*load_table())
    by_name = collections.defaultdict(list)
    for case in cases:
        by_name[case["id"].partition("@")[0]].append(case)
    results = []
    for case in cases:
        if on_device.is_left_out(case["id"]):
            continue
        outcomes = ranks.gather_json(replay_one(case, ranks))
        if ranks.rank == 0:
            twins = [twin for twin in by_name[case["id"].partition("@")[0]] if kind_of(twin) != kind_of(case)]
            results.append(judge.verdict(case, outcomes, twins))
            ended(results[-1])
    return results


def replay_one(case: Json, ranks: Ranks) -> Json:
    """Run one case on this rank; afterwards all ranks stand at the same place again."""
    env = Env(case, ranks.rank, ranks.strategies)
    # Made first: it chooses this rank's GPU, on which the case makes its arrays.
    strategy = env.strategy if env.n > 1 else None
    try:
        outcome = run_program(env, program_named(case["program"]), case.get("inputs") or {})
    except UnsupportedProgramError as reason:
        outcome = {"status": "unsupported", "note": str(reason)}
    if ms.has_strategy():
        ms.experimental_set_strategy(None)
        outcome = {"status": "left open", "note": "the case left a scope open"}
    if strategy is not None:
        resynchronise(strategy, case["id"])
    return outcome


def resynchronise(strategy: Any, case_id: str) -> None:
    """Meet all ranks: a rank that still waits in a collective of the case gets a CollectiveMismatchError there."""
    for _ in range(MAX_RESYNC):
        try:
            strategy.extended.barrier(name=f"end of {case_id}")
            return
        except ms.errors.CollectiveMismatchError:
            continue
    raise RuntimeError(f"the ranks did not meet again after {case_id}")
