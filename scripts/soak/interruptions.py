"""Makes random calls, some of which are interrupted on one rank or on all at a random moment: no hang, no wrong sum.

The rank then takes no more calls, and the others raise RemoteError in that call or the next, within seconds; or the
call counts as not begun, and the rank makes it again.  All on one node: a rank that waits in a call of MPI between
nodes cannot leave it, and the job ends.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from types import FrameType
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

import mpistrategy as ms

WORLD = MPI.COMM_WORLD
EVERY, LONGEST_SECONDS = 10, 20.0
POWERS = -5.0, -2.7  # of ten: of the seconds before a signal
KINDS = "all_reduce", "reduce", "assign", "arena", "gather", "broadcast"
SIZES = 1, 3, 40, 5000, 20_000, 100_000, 200_000


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, if the signal has come while this rank is in this library."""
    if frame is not None and "/mpistrategy/" in frame.f_code.co_filename:
        raise KeyboardInterrupt(f"{frame.f_code.co_qualname}:{frame.f_lineno}")


def wrong(problem: str) -> NoReturn:
    """End the job."""
    sys.stderr.write(f"rank {WORLD.rank}: {problem}\n")
    time.sleep(1)  # other ranks say what they see
    WORLD.Abort(1)
    raise AssertionError


class Calls:
    """A strategy with what its calls need; all ranks make one at the same time."""

    def __init__(self) -> None:
        self.strategy = ms.MirroredStrategy(on_error="raise")
        self.guard: Any = self.strategy.extended.communicator.guard
        self.arena = {size: self.strategy.arena(np.zeros(size)) for size in SIZES}
        with self.strategy.scope():
            self.variable = {size: ms.Variable(np.zeros(size), aggregation="SUM") for size in SIZES}

    def make(self, kind: str, size: int, number: int) -> Any:
        """Return what all ranks have summed."""
        operand, run = np.full(size, number * 16.0 + WORLD.rank), self.strategy.run
        if kind == "all_reduce":
            return run(lambda: ms.get_replica_context().all_reduce("SUM", {"a": operand, "b": float(operand[0])}))["a"]
        if kind == "reduce":
            return self.strategy.reduce("SUM", operand)
        if kind == "assign":
            run(lambda: self.variable[size].assign(operand))
            return self.variable[size].numpy()
        if kind == "gather":
            return self.strategy.gather(operand[None], 0).sum(0)
        if kind == "broadcast":
            return self.strategy.broadcast(operand) * WORLD.size + sum(range(WORLD.size))
        self.arena[size].values[...] = operand
        return run(lambda: ms.get_replica_context().all_reduce("SUM", self.arena[size]))

    def outcome(self, kind: str, size: int, number: int) -> str:
        """Make a call until it has begun; return how it ends on this rank."""
        before = self.guard.comparisons
        while True:
            try:
                result = self.make(kind, size, number)
            except KeyboardInterrupt:
                if self.guard.closed or self.guard.comparisons != before:
                    return "interrupted"
            except (ms.errors.RemoteError, ms.errors.ContextError) as error:
                return type(error).__name__
            except ms.errors.CollectiveMismatchError as error:
                wrong(f"{kind} of {size} elements, number {number}: {error}")
            else:
                total = WORLD.size * number * 16.0 + sum(range(WORLD.size))
                if not (np.asarray(result) == total).all():
                    wrong(f"{result}, not {total}, after {kind} of {size} elements, number {number}")
                return "right"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def goes_on(self, outcomes: Counter[str], interruption: str) -> bool:
        """Return whether this strategy is of use after an interruption; all ranks must agree, and come here soon."""
        if not self.guard.closed:
            try:
                self.strategy.barrier("after an interruption")
            except (ms.errors.RemoteError, ms.errors.ContextError):
                outcomes["heard in the next call"] += 1
        request, end = WORLD.Ibarrier(), time.monotonic() + LONGEST_SECONDS
        while not request.Test():
            if time.monotonic() > end:
                wrong(f"a rank has not come after {interruption}")
            time.sleep(1e-3)
        if len({*WORLD.allgather(self.guard.closed)}) != 1:
            wrong(f"closed {self.guard.closed}, other ranks not, after {interruption}")
        return not self.guard.closed


def soak(options: argparse.Namespace) -> bool:
    """Make the calls, and print how they have ended; what is wrong ends the job."""
    signal.signal(signal.SIGALRM, interrupt)
    dice, outcomes, calls = random.Random(options.seed), Counter[str](), Calls()
    for number in range(options.count):
        kind, size = dice.choice(KINDS), dice.choice(SIZES)
        odd, seconds = dice.randrange(WORLD.size), 10 ** dice.uniform(*POWERS)
        is_last = number % EVERY == EVERY - 1
        if is_last and (odd == WORLD.rank or number % (2 * EVERY) == EVERY - 1):
            signal.setitimer(signal.ITIMER_REAL, seconds)
        outcomes[calls.outcome(kind, size, number)] += 1
        interruption = f"{kind} of {size} elements, number {number}, {seconds * 1e6:.0f} us on rank {odd}"
        if is_last and not calls.goes_on(outcomes, interruption):
            calls.strategy.close()
            calls = Calls()
    calls.strategy.close()
    everyones = WORLD.gather(outcomes)
    if everyones is not None:
        print(f"{options.count} calls on {WORLD.size} ranks:", dict(sum(everyones, Counter())))
    return False
