"""A run in a few lines: how far the clocks are known, where the time went, who came late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from mpistrategy.objects.shown import ranks_in_words
from mpistrategy.telemetry.tracing.timeline import Timeline

_MOST_PLACES = 3


def report(timeline: Timeline) -> Iterator[str]:
    """Yield the lines."""
    first = timeline.recordings[0].header
    nodes, ranks = len({each.header["host"] for each in timeline.recordings}), len(timeline.ranks)
    on = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    yield f"{first['program']}, {on}, {timeline.seconds:.3f} s, {len(timeline.events)} events, begun {first['begun']}"
    yield from _what_is_missing(timeline)
    yield from _clocks(timeline)
    yield from _table(timeline)
    yield from _late(timeline)
    yield from _never_left(timeline)


def _what_is_missing(timeline: Timeline) -> Iterator[str]:
    recordings, others = timeline.recordings, timeline.other_files
    size = max(each.header["size"] for each in recordings)
    if absent := set(range(size)) - set(timeline.ranks):
        yield f"no recording of {ranks_in_words(absent)} of {size}"
    if cut := {each.header["rank"] for each in recordings if not each.is_whole}:
        yield f"not ended in order (killed, or still running): {ranks_in_words(cut)}"
    if lost := sum(each.lost for each in recordings):
        yield f"{lost} events were lost: they came faster than they could be written"
    if damaged := [each for each in recordings if each.damaged]:
        count = sum(each.damaged for each in damaged)
        yield f"{count} lines could not be read, in {damaged[0].path} and the like"
    if others:
        yield f"left out: {others} file{'s' * (others > 1)} of other runs in the same folder"


def _clocks(timeline: Timeline) -> Iterator[str]:
    reference, *headers = [each.header for each in timeline.recordings]
    first_of = {each["clock"]: each for each in reversed(headers) if each["clock"] != reference["clock"]}
    for each in sorted(first_of.values(), key=lambda each: int(each["rank"])):
        clock = timeline.clocks[each["clock"]]
        ahead = f"{-clock.offset / 1e6:+.6f} s against {reference['host']} (rank {reference['rank']})"
        told = f"known to {clock.uncertainty:.3g} us from {clock.meetings} collectives"
        if not clock.meetings:
            told = "by their wall clocks, which may differ: the ranks have no collective in common"
        elif clock.uncertainty < 0:
            told = f"which did not stay: times may be {-clock.uncertainty:.3g} us apart"
        yield f"clock of {each['host']} (rank {each['rank']}): {ahead}, {told}"


def _table(timeline: Timeline) -> Iterator[str]:
    yield f"{'rank':>6} {'steps':>8} {'in steps':>12} {'in collectives':>16} {'of it waiting':>15} {'came last':>11}"
    for rank, mine in timeline.by_rank().items():
        steps, calls = ([each for each in mine if each["cat"] == kind] for kind in ("step", "collective"))
        met = [each["args"]["last_rank"] == rank for each in calls if "last_rank" in each["args"]]
        share = f"{100 * sum(met) / len(met):.0f} %" if met else "-"
        waited = sum(each["args"].get("waited_us", 0) for each in calls) / 1e6
        seconds = f"{_seconds(steps):>10.3f} s {_seconds(calls):>14.3f} s {waited:>13.3f} s"
        yield f"{rank:>6} {len(steps):>8} {seconds} {share:>11}"


def _seconds(events: list[dict[str, Any]]) -> float:
    return sum(float(each["dur"]) for each in events) / 1e6


def _late(timeline: Timeline) -> Iterator[str]:
    """Yield the places where ranks waited longest, and for whom."""
    waited, late = Counter[str](), dict[str, Counter[int]]()
    for each in timeline.events:
        if "last_rank" in (args := each["args"]):
            place = f"{args.get('call')}{_at(each)}"
            waited[place] += round(args["waited_us"])
            late.setdefault(place, Counter())[each["pid"]] += each["pid"] == args["last_rank"]
    for place, microseconds in waited.most_common(_MOST_PLACES):
        rank, times = late[place].most_common(1)[0]
        yield f"waited {microseconds / 1e6:.3f} s in {place}: rank {rank} came last to {times} of {late[place].total()}"


def _never_left(timeline: Timeline) -> Iterator[str]:
    """Yield what each rank was in at the end: its collective, or else its step or span."""
    for rank, events in timeline.by_rank().items():
        mine = [each for each in events if "not_left" in each["args"]]
        calls = [each for each in mine if each["cat"] == "collective"]
        for each in calls or mine[-1:]:
            number = f"#{each['args'].get('number')} " if calls else ""
            text = f"{number}{each['name'].removesuffix(' (not left)')}{_at(each)}"
            ago = f"entered {timeline.seconds - each['ts'] / 1e6:.3f} s before the end of the trace"
            yield f"rank {rank} never left {text}, {ago}{'' if calls else ', in no collective'}"


def _at(event: dict[str, Any]) -> str:
    return f" at {event['args']['line']}" if "line" in event["args"] else ""
