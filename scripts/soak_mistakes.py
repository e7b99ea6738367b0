"""One rank makes a mistake, or fails in the middle of a call: nobody waits, and nothing is silently wrong.

    python scripts/soak_mistakes.py [--every N] [--offset N] [NAME...]
    python scripts/soak_mistakes.py --lines [--every N] [--ranks N] [--on-error abort|raise] [NAME...]
    MPIR_CVAR_NUM_CLIQUES=2 python scripts/soak_mistakes.py ...               on 2 nodes that MPICH pretends

The whole mutation matrix: every mistake on 2 and 3 ranks of one node, and on 3 and 4 ranks of several, made by the
first and by the last, at first and later.

With --lines rank 1 raises MemoryError or KeyboardInterrupt at one line of this package in a call, catches it, and goes
on with its program; with on_error="raise" all ranks catch what the library raises, too.  Each job tries line after
line, each with a strategy of its own, until an error has ended it; the next job goes on.  A line is wrong where a rank
waits for more than 20 seconds, gets a wrong result, or keeps another variable than the others while all of them go on.

Prints how many had which outcome, and the output of each that differs from the table, or is wrong.  Exit status 1 with
such.
"""

from __future__ import annotations

import argparse
import dis
import faulthandler
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy.errors import MpiStrategyError

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / folder) for folder in ("", "jobs")]
import launching  # noqa: E402
from mistakes.judging import judge  # noqa: E402
from mistakes.matrix import load  # noqa: E402

ERRORS: dict[str, type[BaseException]] = {"MemoryError": MemoryError, "KeyboardInterrupt": KeyboardInterrupt}
_PACKAGE = os.path.join(os.path.dirname(ms.__file__), "")
_ODD = 1
CALLS = (
    "number",
    "float16",
    "large",
    "integers",
    "nest",
    "gather",
    "scatter",
    "broadcast",
    "barrier",
    "add",
    "update",
    "buckets",
    "mean",
    "save",
    "restore",
)
_CHANGE = ("add", "update", "buckets", "mean")  # calls whose results differ each time
_WAIT_SECONDS, _JOB_SECONDS = 20, 600
_FRAMES = 5
_OUTCOME = re.compile(r'\[\d+, "[^"]*", "[^"]*"\]')  # other lines are the launcher's
_FAILS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "BINARY_OP", "BINARY_SUBSCR", "STORE_SUBSCR"}


@cache
def _lines_that_can_fail(code: CodeType) -> frozenset[int]:
    """Return the lines with calls and arithmetic: between others no signal is handled, and nothing is allocated."""
    lines: dict[int, set[str]] = {}
    line = 0
    for each in dis.get_instructions(code):
        line = each.starts_line or line
        lines.setdefault(line, set()).add(each.opname)
    # A line of `with` is there again when its context ends, and must end.
    return frozenset(line for line, names in lines.items() if names & _FAILS and "BEFORE_WITH" not in names)


@dataclass
class Planted:
    """Raises an error at one line of this package: the `at`-th that differs, with its callers, from those before."""

    at: int
    error: type[BaseException]
    where: str = ""
    seen: set[Any] = field(default_factory=set)

    def in_call(self, frame: FrameType, what: str, _: Any) -> Any:
        """Trace the functions of this package."""
        return self.in_line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    def in_line(self, frame: FrameType, what: str, _: Any) -> Any:
        """Raise at the line."""
        if what == "line" and frame.f_lineno in _lines_that_can_fail(frame.f_code):
            place: list[tuple[str, int]] = []
            outer: FrameType | None = frame
            while outer is not None and len(place) < _FRAMES:
                place.append((outer.f_code.co_filename, outer.f_lineno))
                outer = outer.f_back
            self.seen.add(tuple(place))
            if len(self.seen) == self.at:
                self.where = " < ".join(f"{name.removeprefix(_PACKAGE)}:{line}" for name, line in place)
                sys.settrace(None)
                raise self.error("planted")
        return self.in_line


def calls(strategy: ms.Strategy) -> dict[str, Callable[[], Any]]:
    """Return what to call, by name: each returns what must be equal on all ranks."""
    with strategy.scope():
        total = ms.Variable(np.zeros(1000), aggregation="SUM")
        weights = [ms.Variable(np.zeros(60_000)), ms.Variable(np.ones(3))]
        optimizer, metric, taught = ms.optimizers.Adam(0.1), ms.metrics.Mean(), ms.optimizers.Adam(0.1)
        buckets = taught.gradient_buckets(weights)
    checkpoint = ms.Checkpoint(weights=weights)
    folder = os.environ["MPISTRATEGY_TEST_FOLDER"]
    checkpoint.save(f"{folder}/first", overwrite=True)
    mine = strategy.rank + 1.0

    def in_step(what: str, *given: Any) -> Any:
        return strategy.run(lambda: getattr(ms.get_replica_context(), what)(*given))

    def add() -> Any:
        strategy.run(lambda: total.assign_add(np.full(1000, mine)))
        return total.numpy()

    def update() -> Any:
        gradients = [np.full(each.shape, mine) for each in weights]
        strategy.run(lambda: optimizer.apply_gradients(zip(gradients, weights, strict=True)))
        return weights[0].numpy()

    def in_buckets() -> Any:
        def step() -> None:
            for number, each in enumerate(buckets.values):
                each[...] = mine
                buckets.ready(number)
            taught.apply_gradients(buckets)

        strategy.run(step)
        return weights[0].numpy()

    def restore() -> Any:
        checkpoint.restore(f"{folder}/first")
        return [each.numpy() for each in weights]

    def mean() -> Any:
        strategy.run(lambda: metric.update_state(np.full(3, mine)))
        return metric.result()

    return {
        "number": lambda: in_step("all_reduce", "SUM", mine),
        "float16": lambda: in_step("all_reduce", "SUM", np.full(300_000, mine, np.float16)),
        "large": lambda: in_step("all_reduce", "SUM", np.full(200_000, mine)),
        "integers": lambda: in_step("all_reduce", "MEAN", np.full(100_000, int(mine))),
        "nest": lambda: in_step("all_reduce", "SUM", {"a": np.full(3, mine), "b": np.full(90_000, mine)})["b"],
        "gather": lambda: in_step("all_gather", np.full((1000, 2), mine), 0),
        "scatter": lambda: len(in_step("reduce_scatter", "SUM", np.full(100_000 * strategy.size, mine))),
        "broadcast": lambda: strategy.broadcast(np.full(3, mine)),
        "barrier": lambda: strategy.barrier("here"),
        "add": add,
        "update": update,
        "buckets": in_buckets,
        "mean": mean,
        "save": lambda: checkpoint.save(f"{folder}/second", overwrite=True),
        "restore": restore,
    }


def job(name: str, error: type[BaseException], line: int, every: int, on_error: Any) -> None:
    """Try one line after the other, on a rank of a job; rank 0 prints the outcome of each."""
    world = MPI.COMM_WORLD
    expects = (MpiStrategyError, error) if on_error == "raise" else (error,)
    while True:
        planted, endings = Planted(line, error), []
        faulthandler.dump_traceback_later(3 * _WAIT_SECONDS, exit=True)
        try:
            with ms.MirroredStrategy(on_error=on_error) as strategy:
                call = calls(strategy)[name]
                expected = [repr(call()) for _ in range(2)] if name not in _CHANGE else []
                world.Barrier()
                faulthandler.dump_traceback_later(_WAIT_SECONDS, exit=True)
                for first in (True, False):
                    sys.settrace(planted.in_call if first and world.rank == _ODD else None)
                    try:
                        endings.append(repr(call()))
                    except expects as caught:
                        endings.append(f"({type(caught).__name__})")
                    finally:
                        sys.settrace(None)
        except expects as caught:
            endings.append(f"({type(caught).__name__})")
        faulthandler.dump_traceback_later(_WAIT_SECONDS, exit=True)
        told = world.gather((endings, planted.where, expected), 0)
        where = world.bcast(planted.where, _ODD)
        if not where:
            break
        if told is not None:
            print(json.dumps([line, verdict_of(told), where]), flush=True)
        line += every
    faulthandler.cancel_dump_traceback_later()
    if world.rank == 0:
        print(json.dumps([0, "end", ""]), flush=True)


def verdict_of(told: list[tuple[list[str], str, list[str]]]) -> str:
    """Return what came of one line, given what each rank has got from its calls."""
    for ended, _, expected in told:
        if expected and any(each not in expected for each in ended if not each.startswith("(")):
            return "WRONG"
    last = {ended[1] for ended, _, _ in told if len(ended) == 2}  # where all go on, they must have the same
    return "DRIFTED" if len(last) > 1 and not any(each.startswith("(") for each in last) else "heard of"


def lines_of(name: str, error: str, options: argparse.Namespace) -> Counter[str]:
    """Try the lines of one call; return how many had which outcome, and print those that are wrong."""
    counts: Counter[str] = Counter()
    line, environment = 1, {"MPISTRATEGY_TIMEOUT_SECONDS": "60"}
    if nodes := os.environ.get("MPIR_CVAR_NUM_CLIQUES"):
        environment["MPIR_CVAR_NUM_CLIQUES"] = nodes
    while True:
        with tempfile.TemporaryDirectory() as folder:
            environment["MPISTRATEGY_TEST_FOLDER"] = f"{folder}/checkpoint"
            words = [__file__, "--job", str(line), "--every", str(options.every), "--error", error]
            words += ["--on-error", options.on_error, name]
            done = launching.launch(options.ranks, words, _JOB_SECONDS, environment, Path(folder))
        told = [json.loads(each) for each in done.stdout.splitlines() if _OUTCOME.fullmatch(each)]
        for at, verdict, where in told:
            counts[verdict] += bool(at)
            if verdict in ("WRONG", "DRIFTED"):
                print(f"--- {name}, {error}: {verdict} at line {at}: {where}", flush=True)
        if told and told[-1][1] == "end":
            return counts
        line = max([line, *(at + options.every for at, *_ in told)])
        verdict = "ended the job" if "the whole job ends here" in done.stderr.lower() else "HUNG"
        counts[verdict] += 1
        if verdict == "HUNG":
            print(f"--- {name}, {error}: HUNG at line {line}\n{done}", flush=True)
        line += options.every


def fail_at_lines(options: argparse.Namespace) -> int:
    """Run the jobs of --lines."""
    began, counts = time.monotonic(), Counter[str]()
    for name, error in product(options.names or CALLS, ERRORS):
        counts += lines_of(name, error, options)
    figures = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"lines: {sum(counts.values())} in {time.monotonic() - began:.0f} s: {figures}")
    return 1 if {"WRONG", "DRIFTED", "HUNG"} & counts.keys() else 0


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--job", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--error", default="", help=argparse.SUPPRESS)
    parser.add_argument("--on-error", choices=("abort", "raise"), default="raise")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.job:
        job(options.names[0], ERRORS[options.error], options.job, options.every, options.on_error)
        return 0
    if options.lines:
        return fail_at_lines(options)
    table, began = load(), time.monotonic()
    nodes = int(os.environ.get("MPIR_CVAR_NUM_CLIQUES", 1))
    cases = [
        (name, ranks, odd, rounds)
        for name, ranks, rounds in product(options.names or table, (2, 3) if nodes == 1 else (3, 4), (0, 2))
        for odd in (0, ranks - 1)
    ][options.offset :: options.every]
    counts: Counter[str] = Counter()
    wrong = 0
    for name, ranks, odd, rounds in cases:
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(name, ranks, odd, rounds, Path(folder), nodes)
        expected = table[name][1]
        counts[expected if verdict.is_as(expected) else f"{verdict.kind}, not {expected}"] += 1
        if not verdict.is_as(expected):
            wrong += 1
            title = f"--- {name}: {verdict.kind} in place of {expected}"
            print(f"{title}; {ranks} ranks, rank {odd}, {rounds} rounds before\n{verdict.story}", flush=True)
    figures = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    seconds = time.monotonic() - began
    print(f"mistakes: {len(cases)} jobs, nodes: {nodes}, {seconds:.0f} s: {figures}; {wrong} not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
