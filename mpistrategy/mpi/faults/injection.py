"""Planned faults: a plan makes a public collective go wrong on some ranks.

A plan is one fault or several, separated by ';'.  A fault is three fields in any order, separated by ',':

    rank=2, at=allreduce#17, do=kill; rank=any, at=#3, do=delay:0.5s

`rank` is a rank of the job, several ranks with '+', or ``any``.  `at` is a kind of collective and the number of the
call, from 1 on, among that rank's calls of that kind; without a kind, among all its calls.  The kinds are those that
the collectives are declared with.  `do` is ``kill`` (SIGKILL), ``stop`` (SIGSTOP, until the process gets SIGCONT),
``raise`` (InjectedFault in place of the call; a program that does not catch it ends the job), or a delay.

Without a plan nothing of this runs.  The plan must be set before the package is imported: public methods that
`mpistrategy.mpi.contract.public_calls` knows then have hooks, which `arm` uses on this rank only.  The messages stay
the same, so each rank may have a plan of its own.

A plan counts the program's own calls from the first strategy on, over all strategies of this process; calls inside a
collective do not count.  A fault happens before the guard hears of the call: to the other ranks it looks like the same
mistake in the program or the machine.  Simulated ranks (`mpistrategy.testing.run_replicas`) have no plan, since they
share a process.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from mpistrategy.errors import InjectedFault, OptionError
from mpistrategy.mpi.contract.call_sites import call_site
from mpistrategy.mpi.contract.public_calls import HAS_PLAN, PLAN, PublicCall, all_declared, hooks
from mpistrategy.mpi.watchdog import reports, watchdog

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_LONGEST_SECONDS = 86400.0
#: The fields of a fault in alphabetical order, without blanks.
_FAULT = re.compile(
    r"at=(?P<kind>[a-z_]*)#(?P<number>[1-9][0-9]{0,17}),"
    r"do=(?P<do>kill|stop|raise|delay:(?P<seconds>[0-9]+(\.[0-9]*)?(e-?[0-9]+)?)s?),"
    r"rank=(any|(?P<ranks>[0-9]{1,18}(\+[0-9]{1,18})*))"
)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        text: the fault, as it was written.
        ranks: the ranks on which it happens; None means all.
        kind: of the collectives; "" counts the calls of all kinds.
        number: the number of the call, from 1 on.
        action: "kill", "stop", "raise" or "delay".
        seconds: how long a delay is.
    """

    text: str
    ranks: tuple[int, ...] | None
    kind: str
    number: int
    action: str
    seconds: float = 0.0


def parse(text: str, where: str, size: int) -> tuple[Fault, ...]:
    """Return the faults of a plan, in order.

    Args:
        text: the plan, in any letter case; blank text means no faults.
        where: the option or variable that held the plan, for errors.
        size: how many ranks there are.

    Raises:
        OptionError: for a malformed plan, or a rank that does not exist; says what is allowed.
    """
    return tuple(_fault(part.strip(), where, size) for part in text.lower().split(";")) if text.strip() else ()


def _fault(text: str, where: str, size: int) -> Fault:
    kinds = sorted({call.kind for call in all_declared().values()})
    if match := _FAULT.fullmatch(",".join(sorted("".join(text.split()).split(",")))):
        ranks = tuple(map(int, match["ranks"].split("+"))) if match["ranks"] else None
        seconds, kind = float(match["seconds"] or 0), match["kind"]
        if kind in ("", *kinds) and seconds <= _LONGEST_SECONDS and max(ranks or (0,)) < size:
            return Fault(text, ranks, kind, int(match["number"]), match["do"].partition(":")[0], seconds)
    raise OptionError.at(
        where,
        found=repr(text),
        expected="rank=, at= and do=, once each, with ',' between them and ';' between faults; rank= a number from 0 "
        f"to {size - 1}, several with '+', or any; at=KIND#NUMBER, from 1 on, the kind "
        f"one of {', '.join(kinds)}, or left out; do= one of kill, stop, raise, delay:0.5s, the delay at most a day",
        fix="Write for example 'rank=2, at=allreduce#17, do=kill'.",
    )


#: Whether this thread is in a declared call; calls inside it are not counted.
inside: ContextVar[bool] = ContextVar("inside", default=False)


class Armed:
    """A plan in force on this rank.

    Args:
        text: the plan's words.
        rank, size: this rank's number in the job, and how many there are.
    """

    def __init__(self, text: str, rank: int, size: int) -> None:
        self._pending = [fault for fault in parse(text, PLAN, size) if fault.ranks is None or rank in fault.ranks]
        self._counts: Counter[str] = Counter()

    def call(self, public: PublicCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call of the program's, or a call in such a call, which does not count."""
        if inside.get():
            return public.function(*args, **kwargs)
        token = inside.set(True)
        try:
            self._counts.update(["", public.kind])
            for fault in list(self._pending):
                if fault.kind in ("", public.kind) and fault.number == self._counts[fault.kind]:
                    self._pending.remove(fault)
                    self._begin(fault)
            return public.function(*args, **kwargs)
        finally:
            inside.reset(token)

    def _begin(self, fault: Fault) -> None:
        reports.say(f"injected fault at {call_site().text}: {fault.text}")
        if fault.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.action])
        elif fault.action == "delay":
            time.sleep(fault.seconds)
        else:
            raise InjectedFault(f"{fault.text}: raised on purpose, as {PLAN} says")


def arm() -> None:
    """Put the plan of the environment in force; do nothing without one, or if one is in force already.

    Raises:
        OptionError: for a malformed plan, or a plan that was set too late.
    """
    text = os.environ.get(PLAN, "")
    if hooks or not text.strip():
        return
    armed = Armed(text, watchdog.here.rank, watchdog.here.size)
    if not HAS_PLAN:
        raise OptionError.at(
            PLAN, found="a plan that was set after mpistrategy was imported", expected="one that was set before"
        )
    hooks.append(armed.call)
