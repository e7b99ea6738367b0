"""The roll call: who waits where, who has not come, and where they were last seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpistrategy.mpi.watchdog.gpu_progress import FAILED
from mpistrategy.mpi.watchdog.status_board import ANSWERED, Line

_MOST_ROWS = 64


@dataclass(frozen=True)
class Account:
    """What is known of one rank.

    Attributes:
        line: what it said.
        age: how long ago, in seconds.
        silent: why it does not answer; "" for one that has answered.
    """

    line: Line
    age: float
    silent: str = ""


def roll_call(
    accounts: Sequence[Account], unknown: Sequence[int], size: int, records: str, *, contained: bool = False
) -> str:
    """Return the roll call as text.

    Args:
        accounts: of the ranks that are known, in any order.
        unknown: the ranks of which nothing is known.
        size: how many ranks the job has.
        records: where the records and the stacks are, in words.
        contained: whether the job goes on, and the ranks that wait raise.
    """
    accounts = sorted(accounts, key=lambda account: account.line.rank)
    late = max(accounts, key=lambda account: account.line.waited - account.line.limit)
    waiting = [each.line.rank for each in accounts if each.line.waited and not each.silent]
    missing = [each.line.rank for each in accounts if each.silent or not each.line.waited] + list(unknown)
    failed = [account.line.rank for account in accounts if FAILED in account.line.text]
    told = (
        f"a collective has failed on a GPU: rank {_numbers(failed)}"
        if failed
        else "a collective is late: no rank waits for another one, and a GPU does not come to it"
        if not late.line.waited
        else f"a collective is late: rank {late.line.rank} has waited for {late.line.waited:.1f} s "
        f"(timeout_seconds={late.line.limit:g})"
    )
    lines = [
        f"roll call: {told}",
        *(_row(each) for each in _most_telling(accounts)),
    ]
    if len(accounts) > _MOST_ROWS:
        lines.append(f"  and {len(accounts) - _MOST_ROWS} more ranks that wait")
    if unknown:
        numbers = _numbers(sorted(unknown))
        lines.append(f"  nothing is known of rank {numbers}: no strategy connects it yet, or its node is silent")
    if missing:
        lines.append(f"{len(waiting)} of {size} ranks wait; not come: rank {_numbers(missing)}.")
    else:
        lines.append(f"All {size} ranks wait: in calls that do not fit together, or for a network that has stopped.")
    lines.append(records)
    end = "The ranks that wait raise RemoteError" if contained else "The job ends with status 124"
    lines.append(
        f"{end}. Work that one rank does for long on purpose: `with "
        "strategy.expect_long(seconds)`; a longer limit: MPISTRATEGY_TIMEOUT."
    )
    return "\n".join(lines)


def _numbers(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_ROWS]))
    return shown + (f" and {len(ranks) - _MOST_ROWS} more" if len(ranks) > _MOST_ROWS else "")


def _most_telling(accounts: Sequence[Account]) -> Sequence[Account]:
    """Return those that did not come before those that wait, when they are too many to be told."""
    if len(accounts) <= _MOST_ROWS:
        return accounts
    return sorted(accounts, key=lambda each: bool(each.line.waited) and not each.silent)[:_MOST_ROWS]


def _row(account: Account) -> str:
    line = account.line
    if account.silent:
        return f"  rank {line.rank}: does not answer: {account.silent}; {account.age:.1f} s ago it said: {line.text}"
    return f"  rank {line.rank}: {'waits' if line.waited else 'has not come, is'} {line.text}"


def account_of(line: Line, now: float, why_silent: str) -> Account:
    """Return the account of a rank of this node.

    Args:
        line: what it said.
        now: time.monotonic().
        why_silent: what keeps it from answering, if it has not.
    """
    return Account(line, max(0.0, now - line.beat), "" if line.state >= ANSWERED else why_silent)
