"""Planned faults: a plan makes some public collective go wrong on one rank.

Without a plan nothing of this runs.  It must be there when the package is imported: the public methods that
`mpistrategy.mpi.contract.public_calls` knows then have hooks, which `arm` uses on this rank only.  The messages stay
the same, so each rank may have a plan of its own.

A plan counts the program's own calls from the first strategy on, over all strategies of this process; calls inside a
collective do not count.  A fault happens before the guard hears of the call: to the other ranks it looks like the same
mistake in the program or the machine.

`raise` raises in the program, before the call.  If the program does not catch it, the job ends.

Simulated ranks (`mpistrategy.testing.run_replicas`) have no plan, since they share a process.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mpistrategy.errors import InjectedFault, OptionError
from mpistrategy.mpi.contract.call_sites import call_site
from mpistrategy.mpi.contract.public_calls import HAS_PLAN, PLAN, PublicCall, hooks
from mpistrategy.mpi.faults.plans import Fault, parse


class _Inside(threading.local):
    depth = 0


#: How many declared calls this thread is in; calls inside them are not counted.
inside: _Inside = _Inside()


class Armed:
    """A plan in force on this rank.

    Args:
        text: the plan's words.
        faults: the plan.
        rank, size: this rank's number in the job, and how many there are.
    """

    def __init__(self, text: str, faults: Sequence[Fault], rank: int, size: int) -> None:
        self.text = text
        self._waiting = [fault for fault in faults if fault.ranks is None or rank in fault.ranks]
        self._prefix = f"[rank {rank}/{size}] "
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def due(self, kind: str) -> list[Fault]:
        """Count one more call; return the faults that are to happen at it."""
        with self._lock:
            self._counts[kind] += 1
            self._counts[""] += 1
            due = [f for f in self._waiting if f.kind in ("", kind) and f.number == self._counts[f.kind]]
            self._waiting = [fault for fault in self._waiting if fault not in due]
            return due

    def call(self, public: PublicCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call of the program's, or a call in such a call, which does not count."""
        if inside.depth:
            return public.function(*args, **kwargs)
        inside.depth += 1
        try:
            for fault in self.due(public.kind):
                self._begin(fault)
            return public.function(*args, **kwargs)
        finally:
            inside.depth -= 1

    def tell_what_is_left(self) -> None:
        """Print which faults have not happened: a job that ends well without them has tested nothing."""
        for fault in self._waiting if os.getpid() == self._pid else ():  # not in a forked child
            calls = self._counts[fault.kind]
            self._say(f"planned fault did not happen, after {calls} such calls: {fault.text}")

    def _begin(self, fault: Fault) -> None:
        self._say(f"injected fault at {call_site().text}: {fault.text}")
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "delay":
            time.sleep(fault.seconds)
        elif fault.action == "raise":
            raise InjectedFault(f"{fault.text}: raised on purpose, as {PLAN} says")

    def _say(self, text: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"{self._prefix}{text}\n")
        sys.stderr.flush()


_armed: Armed | None = None


def arm(rank: int, size: int) -> None:
    """Put the plan of the environment in force; do nothing without one, or if it is in force already.

    Args:
        rank, size: this rank's number in the job, and how many there are.

    Raises:
        OptionError: for a malformed plan, and for one that was set after the package was imported.
    """
    global _armed
    text = os.environ.get(PLAN, "")
    if text == ("" if _armed is None else _armed.text):
        return
    disarm()
    faults = parse(text, PLAN, size)
    if not faults:
        return
    if not HAS_PLAN:
        found, expected = "a plan that was set after mpistrategy was imported", "one that was set before"
        raise OptionError.at(PLAN, found=found, expected=expected)
    _armed = Armed(text, faults, rank, size)
    atexit.register(_armed.tell_what_is_left)
    hooks.append(_armed.call)


def disarm() -> None:
    """Let the declared methods be as they were written."""
    global _armed
    if _armed is not None:
        atexit.unregister(_armed.tell_what_is_left)
        _armed = None
        hooks.clear()
