"""The reports that ranks send each other when their calls differ, and the table that every rank raises."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrategy.errors import CollectiveMismatchError, RankCall, RankLeftError
from mpistrategy.objects.shown import ranks_by, ranks_in_words

_SHOWN = 160
_MOST_ROWS = 56
#: The only key in the words of a rank that has ended; its value says why.
LEFT = "left"

#: A call in words: the non-empty fields of its signature.
Words = dict[str, str]


@dataclass(slots=True)
class Report:
    """The report of one rank.

    Attributes:
        call: the call that it makes; empty fields are left out.
        site: its call site.
        error: the name of the error that prevented the call, and
        text: its text.
        digest: the number that was compared; None without a call.
        failure: why the rank takes no more calls: the fields of a `guard.Failure`; None where it does.
    """

    call: Words
    site: str
    error: str = ""
    text: str = ""
    digest: int | None = None
    failure: Sequence[Any] | None = None


_DIFFERENT = (
    "Nothing was sent. Make every rank call the same collectives, in the same order, with equal structures,",
    "dtypes and shapes.",
)
_ALIKE = (
    "Nothing was sent. The calls are equal but come from different places of the program, as swapped ones do. A place",
    "is the line of the call, and the lines that called it. If branches differ by rank, pass the same name= in both:",
    "it is compared instead of the place. A call that takes no name= must come from the same lines on all ranks.",
)


#: What to write for a usual difference, by the field.
_CURES = {
    "destination": "extended.worker_devices is this rank's own device: for a result on every rank, pass "
    "strategy.devices_by_rank.",
    "values": "An int is int64, a float is float64, and sum() of nothing is the int 0: write float(x), or "
    "sum(parts, start=0.0).",
}
#: The structure in the call of a rank that has no value of its own, and takes the value of the root of a broadcast.
ASKS = "what the root has"
_OF_VALUES = ("structure", "values")


def only_ask(reports: Sequence[Report]) -> bool:
    """Return whether some ranks ask for the values of the others, and the calls do not differ otherwise."""
    asking = [report for report in reports if report.call.get("structure") == ASKS]
    digests = {report.digest for report in reports if report.call.get("structure") != ASKS}
    descriptions = [{name: text for name, text in report.call.items() if name not in _OF_VALUES} for report in reports]
    distinct = {tuple(sorted(description.items())) for description in descriptions}
    return bool(asking) and len(digests) == len(distinct) == 1 and not any(report.error for report in reports)


def mismatch(reports: Sequence[Report]) -> CollectiveMismatchError:
    """Return the error of every rank, with a table as its text and the different calls as data.

    The table shows the calls in at most 64 lines, with the fields in which they differ.  Ranks that make the same call
    from the same place share a row.
    """
    calls = [report.call for report in reports]
    different = _different(calls)
    left_ranks = [rank for rank, call in enumerate(calls) if LEFT in call]
    reasons = [f"{ranks_in_words(left_ranks)} left"] if left_ranks else []
    if different or not left_ranks:
        reasons.append(f"they differ in: {', '.join(different) or 'nothing'}")
    head = "; ".join(["the ranks do not make the same call", *reasons])
    lines = [head, *_rows(calls, different, [report.site for report in reports])]
    lines.extend(_ALIKE if different == ["place"] and not left_ranks else _DIFFERENT)
    lines.extend(_CURES[field] for field in different if field in _CURES)
    error = (RankLeftError if left_ranks else CollectiveMismatchError)("\n".join(lines))
    error.rank = left_ranks[0] if left_ranks else None
    error.differ = tuple(different)
    error.calls = {rank: _as_data(report.call, report.site) for rank, report in enumerate(reports)}
    return error


def _as_data(call: Words, site: str) -> RankCall:
    arrays = re.findall(r"([^\s,\[]+)\[([\d, ]*)\]", call.get("values", ""))
    return RankCall(
        call=call.get("call", ""),
        op=call.get("op", ""),
        structure=call.get("structure", ""),
        dtypes=tuple(dtype for dtype, _ in arrays),
        shapes=tuple(tuple(map(int, re.findall(r"\d+", shape))) for _, shape in arrays),
        destination=call.get("destination", ""),
        options=call.get("options", ""),
        name=call.get("name", ""),
        place=call.get("place", ""),
        site=site,
        left=call.get(LEFT, ""),
    )


def _different(calls: Sequence[Words]) -> list[str]:
    """Return the fields in which the calls differ; ranks that have left do not count."""
    present_calls = [call for call in calls if LEFT not in call]
    fields = dict.fromkeys(name for call in present_calls for name in call)
    return [name for name in fields if len({call.get(name, "") for call in present_calls}) > 1]


def _rows(calls: Sequence[Words], different: Sequence[str], sites: Sequence[str]) -> list[str]:
    present_calls = [call for call in calls if LEFT not in call]
    starts = {name: _first_difference([call.get(name, "-") for call in present_calls]) for name in different}
    ranks_by_text = ranks_by(_row(call, site, starts) for call, site in zip(calls, sites, strict=True))
    rows = [f"  {ranks_in_words(ranks)}{text}" for text, ranks in ranks_by_text.items()]
    more = sum(map(len, list(ranks_by_text.values())[_MOST_ROWS:]))
    return [*rows[:_MOST_ROWS], f"  and {more} more ranks, in other ways"] if more else rows


def _row(call: Words, site: str, starts: Mapping[str, int]) -> str:
    """Return a call in words, without its ranks: the fields of `starts`, from about there on."""
    if LEFT in call:
        return f" left: {call[LEFT]}"
    shown = {name: _cut(call.get(name, "-"), starts.get(name, 0)) for name in ("call", *starts)}
    return f": {'  '.join(f'{name}={value}' for name, value in shown.items())}  at {site}"


def _first_difference(texts: Sequence[str]) -> int:
    """Return where texts begin to differ."""
    pairs = enumerate(zip(*texts, strict=False))
    return next((at for at, characters in pairs if len(set(characters)) > 1), min(map(len, texts)))


def _cut(text: str, start: int) -> str:
    """Return a long text cut to a part around its first difference."""
    begin = max(0, start - _SHOWN // 4) if len(text) > _SHOWN else 0
    return f"{'...' if begin else ''}{text[begin : begin + _SHOWN]}{'...' if begin + _SHOWN < len(text) else ''}"
