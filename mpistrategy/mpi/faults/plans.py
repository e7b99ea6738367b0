"""Fault plans: the syntax of `MPISTRATEGY_INJECT` and `mpistrategy run --inject`.

A plan is one fault or several, separated by ';'.  A fault is three fields in any order, separated by ',':

    rank=2, at=allreduce#17, do=kill; rank=any, at=#3, do=delay:0.5s

`rank` is a rank of the job, several ranks with '+', or ``any``.  `at` is a kind of collective and the number of the
call, from 1 on, among that rank's calls of that kind; without a kind, among all its calls.  `do` is one of `ACTIONS`,
some with a number after ':'.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from mpistrategy.errors import OptionError

#: The kinds of collectives, and which calls they are.
KINDS = {
    "allreduce": "ReplicaContext.all_reduce",
    "allreduce_async": "ReplicaContext.all_reduce_async",
    "wait": "AllReduceHandle.wait",
    "reduce": "Strategy.reduce, reduce_to, batch_reduce_to, an algorithm's reduce; the sum that a variable makes",
    "gather": "ReplicaContext.all_gather, Strategy.gather",
    "reduce_scatter": "ReplicaContext.reduce_scatter",
    "broadcast": "Strategy.broadcast, StrategyExtended.broadcast_to, an algorithm's broadcast",
    "barrier": "Strategy.barrier, StrategyExtended.barrier",
    "update": "an optimizer's apply_gradients",
    "create": "Variable(...)",
    "next": "the next element of a distributed dataset",
    "save": "Checkpoint.save, and with it CheckpointManager.save",
    "restore": "Checkpoint.restore, and with it CheckpointManager.restore",
    "close": "Strategy.close",
}
#: What a fault does.
ACTIONS = {
    "kill": "the process ends by SIGKILL",
    "stop": "the process stops by SIGSTOP, until it gets SIGCONT",
    "raise": "InjectedFault is raised in place of the call",
    "delay": "the call begins later: delay:0.5s",
    "corrupt": "a bit of this rank's result is flipped after the call: corrupt:0 is the first element's lowest bit",
    "skip": "the call is not made; this rank gets its own value back",
    "swap": "the call is made after the next one; this rank gets its own value back",
}
#: The kinds of calls that can be skipped or swapped.
LEAVES_OUT = ("allreduce", "reduce", "gather", "broadcast", "barrier", "update")
#: The kinds of calls whose result can be corrupted.
HAS_RESULT = ("allreduce", "wait", "reduce", "gather", "reduce_scatter", "broadcast", "update")
#: The kinds that an action is limited to; it then needs a kind.
LIMITED = {"skip": LEAVES_OUT, "swap": LEAVES_OUT, "corrupt": HAS_RESULT}

_FIELDS = ("rank", "at", "do")
_EXAMPLE = "rank=2, at=allreduce#17, do=kill"
_MOST_BITS, _LONGEST_SECONDS = 64, 86400.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        ranks: the ranks on which it happens; None means all.
        kind: a key of `KINDS`; "" counts the calls of all kinds.
        number: the number of the call, from 1 on.
        action: a key of `ACTIONS`.
        seconds: how long a delay is.
        bit: the bit of the first element to flip, from the lowest on, modulo its number of bits.
    """

    ranks: tuple[int, ...] | None
    kind: str
    number: int
    action: str
    seconds: float = 0.0
    bit: int = 0

    def __str__(self) -> str:
        ranks = "any" if self.ranks is None else "+".join(map(str, self.ranks))
        more = {"delay": f":{self.seconds!r}s", "corrupt": f":{self.bit}"}.get(self.action, "")
        return f"rank={ranks}, at={self.kind}#{self.number}, do={self.action}{more}"

    def is_on(self, rank: int) -> bool:
        """Return whether it happens on `rank`."""
        return self.ranks is None or rank in self.ranks


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
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in _FIELDS:
            _refuse(
                where, f"{part.strip()!r} in the fault {text!r}", f"the fields {_listed(_FIELDS)}", "Write NAME=VALUE."
            )
        if name in fields:
            _refuse(where, f"{name}= twice in the fault {text!r}", "each field once", "Write ';' between two faults.")
        fields[name] = value
    for name in _FIELDS:
        if name not in fields:
            _refuse(where, f"no {name}= in the fault {text!r}", f"the fields {_listed(_FIELDS)}")
    ranks = _ranks(fields["rank"], where, size)
    kind, number = _place(fields["at"], where)
    action, seconds, bit = _action(fields["do"], where)
    allowed = LIMITED.get(action)
    if allowed is not None and kind not in allowed:
        _refuse(where, f"at={fields['at']} with do={action}", f"at=KIND#NUMBER with a kind of {_listed(allowed)}")
    return Fault(ranks, kind, number, action, seconds, bit)


def _ranks(text: str, where: str, size: int | None) -> tuple[int, ...] | None:
    if text == "any":
        return None
    words = [word.strip() for word in text.split("+")]
    there_are = "a number from 0 on" if size is None else f"a number from 0 to {size - 1}"
    if not all(_is_count(word) and (size is None or int(word) < size) for word in words):
        _refuse(where, f"rank={text}", f"{there_are}, several with '+', or any", "Write rank=2, rank=0+2 or rank=any.")
    return tuple(sorted({int(word) for word in words}))


def _place(text: str, where: str) -> tuple[str, int]:
    kind, _, number = (word.strip() for word in text.partition("#"))
    if kind and kind not in KINDS:
        _refuse(where, f"at={text}", f"a kind of {_listed(KINDS)}, or none")
    if not _is_count(number) or int(number) < 1:
        _refuse(where, f"at={text}", "'#' and the number of the call, from 1 on", "Write at=allreduce#17, or at=#17.")
    return kind, int(number)


def _action(text: str, where: str) -> tuple[str, float, int]:
    action, colon, more = (word.strip() for word in text.partition(":"))
    if action not in ACTIONS:
        _refuse(where, f"do={text}", f"one of {_listed(ACTIONS)}")
    if action == "delay":
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:e-?[0-9]+)?)s?", more, re.ASCII)
        seconds = float(found[1]) if found else math.inf
        if seconds > _LONGEST_SECONDS:
            _refuse(where, f"do={text}", "seconds after delay, at most a day's", "Write do=delay:0.5s.")
        return action, seconds, 0
    if action == "corrupt" and colon:
        if not _is_count(more) or int(more) >= _MOST_BITS:
            _refuse(where, f"do={text}", f"a bit from 0 to {_MOST_BITS - 1}", "Write do=corrupt or do=corrupt:51.")
        return action, 0.0, int(more)
    if colon:
        _refuse(where, f"do={text}", f"do={action}, without more", "Only delay and corrupt take a number.")
    return action, 0.0, 0


def _is_count(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) is not None


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def _refuse(where: str, found: str, expected: str, fix: str = "") -> NoReturn:
    raise OptionError.at(where, found=found, expected=expected, fix=fix or f"Write for example {_EXAMPLE!r}.")
