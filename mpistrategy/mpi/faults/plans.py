"""Fault plans: the syntax of `MPISTRATEGY_INJECT` and `mpistrategy run --inject`.

A plan is one fault or several, separated by ';'.  A fault is three fields in any order, separated by ',':

    rank=2, at=allreduce#17, do=kill; rank=any, at=#3, do=delay:0.5s

`rank` is a rank of the job, several ranks with '+', or ``any``.  `at` is a kind of collective and the number of the
call, from 1 on, among that rank's calls of that kind; without a kind, among all its calls.  `do` is one of `ACTIONS`.
The kinds are those that the collectives are declared with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from mpistrategy.errors import OptionError
from mpistrategy.mpi.contract.public_calls import all_declared

#: What a fault does.
ACTIONS = {
    "kill": "the process ends by SIGKILL",
    "stop": "the process stops by SIGSTOP, until it gets SIGCONT",
    "raise": "InjectedFault is raised in place of the call",
    "delay:0.5s": "the call begins later by so many seconds",
}

_FIELDS = {"rank", "at", "do"}
_EXAMPLE = "rank=2, at=allreduce#17, do=kill"
_LONGEST_SECONDS = 86400.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        text: the fault, as it was written.
        ranks: the ranks on which it happens; None means all.
        kind: of `kinds()`; "" counts the calls of all kinds.
        number: the number of the call, from 1 on.
        action: a key of `ACTIONS`.
        seconds: how long a delay is.
    """

    text: str
    ranks: tuple[int, ...] | None
    kind: str
    number: int
    action: str
    seconds: float = 0.0


def kinds() -> list[str]:
    """Return the kinds of collectives."""
    return sorted({call.kind for call in all_declared().values()})


def parse(text: str, where: str, size: int | None = None) -> tuple[Fault, ...]:
    """Return the faults of a plan, in order.

    Args:
        text: the plan, in any letter case; blank text means no faults.
        where: the option or variable that held the plan, for errors.
        size: how many ranks there are; None when that is not known yet.

    Raises:
        OptionError: for a malformed plan, or one with a rank that does not exist; says what is allowed.
    """
    return tuple(_fault(part.strip(), where, size) for part in text.lower().split(";")) if text.strip() else ()


def _fault(text: str, where: str, size: int | None) -> Fault:
    words = [[word.strip() for word in part.partition("=")] for part in text.split(",")]
    fields = {name: value for name, _, value in words}
    if fields.keys() != _FIELDS or len(words) > len(fields):
        _refuse(where, repr(text), "rank=, at= and do=, once each, with ',' between them and ';' between faults")
    kind, number = _place(fields["at"], where)
    action, seconds = _action(fields["do"], where)
    return Fault(text, _ranks(fields["rank"], where, size), kind, number, action, seconds)


def _ranks(text: str, where: str, size: int | None) -> tuple[int, ...] | None:
    if text == "any":
        return None
    ranks = tuple(_count(word.strip()) for word in text.split("+"))
    if min(ranks) < 0 or (size is not None and max(ranks) >= size):
        numbers = "a number from 0 on" if size is None else f"a number from 0 to {size - 1}"
        _refuse(where, f"rank={text}", f"{numbers}, several with '+', or any")
    return ranks


def _place(text: str, where: str) -> tuple[str, int]:
    kind, _, number = (word.strip() for word in text.partition("#"))
    if kind not in ("", *kinds()) or _count(number) < 1:
        _refuse(where, f"at={text}", f"KIND#NUMBER, from 1 on; the kind is one of {_listed(kinds())}, or left out")
    return kind, int(number)


def _action(text: str, where: str) -> tuple[str, float]:
    delay = re.fullmatch(r"delay\s*:\s*([0-9]+(?:\.[0-9]*)?(?:e-?[0-9]+)?)s?", text, re.ASCII)
    if (text not in ACTIONS and delay is None) or (delay and float(delay[1]) > _LONGEST_SECONDS):
        _refuse(where, f"do={text}", f"one of {_listed(ACTIONS)}, the delay at most a day")
    return (text, 0.0) if delay is None else ("delay", float(delay[1]))


def _count(text: str) -> int:
    """Return the number that a text is; -1 for anything else."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) else -1


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def _refuse(where: str, found: str, expected: str) -> NoReturn:
    raise OptionError.at(where, found=found, expected=expected, fix=f"Write for example {_EXAMPLE!r}.")
