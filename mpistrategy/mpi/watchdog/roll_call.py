"""The roll call: who waits where, who has not come, and where they were last seen."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpistrategy.errors import CollectiveTimeoutError, RankCall
from mpistrategy.mpi.contract.failures import NO_MORE_CALLS
from mpistrategy.mpi.watchdog.status_board import RankStatus
from mpistrategy.objects.shown import ranks_in_words

#: What `GpuProgress.in_words` says before the library's reason why the result will never come.
FAILED = ", which has failed: "

_MOST_ROWS = 64
_UNKNOWN = (
    "its node does not answer, no strategy connects it yet (where only some ranks make one: "
    "MirroredStrategy(communicator=...)), or it is stopped (ps on its node: state T)"
)


def as_data(statuses: Sequence[RankStatus]) -> dict[int, dict[str, object]]:
    """Return by rank: where it was how long ago, how long it had waited (0: not), how long it may, why it is silent."""
    return {
        each.rank: {
            "text": each.text,
            "waited_seconds": round(each.waited, 3),
            "timeout_seconds": each.limit if math.isfinite(each.limit) else None,
            "said_seconds_ago": round(_age(each), 3),
            "silent": each.silent,
        }
        for each in sorted(statuses, key=lambda status: status.rank)
    }


def statuses_in(data: Mapping[str, Any]) -> list[RankStatus]:
    """Return what `as_data` has told, on another node; ValueError, TypeError or KeyError for anything else."""
    return [
        RankStatus(
            int(rank),
            process=0,
            signal=0,
            beat=time.monotonic() - float(told["said_seconds_ago"]),
            waited=float(told["waited_seconds"]),
            limit=math.inf if told["timeout_seconds"] is None else float(told["timeout_seconds"]),
            text=str(told["text"]),
            silent=str(told["silent"]),
        )
        for rank, told in data.items()
    ]


def _age(status: RankStatus) -> float:
    return max(0.0, time.monotonic() - status.beat)


def not_come(statuses: Sequence[RankStatus], unknown: Sequence[int]) -> list[int]:
    """Return the ranks that do not wait, or of which nothing is known."""
    return [each.rank for each in statuses if each.silent or not each.waited] + list(unknown)


def _silent(statuses: Sequence[RankStatus]) -> list[int]:
    return [each.rank for each in statuses if each.silent]


def absent_in_words(missing: Sequence[int], silent: Sequence[int]) -> str:
    """Return ``; not come: rank 1; no answer: rank 2``.

    Args:
        missing: the ranks that do not wait, the silent ones among them.
        silent: those that cannot say where they are, such as stopped ones: they may have come before that.
    """
    absent = [rank for rank in missing if rank not in silent]
    parts = {"not come": absent, "no answer": [rank for rank in missing if rank in silent]}
    return "".join(f"; {what}: {ranks_in_words(ranks)}" for what, ranks in parts.items() if ranks)


def as_error(statuses: Sequence[RankStatus], unknown: Sequence[int]) -> CollectiveTimeoutError:
    """Return the error of ranks that wait, for a job that goes on."""
    ordered = sorted(statuses, key=lambda status: status.rank)
    missing = sorted(not_come(ordered, unknown))
    error = CollectiveTimeoutError(
        f"a collective is late, as the roll call says{absent_in_words(missing, _silent(ordered))}. {NO_MORE_CALLS}"
        if missing
        else f"a collective is late, as the roll call says. {NO_MORE_CALLS}"
    )
    error.calls = {each.rank: _call_of(each) for each in ordered}
    error.missing = tuple(missing)
    error.waited_seconds = {each.rank: round(each.waited, 3) for each in ordered}
    return error


def call_in(text: str) -> RankCall:
    """Return the call of a status such as ``in #7 Strategy.reduce SUM float64[3] (24 B) for 2 s; at train.py:12``.

    A text of no collective becomes `left`.
    """
    call = re.match(r"in #\d+ (\S+)(?: ([A-Z]+)\b)?", text)
    if call is None:
        return RankCall(left=text)
    return RankCall(call=call[1], op=call[2] or "", site=text.rpartition(" at ")[2] if " at " in text else "")


def _call_of(status: RankStatus) -> RankCall:
    call = call_in(status.text)
    return replace(call, left=f"does not answer: {status.silent}") if status.silent else call


def roll_call(
    statuses: Sequence[RankStatus],
    unknown: Sequence[int],
    size: int,
    records: str,
    *,
    contained: bool = False,
) -> str:
    """Return the roll call as text.

    Args:
        statuses: of the ranks that are known, in any order.
        unknown: the ranks about which nothing is known.
        size: how many ranks the job has.
        records: where the records and the stacks are, in words.
        contained: whether the job goes on, and the ranks that wait raise.
    """
    statuses = sorted(statuses, key=lambda status: status.rank)
    late = max(statuses, key=lambda status: status.waited - status.limit)
    waiting = [each.rank for each in statuses if each.waited and not each.silent]
    missing = not_come(statuses, unknown)
    failed = [status.rank for status in statuses if FAILED in status.text]
    told = (
        f"a collective has failed on a GPU: {ranks_in_words(failed)}"
        if failed
        else "a collective is late: no rank waits for another one, and a GPU does not come to it"
        if not late.waited
        else f"a collective is late: rank {late.rank} has waited for {late.waited:.1f} s "
        f"(timeout_seconds={late.limit:g})"
    )
    lines = [
        f"roll call: {told}",
        *(_row(each) for each in _most_telling(statuses)),
    ]
    if len(statuses) > _MOST_ROWS:
        lines.append(f"  and {len(statuses) - _MOST_ROWS} more ranks that wait")
    if unknown:
        lines.append(f"  nothing is known of {ranks_in_words(unknown)}: {_UNKNOWN}")
    if missing:
        lines.append(f"{len(waiting)} of {size} ranks wait{absent_in_words(missing, _silent(statuses))}.")
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


def _most_telling(statuses: Sequence[RankStatus]) -> Sequence[RankStatus]:
    """Return those that did not come before those that wait, when they are too many to be told."""
    if len(statuses) <= _MOST_ROWS:
        return statuses
    return sorted(statuses, key=lambda each: bool(each.waited) and not each.silent)[:_MOST_ROWS]


def _row(status: RankStatus) -> str:
    if status.silent:
        return (
            f"  rank {status.rank}: does not answer: {status.silent}; {_age(status):.1f} s ago it said: {status.text}"
        )
    return f"  rank {status.rank}: {'waits' if status.waited else 'has not come, is'} {status.text}"
