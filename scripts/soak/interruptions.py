"""Makes random calls, some of which are interrupted on one rank at a random moment: no hang, no wrong sum.

    scripts/mpirun -n 3 scripts/soak interruptions [--calls 100000] [--every 10] [--seed 0]

Every tenth call is interrupted.  The rank then takes no more calls, and the others raise RemoteError in that call or
the next, within seconds; or the call counts as not begun, and the rank makes it again.  All on one node, and without
gathers: a rank that waits in a call of MPI cannot leave it, and the job ends.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy.mpi.contract import failures

WORLD = MPI.COMM_WORLD
LONGEST_SECONDS = 20.0
_POWERS = -5.0, -2.7  # of ten: of the seconds before a signal
_KINDS = ("all_reduce", "nest", "reduce", "assign", "arena")
_SIZES = (1, 3, 40, 5000, 100_000)


class Interrupter:
    """Raises KeyboardInterrupt from the handler of a signal, if this rank is in this library when it comes.

    Attributes:
        where: the place; "" where it has not been raised.
    """

    def __init__(self) -> None:
        self.where = ""
        signal.signal(signal.SIGALRM, self._interrupt)

    def come_after(self, seconds: float) -> None:
        """Send the signal."""
        self.where = ""
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and "/mpistrategy/" in frame.f_code.co_filename:
            self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            raise KeyboardInterrupt("Ctrl-C")


class Calls:
    """A strategy with what its calls need; all ranks make one at the same time."""

    def __init__(self) -> None:
        self.strategy = ms.MirroredStrategy(on_error="raise")
        self.variable = {size: self._variable(size) for size in _SIZES}
        self.arena = {size: self.strategy.arena(np.zeros(size)) for size in _SIZES}

    def _variable(self, size: int) -> Any:
        with self.strategy.scope():
            return ms.Variable(np.zeros(size), aggregation="SUM")

    def make(self, kind: str, size: int, number: int) -> Any:
        """Return an element of what all ranks have summed."""
        mine = np.full(size, number * 16.0 + WORLD.rank)
        if kind == "all_reduce":
            return self._run(lambda: ms.get_replica_context().all_reduce("SUM", mine))
        if kind == "nest":
            return self._run(lambda: ms.get_replica_context().all_reduce("SUM", {"a": mine, "b": float(mine[0])}))["a"]
        if kind == "reduce":
            return self.strategy.reduce("SUM", mine)
        if kind == "assign":
            self._run(lambda: self.variable[size].assign(mine))
            return self.variable[size].numpy()
        self.arena[size].values[...] = mine
        return self._run(lambda: ms.get_replica_context().all_reduce("SUM", self.arena[size]))

    def _run(self, step: Callable[[], Any]) -> Any:
        return self.strategy.run(step)


def right(number: int) -> float:
    """Return what the elements of call `number` sum up to."""
    return WORLD.size * number * 16.0 + sum(range(WORLD.size))


def meet(what: str) -> None:
    """Wait for the other ranks outside every strategy; end the job where one does not come."""
    request, end = WORLD.Ibarrier(), time.monotonic() + LONGEST_SECONDS
    while not request.Test():
        if time.monotonic() > end:
            sys.stderr.write(f"rank {WORLD.rank}: a rank has not come after {what}\n")
            WORLD.Abort(1)
        time.sleep(1e-3)


def soak(calls: int, every: int, seed: int) -> Counter[str]:
    """Make the calls; return how they have ended on this rank."""
    plan, found = random.Random(seed), Counter[str]()
    made, interrupter = Calls(), Interrupter()
    for number in range(calls):
        kind, size = plan.choice(_KINDS), plan.choice(_SIZES)
        odd, seconds = plan.randrange(WORLD.size), 10 ** plan.uniform(*_POWERS)
        is_odd = number % every == every - 1 and odd == WORLD.rank
        what = f"{kind} of {size} elements, number {number}, {seconds * 1e6:.0f} us on rank {odd}"
        guard = made.strategy.extended.communicator.guard
        before, ended = guard.comparisons, ""
        if is_odd:
            interrupter.come_after(seconds)
        while not ended:
            try:
                result = made.make(kind, size, number)
            except KeyboardInterrupt:
                ended = "closed" if guard.closed else "lost" if guard.comparisons != before else ""
                found["not begun"] += not ended
            except ms.errors.CollectiveMismatchError as error:
                sys.stderr.write(f"rank {WORLD.rank}: {what}: {interrupter.where}: {error}\n")
                time.sleep(1)
                WORLD.Abort(1)
            except (ms.errors.RemoteError, ms.errors.ContextError) as error:
                ended = (
                    type(error).__name__
                    if guard.closed or guard.is_broken
                    else f"{type(error).__name__} of {interrupter.where}: {error}"
                )
            else:
                ended = "right"
                if not (np.asarray(result) == right(number)).all():
                    sys.stderr.write(f"rank {WORLD.rank}: {result} and not {right(number)} after {what}\n")
                    WORLD.Abort(1)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        found[ended] += 1
        if number % every == every - 1:
            made = _looked(made, found, f"{what}: {interrupter.where}, {ended}")
    made.strategy.close()
    return found


def _looked(made: Calls, found: Counter[str], what: str) -> Calls:
    """Return what the ranks go on with after an interrupted call: the same, or another one where some rank has left."""
    guard = made.strategy.extended.communicator.guard
    if not guard.closed:
        try:
            made.strategy.barrier("after an interruption")
        except (ms.errors.RemoteError, ms.errors.ContextError):
            found["heard in the next call"] += 1
        except ms.errors.CollectiveMismatchError as error:
            sys.stderr.write(f"rank {WORLD.rank}: after {what}: {error}\n")
            time.sleep(1)
            WORLD.Abort(1)
    meet(what)
    if len({*WORLD.allgather(guard.closed)}) != 1:
        sys.stderr.write(f"rank {WORLD.rank}: closed {guard.closed}, other ranks not, after {what}\n")
        WORLD.Abort(1)
    if guard.closed:
        made.strategy.close()
        return Calls()
    return made


def main() -> None:
    """Soak, and print how the calls have ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=10, help="which calls are interrupted; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    given = parser.parse_args()
    failures.PATIENCE_SECONDS = 0.05
    found = WORLD.gather(soak(given.calls, given.every, given.seed))
    if found is not None:
        print(f"{given.calls} calls on {WORLD.size} ranks:", dict(sum(found, Counter())))


if __name__ == "__main__":
    main()
