"""A run in a few lines: how far the clocks are known, where the time went, who came late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mpistrategy.objects.shown import ranks_in_words
from mpistrategy.telemetry.tracing.chrome import title
from mpistrategy.telemetry.tracing.recordings import MOST_DAMAGED, Interval, Recording
from mpistrategy.telemetry.tracing.timeline import Timeline

_MOST_PLACES = 3


def report(timeline: Timeline) -> Iterator[str]:
    """Yield the lines."""
    recordings = timeline.recordings
    first = recordings[0].header
    nodes = len({each.header["host"] for each in recordings})
    ranks, count = timeline.ranks, len(timeline.intervals)
    on = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {nodes} node{'s' * (nodes > 1)}"
    yield f"{first['program']}, {on}, {timeline.seconds:.3f} s, {count} events, begun {first['begun']}"
    yield from _what_is_missing(timeline)
    yield from _clocks(timeline)
    yield from _table(timeline)
    yield from _late(timeline)
    yield from _never_left(timeline)


def _never_left(timeline: Timeline) -> Iterator[str]:
    """Yield what each rank was in at the end: its collective, or else its step or span."""
    open_ones = [each for each in timeline.intervals if each.is_open]
    for rank in timeline.ranks:
        mine = [each for each in open_ones if each.rank == rank]
        calls = [each for each in mine if each.kind == "call"]
        for each in calls or mine[-1:]:
            text = title(each).removesuffix(" (not left)")
            number = f"#{each.number} " if each.kind == "call" and each.number else ""
            ago = (timeline.seconds * 1e9 - each.start) / 1e9
            when = f"entered {ago:.3f} s before the end of the trace{'' if calls else ', in no collective'}"
            yield f"rank {rank} never left {number}{text}{_at(each)}, {when}"


def _what_is_missing(timeline: Timeline) -> Iterator[str]:
    recordings = timeline.recordings
    size = max(int(each.header["size"]) for each in recordings)
    absent = sorted(set(range(size)) - set(timeline.ranks))
    if absent:
        yield f"no recording of {ranks_in_words(absent)} of {size}"
    cut = sorted({each.rank for each in recordings if not each.is_whole})
    if cut:
        yield f"not ended in order (killed, or still running): {ranks_in_words(cut)}"
    lost = sum(each.lost for each in recordings)
    if lost:
        yield f"{lost} events were lost: they came faster than they could be written"
    damaged = [each for each in recordings if each.damaged]
    if damaged:
        more = " or more" if any(each.damaged >= MOST_DAMAGED for each in damaged) else ""
        count = sum(each.damaged for each in damaged)
        yield f"{count}{more} lines could not be read, in {damaged[0].path} and the like"
    if timeline.other_files:
        files = f"{timeline.other_files} file{'s' * (timeline.other_files > 1)}"
        yield f"left out: {files} of other runs in the same folder"


def _clocks(timeline: Timeline) -> Iterator[str]:
    by_clock: dict[str, Recording] = {}
    for each in timeline.recordings:
        by_clock.setdefault(each.clock, each)
    reference, *others = by_clock.values()
    for each in others:
        clock = timeline.clocks[each.clock]
        where = f"clock of {each.header['host']} (rank {each.rank})"
        drift = f", drifting by {-clock.drift * 1e6:+.3g} us a second" if clock.drift else ""
        ahead = f"{-clock.offset / 1e9:+.6f} s against {reference.header['host']} (rank {reference.rank})"
        if not clock.meetings:
            yield f"{where}: {ahead} by their wall clocks, which may differ: the ranks have no collective in common"
        elif clock.uncertainty < 0:
            yield f"{where}: {ahead}{drift}; it did not go evenly: intervals may be {_us(-clock.uncertainty)} apart"
        else:
            yield f"{where}: {ahead}{drift}, known to {_us(clock.uncertainty)} from {clock.meetings} collectives"


def _us(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e3:.3g} us"


def _table(timeline: Timeline) -> Iterator[str]:
    yield f"{'rank':>6} {'steps':>8} {'in steps':>12} {'in collectives':>16} {'of it waiting':>15} {'came last':>11}"
    everything = timeline.intervals
    last = Counter(each.rank for each in everything if each.kind == "call" and each.last_rank == each.rank)
    for rank in timeline.ranks:
        mine = [each for each in everything if each.rank == rank]
        steps = [each for each in mine if each.kind == "step"]
        calls = [each for each in mine if each.kind == "call"]
        met = sum(each.last_rank >= 0 for each in calls)
        share = f"{100 * last[rank] / met:.0f} %" if met else "-"
        yield (
            f"{rank:>6} {len(steps):>8} {_sum(steps):>10.3f} s {_sum(calls):>14.3f} s "
            f"{sum(each.waited for each in calls) / 1e9:>13.3f} s {share:>11}"
        )


def _sum(intervals: list[Interval]) -> float:
    return sum(each.end - each.start for each in intervals) / 1e9


def _late(timeline: Timeline) -> Iterator[str]:
    """Yield the places where ranks waited longest, and for whom."""
    waited: Counter[str] = Counter()
    late: dict[str, Counter[int]] = {}
    for each in timeline.intervals:
        if each.kind == "call" and each.last_rank >= 0:
            place = f"{each.name}{_at(each)}"
            waited[place] += round(each.waited)
            if each.rank == each.last_rank:
                late.setdefault(place, Counter())[each.rank] += 1
    for place, nanoseconds in waited.most_common(_MOST_PLACES):
        if nanoseconds and place in late:
            rank, times = late[place].most_common(1)[0]
            calls = sum(late[place].values())
            yield f"waited {nanoseconds / 1e9:.3f} s in {place}: rank {rank} came last to {times} of {calls}"


def _at(each: Interval) -> str:
    place = each.what.get("place", "")
    return f" at {place}" if place else ""
