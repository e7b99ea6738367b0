"""One clock for all ranks.

Processes of one machine read the same clock.  Between machines the collectives themselves tell the difference, as the
messages of NTP do: no rank leaves an all-reduce or a barrier before every rank has entered it.  So each of them bounds
the difference of two clocks from both sides, and many of them narrow it down to about the time that the fastest took.
Nothing has to be sent for it, and a job that was killed can be put together, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrategy.telemetry.tracing.recordings import Recording

#: By how many collectives clocks are compared at most.
_MOST_MEETINGS = 20_000


@dataclass(frozen=True)
class Clock:
    """How the times of one clock become those of the common one.

    Attributes:
        offset: microseconds to add.
        uncertainty: how far the offset may be wrong, in microseconds; negative where no one offset fits all
            collectives: the clocks drifted apart, or one was set.
        meetings: how many collectives told so; 0 where wall clocks had to do.
    """

    offset: float = 0.0
    uncertainty: float = 0.0
    meetings: int = 0


def meetings_of(recordings: Iterable[Recording]) -> list[list[dict[str, Any]]]:
    """Return the collectives that no rank can have left before all had entered, each as it was on all ranks."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for recording in recordings:
        for each in recording.events:
            if "group" in each["args"]:
                found.setdefault((str(each["args"]["group"]), str(each["args"].get("number"))), []).append(each)
    return list(found.values())


def common_clock(recordings: Sequence[Recording]) -> dict[str, Clock]:
    """Return how each clock is read: the common one is that of the first recording."""
    clock_of = {each.rank: each.clock for each in recordings}
    first = recordings[0]
    clocks = {first.clock: Clock()}
    ended = [each for each in meetings_of(recordings) if not any("not_left" in one["args"] for one in each)]
    meetings = [_by_clock(each, clock_of) for each in ended[:: len(ended) // _MOST_MEETINGS + 1]]
    bounds: dict[str, list[tuple[float, float]]] = {"": []}
    while bounds:  # from the first clock to those that have met it, and on from them
        bounds = {}
        for meeting in meetings:
            known = [(clocks[name].offset, *times) for name, times in meeting.items() if name in clocks]
            for name in meeting.keys() - clocks.keys() if known else ():
                entered, left = meeting[name]
                came, went = (max(by + time for by, time, _ in known), min(by + time for by, _, time in known))
                bounds.setdefault(name, []).append((came - left, went - entered))
        for name, each in bounds.items():
            lowest, highest = max(low for low, _ in each), min(high for _, high in each)
            clocks[name] = Clock((lowest + highest) / 2, (highest - lowest) / 2, len(each))
    for recording in recordings:
        if recording.clock not in clocks:
            ahead = [each.header["monotonic_us"] - each.header["wall_us"] for each in (recording, first)]
            clocks[recording.clock] = Clock(ahead[1] - ahead[0])
    return clocks


def _by_clock(meeting: Sequence[dict[str, Any]], clock_of: dict[int, str]) -> dict[str, tuple[float, float]]:
    """Return by clock when the last of its ranks entered a collective, and when the first left it."""
    found: dict[str, tuple[float, float]] = {}
    for each in meeting:
        name, start = clock_of.get(each["pid"], ""), each["ts"]
        entered, left = found.get(name, (start, start + each["dur"]))
        found[name] = max(entered, start), min(left, start + each["dur"])
    return found
