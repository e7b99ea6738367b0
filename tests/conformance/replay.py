"""Replays cases on ranks, exactly as many as the cases were recorded with, real or simulated; rank 0 judges."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from replicas import RANK, gather_texts

import mpistrategy as ms
from mpistrategy.mpi import over_threads

from . import on_device, programs
from .environment import Env, kind_of, run_program
from .judge import Judge, Result
from .rules import load_table
from .tensorflow import program_named
from .values import Json, UnsupportedProgramError

__all__ = ["Ranks", "programs", "replay", "simulated_ranks"]
MAX_RESYNC = 100


#: What the cases of all replays of this process have made: strategies on the same ranks serve them all.
STRATEGIES: dict[Any, Any] = {}


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Who takes part, as one rank sees it: those of COMM_WORLD if nothing else is said.

    Attributes:
        rank: this rank's number.
        gather: a way to bring the texts of all ranks together that no case can disturb.
        strategies: what the cases have made so far for the next ones.
    """

    rank: int = RANK
    gather: Callable[[str], list[str]] = gather_texts
    strategies: dict[Any, Any] = dataclasses.field(default_factory=lambda: STRATEGIES)


def simulated_ranks() -> Ranks:
    """The replicas of `mpistrategy.testing.run_replicas`, seen from one of them."""
    world = over_threads.replicas_here.get()
    if world is None:
        raise RuntimeError("simulated ranks are those of a program that run_replicas runs")
    replicas = world.duplicate()
    return Ranks(replicas.rank, replicas.allgather_text, {})


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
        texts = ranks.gather(json.dumps(replay_one(case, ranks)))
        if ranks.rank == 0:
            twins = [twin for twin in by_name[case["id"].partition("@")[0]] if kind_of(twin) != kind_of(case)]
            results.append(judge.verdict(case, [*map(json.loads, texts)], twins))
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
