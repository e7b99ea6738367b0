"""One clock for all ranks.

Processes of one machine read the same clock.  Between machines the collectives themselves tell the difference, as the
messages of NTP do: no rank leaves an all-reduce or a barrier before every rank has entered it.  So each of them bounds
the difference of two clocks from both sides, many of them narrow it down to about the time that the fastest took, and
those of a long run show how fast the clocks drift apart.  Nothing has to be sent for it, and a job that was killed can
be put together, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.telemetry.tracing.recordings import Interval, Recording

#: The most that clocks drift apart: 1 ms a second.
_GREATEST_DRIFT = 1e-3
_ROUNDS = 60
#: How often clocks are fitted to each other at most, and by how many collectives.
_REFINEMENTS, _MOST_MEETINGS = 20, 20_000
#: A drift is believed in when without it the bounds leave so much less room.
_WORTH = 0.75
#: What some rank may leave before others have come, where calls are compared now and then only.
_LOOSE = ("broadcast", "broadcast slices", "gather", "write")


@dataclass(frozen=True)
class Clock:
    """How the times of one clock become those of the common one: ``t + offset + drift * (t - origin)``.

    Attributes:
        offset: nanoseconds, at `origin`.
        drift: nanoseconds per nanosecond.
        origin: a time of this clock.
        uncertainty: how far the offset may be wrong, in nanoseconds; negative where no straight line fits.
        meetings: how many collectives told so; 0 where wall clocks had to do.
    """

    offset: float = 0.0
    drift: float = 0.0
    origin: float = 0.0
    uncertainty: float = 0.0
    meetings: int = 0

    def common(self, time: Any) -> Any:
        """Return a time of this clock, or an array of them, as one of the common clock."""
        return time + self.offset + self.drift * (time - self.origin)


def is_meeting(interval: Interval) -> bool:
    """Return whether no rank can have left this collective before all had entered it."""
    verb = interval.what.get("verb", "")
    if verb.startswith("reduce"):
        return bool(interval.what.get("destination") == "every rank")
    return bool(verb) and verb not in _LOOSE


def meetings_of(recordings: Iterable[Recording]) -> dict[Any, list[Interval]]:
    """Return the same collective of all ranks, by group and number."""
    found: dict[Any, list[Interval]] = {}
    for recording in recordings:
        for each in recording.intervals:
            if each.group:
                found.setdefault((each.group, each.number), []).append(each)
    return found


def common_clock(recordings: Sequence[Recording]) -> dict[str, Clock]:
    """Return how each clock is read: the common one is that of the first recording."""
    clock_of = {each.rank: each.clock for each in recordings}
    names = list(dict.fromkeys(each.clock for each in recordings))
    clocks = {names[0]: Clock()}
    if len(names) == 1:
        return clocks
    entered, left = _times(recordings, clock_of, names)
    is_new = True
    while is_new:  # from the first clock to those that have met it, and on from them
        is_new = False
        for column, name in enumerate(names):
            if name not in clocks:
                rows = _bounds(column, entered, left, [clocks.get(each) for each in names])
                if rows.size:
                    clocks[name], is_new = fit(rows), True
    for _ in range(_REFINEMENTS):  # so far each fits those that were known before it
        met = [name for name in clocks if clocks[name].meetings]
        for name in met:
            clocks[name] = fit(_bounds(names.index(name), entered, left, [clocks.get(each) for each in names]))
        if all(clocks[name].uncertainty > 0 for name in met):
            break
    first = next(each for each in recordings if each.clock == names[0]).header
    for recording in recordings:
        if recording.clock not in clocks:
            mine = recording.header
            ahead = (mine["monotonic_ns"] - mine["wall_ns"]) - (first["monotonic_ns"] - first["wall_ns"])
            clocks[recording.clock] = Clock(offset=-float(ahead))
    return clocks


def _times(recordings: Sequence[Recording], clock_of: Mapping[int, str], names: Sequence[str]) -> tuple[Array, Array]:
    """Return when the last rank entered and the first one left: a row for each meeting of clocks, a column for each.

    NaN stands where no rank of a clock took part.
    """
    meetings = [
        each for each in meetings_of(recordings).values() if _tells(each) and len({clock_of[e.rank] for e in each}) > 1
    ]
    meetings = meetings[:: len(meetings) // _MOST_MEETINGS + 1]
    entered = np.full((len(meetings), len(names)), np.nan)
    left = np.full_like(entered, np.nan)
    for row, meeting in enumerate(meetings):
        for each in meeting:
            column = names.index(clock_of[each.rank])
            entered[row, column] = np.fmax(entered[row, column], each.start)
            left[row, column] = np.fmin(left[row, column], each.end)
    return entered, left


def _tells(meeting: Sequence[Interval]) -> bool:
    is_one = len({each.name for each in meeting}) == 1
    return is_one and is_meeting(meeting[0]) and not any(each.is_open for each in meeting)


def _bounds(column: int, entered: Array, left: Array, clocks: Sequence[Clock | None]) -> Array:
    """Return a row for each meeting of one clock with others that are known.

    When it was, and between which values the difference lies: this clock was read before the others left, and after
    they entered.
    """
    others = [(number, clock) for number, clock in enumerate(clocks) if clock is not None and number != column]
    came = np.stack([clock.common(entered[:, number]) for number, clock in others])
    went = np.stack([clock.common(left[:, number]) for number, clock in others])
    lowest = np.fmax.reduce(came) - left[:, column]
    highest = np.fmin.reduce(went) - entered[:, column]
    rows = np.stack([entered[:, column], lowest, highest], axis=1)
    return np.asarray(rows[np.isfinite(rows).all(axis=1)])


def fit(bounds: Array) -> Clock:
    """Return the straight line that keeps farthest away from all bounds: rows of time, lowest, highest."""
    times, lowest, highest = bounds.T
    origin = float(times.mean())
    base = float(lowest.mean())  # smaller numbers are added up more exactly
    times, lowest, highest = times - origin, lowest - base, highest - base

    def room(drift: float) -> tuple[float, float]:
        """Return the distance to the nearest bound of the best line with this drift, and its offset."""
        least, most = float(np.max(lowest - drift * times)), float(np.min(highest - drift * times))
        return (most - least) / 2, (most + least) / 2

    drift = 0.0
    if len(times) > 2:
        left, right = -_GREATEST_DRIFT, _GREATEST_DRIFT
        for _ in range(_ROUNDS):  # the room is a concave function of the drift
            third = (right - left) / 3
            if room(left + third)[0] < room(right - third)[0]:
                left += third
            else:
                right -= third
        best = (left + right) / 2
        enough = _WORTH * room(best)[0]
        if room(0.0)[0] < enough or room(0.0)[0] < 0:
            near, far = 0.0, best  # the least drift that is as good, nearly
            for _ in range(_ROUNDS):
                middle = (near + far) / 2
                near, far = (near, middle) if room(middle)[0] >= enough > 0 else (middle, far)
            drift = far
    uncertainty, offset = room(drift)
    return Clock(offset + base, drift, origin, uncertainty, len(times))
