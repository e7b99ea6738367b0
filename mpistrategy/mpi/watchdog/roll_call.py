"""The roll call: who waits where, who has not come, and where they were last seen."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpistrategy.errors import CollectiveTimeoutError, RankCall
from mpistrategy.mpi.contract.guard import NO_MORE_CALLS
from mpistrategy.mpi.watchdog.status_board import RankStatus
from mpistrategy.objects.shown import ranks_in_words

#: What `GpuProgress.in_words` says before the library's reason why the result will never come.
FAILED = ", which has failed: "

_MOST_ROWS = 64


class RollCall:
    """What is known of the ranks of a strategy when a collective is late.

    Args:
        statuses: of the ranks that are known, in any order.
        ranks: the numbers in the job of all ranks; of the known ranks only, where not all nodes were asked.

    Attributes:
        statuses: of the ranks that are known, in order.
        unknown: the ranks without a known status.
        missing: the ranks that do not wait, or have no known status.
    """

    def __init__(self, statuses: Sequence[RankStatus], ranks: Sequence[int]) -> None:
        self.statuses: list[RankStatus] = sorted(statuses, key=lambda status: status.rank)
        self._size = len(ranks)
        self.unknown: list[int] = sorted({*ranks} - {status.rank for status in statuses})
        silent = [status.rank for status in self.statuses if status.silent]
        away = [status.rank for status in self.statuses if not status.waited and not status.silent] + self.unknown
        self.missing: list[int] = sorted(silent + away)
        self._absent = f"; not come: {ranks_in_words(sorted(away))}" if away else ""
        self._absent += f"; no answer: {ranks_in_words(silent)}" if silent else ""

    def as_error(self) -> CollectiveTimeoutError:
        """Return the error of ranks that wait, for a job that goes on."""
        error = CollectiveTimeoutError(f"a collective is late, as the roll call says{self._absent}. {NO_MORE_CALLS}")
        error.calls = {
            status.rank: RankCall(left=status.silent or status.text)
            if status.rank in self.missing
            else RankCall(call=status.text)
            for status in self.statuses
        }
        error.missing = tuple(self.missing)
        error.waited_seconds = {status.rank: round(status.waited, 3) for status in self.statuses}
        return error

    @property
    def summary(self) -> str:
        """How many ranks wait, and which do not."""
        if not self.missing:
            return (
                f"All {self._size} ranks wait: in different strategies, in calls that do not fit together, or for a "
                "network that has stopped."
            )
        return f"{self._size - len(self.missing)} of {self._size} ranks wait{self._absent}."

    def text(self, records: str, is_contained: bool) -> str:
        """Return the roll call as text.

        Args:
            records: where the records and the stacks are, in words.
            is_contained: whether the job goes on.
        """
        rows, late = self.statuses, max(self.statuses, key=lambda status: status.waited - status.limit)
        failed = [status.rank for status in rows if FAILED in status.text]
        headline = (
            f"a collective is late: rank {late.rank} has waited for {late.waited:.1f} s "
            f"(timeout_seconds={late.limit:g})"
        )
        if failed:
            headline = f"a collective has failed on a GPU: {ranks_in_words(failed)}"
        if len(rows) > _MOST_ROWS:  # missing ranks before ranks that wait
            rows = sorted(rows, key=lambda status: status.rank not in self.missing)[:_MOST_ROWS]
        lines = [f"roll call: {headline}", *map(_row, rows)]
        if len(self.statuses) > len(rows):
            lines.append(f"  and {len(self.statuses) - len(rows)} more ranks that wait")
        if self.unknown:
            lines.append(
                f"  nothing is known of {ranks_in_words(self.unknown)}: its node does not answer, or it is stopped (ps "
                "on its node: state T)"
            )
        end = "The ranks that wait raise CollectiveTimeoutError" if is_contained else "The job ends with status 124"
        lines += (
            self.summary,
            records,
            f"{end}. Work that one rank does for long on purpose: `with strategy.expect_long(seconds)`; a longer "
            "limit: MPISTRATEGY_TIMEOUT_SECONDS.",
        )
        return "\n".join(lines)


def as_data(statuses: Sequence[RankStatus]) -> dict[int, dict[str, object]]:
    """Return by rank: its text and the text's age, how long it had waited (0: not), its limit, why it is silent; ..."""
    return {
        status.rank: {
            "text": status.text,
            "waited_seconds": round(status.waited, 3),
            "timeout_seconds": status.limit if math.isfinite(status.limit) else None,
            "said_seconds_ago": round(status.age, 3),
            "silent": status.silent,
            "host": status.host,
            "process": status.process,
            "signal": status.signal,
        }
        for status in statuses
    }


def statuses_in(data: Mapping[str, Any]) -> list[RankStatus]:
    """Return the statuses from `as_data` of another node; ValueError, TypeError or KeyError for other data."""
    return [
        RankStatus(
            int(rank),
            process=int(fields["process"]),
            signal=int(fields["signal"]),
            beat=time.monotonic() - float(fields["said_seconds_ago"]),
            waited=float(fields["waited_seconds"]),
            limit=math.inf if fields["timeout_seconds"] is None else float(fields["timeout_seconds"]),
            text=str(fields["text"]),
            silent=str(fields["silent"]),
            host=str(fields["host"]),
        )
        for rank, fields in data.items()
    ]


def _row(status: RankStatus) -> str:
    words = f"{'waits' if status.waited else 'has not come, is'} {status.text}"
    if status.silent:
        words = f"does not answer: {status.silent}; {status.age:.1f} s ago it said: {status.text}"
    return f"  rank {status.rank}: {words}"
