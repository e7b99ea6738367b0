"""The roll call: who waits where, who has not come, and where they were last seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpistrategy.errors import CollectiveTimeoutError, RankCall
from mpistrategy.mpi.contract.failures import NO_MORE_CALLS
from mpistrategy.mpi.watchdog.status_board import ANSWERED, RankStatus, call_in
from mpistrategy.objects.shown import ranks_in_words

#: What `GpuProgress.in_words` says before the library's reason why the result will never come.
FAILED = ", which has failed: "

_MOST_ROWS = 64
_UNKNOWN = (
    "no strategy connects it yet (where only some ranks make one: MirroredStrategy(communicator=...)), it is stopped "
    "(ps on its node: state T), or its node is silent"
)


@dataclass(frozen=True)
class Account:
    """What is known about one rank.

    Attributes:
        status: what it last said.
        age: how long ago that was, in seconds.
        silent: why it does not answer; "" where it has answered.
    """

    status: RankStatus
    age: float
    silent: str = ""


def as_data(accounts: Sequence[Account]) -> dict[int, dict[str, object]]:
    """Return by rank: where it is, how long it has waited (0: not), how long it may, and why it is silent."""
    return {
        each.status.rank: {
            "text": each.status.text,
            "waited_seconds": round(each.status.waited, 3),
            "timeout_seconds": each.status.limit if math.isfinite(each.status.limit) else None,
            "silent": each.silent,
        }
        for each in sorted(accounts, key=lambda account: account.status.rank)
    }


def not_come(accounts: Sequence[Account], unknown: Sequence[int]) -> list[int]:
    """Return the ranks that do not wait, or of which nothing is known."""
    return [each.status.rank for each in accounts if each.silent or not each.status.waited] + list(unknown)


def _silent(accounts: Sequence[Account]) -> list[int]:
    return [each.status.rank for each in accounts if each.silent]


def absent_in_words(missing: Sequence[int], silent: Sequence[int]) -> str:
    """Return ``; not come: rank 1; no answer: rank 2``.

    Args:
        missing: the ranks that do not wait, the silent ones among them.
        silent: those that cannot say where they are, such as stopped ones: they may have come before that.
    """
    absent = [rank for rank in missing if rank not in silent]
    parts = {"not come": absent, "no answer": [rank for rank in missing if rank in silent]}
    return "".join(f"; {what}: {ranks_in_words(ranks)}" for what, ranks in parts.items() if ranks)


def as_error(accounts: Sequence[Account], unknown: Sequence[int]) -> CollectiveTimeoutError:
    """Return the error of ranks that wait, for a job that goes on."""
    ordered = sorted(accounts, key=lambda account: account.status.rank)
    missing = sorted(not_come(ordered, unknown))
    error = CollectiveTimeoutError(
        f"a collective is late, as the roll call says{absent_in_words(missing, _silent(ordered))}. {NO_MORE_CALLS}"
        if missing
        else f"a collective is late, as the roll call says. {NO_MORE_CALLS}"
    )
    error.calls = {each.status.rank: _call_of(each) for each in ordered}
    error.missing = tuple(missing)
    error.waited_seconds = {each.status.rank: round(each.status.waited, 3) for each in ordered}
    return error


def _call_of(account: Account) -> RankCall:
    call = call_in(account.status.text)
    return replace(call, left=f"does not answer: {account.silent}") if account.silent else call


def roll_call(
    accounts: Sequence[Account],
    unknown: Sequence[int],
    size: int,
    records: str,
    *,
    contained: bool = False,
) -> str:
    """Return the roll call as text.

    Args:
        accounts: of the ranks that are known, in any order.
        unknown: the ranks about which nothing is known.
        size: how many ranks the job has.
        records: where the records and the stacks are, in words.
        contained: whether the job goes on, and the ranks that wait raise.
    """
    accounts = sorted(accounts, key=lambda account: account.status.rank)
    late = max(accounts, key=lambda account: account.status.waited - account.status.limit)
    waiting = [each.status.rank for each in accounts if each.status.waited and not each.silent]
    missing = not_come(accounts, unknown)
    failed = [account.status.rank for account in accounts if FAILED in account.status.text]
    told = (
        f"a collective has failed on a GPU: {ranks_in_words(failed)}"
        if failed
        else "a collective is late: no rank waits for another one, and a GPU does not come to it"
        if not late.status.waited
        else f"a collective is late: rank {late.status.rank} has waited for {late.status.waited:.1f} s "
        f"(timeout_seconds={late.status.limit:g})"
    )
    lines = [
        f"roll call: {told}",
        *(_row(each) for each in _most_telling(accounts)),
    ]
    if len(accounts) > _MOST_ROWS:
        lines.append(f"  and {len(accounts) - _MOST_ROWS} more ranks that wait")
    if unknown:
        lines.append(f"  nothing is known of {ranks_in_words(unknown)}: {_UNKNOWN}")
    if missing:
        lines.append(f"{len(waiting)} of {size} ranks wait{absent_in_words(missing, _silent(accounts))}.")
    else:
        why = "in different strategies, in calls that do not fit together, or for a network that has stopped"
        lines.append(f"All {size} ranks wait: {why}.")
    lines.append(records)
    end = "The ranks that wait raise CollectiveTimeoutError" if contained else "The job ends with status 124"
    lines.append(
        f"{end}. Work that one rank does for long on purpose: `with "
        "strategy.expect_long(seconds)`; a longer limit: MPISTRATEGY_TIMEOUT_SECONDS."
    )
    return "\n".join(lines)


def _most_telling(accounts: Sequence[Account]) -> Sequence[Account]:
    """Return those that did not come before those that wait, when they are too many to be told."""
    if len(accounts) <= _MOST_ROWS:
        return accounts
    return sorted(accounts, key=lambda each: bool(each.status.waited) and not each.silent)[:_MOST_ROWS]


def _row(account: Account) -> str:
    status = account.status
    if account.silent:
        return (
            f"  rank {status.rank}: does not answer: {account.silent}; {account.age:.1f} s ago it said: {status.text}"
        )
    return f"  rank {status.rank}: {'waits' if status.waited else 'has not come, is'} {status.text}"


def account_of(status: RankStatus, now: float, why_silent: str) -> Account:
    """Return the account of a rank of this node.

    Args:
        status: what it last said.
        now: time.monotonic().
        why_silent: what keeps it from answering, if it has not.
    """
    return Account(status, max(0.0, now - status.beat), "" if status.state >= ANSWERED else why_silent)
