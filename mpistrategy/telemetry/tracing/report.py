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
    recordings, by_rank = timeline.recordings, timeline.by_rank()
    first, ranks, nodes = recordings[0].header, len(by_rank), len({file.header["host"] for file in recordings})
    on = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    yield f"{first['program']}, {on}, {timeline.seconds:.3f} s, {len(timeline.events)} events, begun {first['begun']}"
    if absent := set(range(first["size"])) - by_rank.keys():
        yield f"no recording of {ranks_in_words(absent)} of {first['size']}"
    if cut := {recording.header["rank"] for recording in recordings if not recording.is_whole}:
        yield f"not ended in order (killed, or still running): {ranks_in_words(cut)}"
    yield from _clocks(timeline)
    yield f"{'rank':>6} {'steps':>8} {'in steps':>12} {'in collectives':>16} {'of it waiting':>15} {'came last':>11}"
    for rank, events in by_rank.items():
        yield _row(rank, events)
    yield from _late(timeline)


def _clocks(timeline: Timeline) -> Iterator[str]:
    reference, *headers = [recording.header for recording in timeline.recordings]
    first_of = {header["clock"]: header for header in reversed(headers) if header["clock"] != reference["clock"]}
    for name, header in sorted(first_of.items(), key=lambda item: int(item[1]["rank"])):
        clock = timeline.clocks[name]
        ahead = f"{-clock.offset / 1e6:+.6f} s against {reference['host']} (rank {reference['rank']})"
        accuracy = f"known to {clock.uncertainty:.3g} us from {clock.meetings} collectives"
        if not clock.meetings:
            accuracy = "by their wall clocks, which may differ: the ranks have no collective in common"
        elif clock.uncertainty < 0:
            accuracy = f"which did not stay: times may be {-clock.uncertainty:.3g} us apart"
        yield f"clock of {header['host']} (rank {header['rank']}): {ahead}, {accuracy}"


def _row(rank: int, events: list[dict[str, Any]]) -> str:
    """Return how a rank spent its time."""
    calls = [event for event in events if event["cat"] == "collective"]
    steps = [float(event["dur"]) for event in events if event["cat"] == "step"]
    met = [call["args"]["last_rank"] == rank for call in calls if "last_rank" in call["args"]]
    share = f"{100 * sum(met) / len(met):.0f} %" if met else "-"
    waited = sum(call["args"].get("waited_us", 0) for call in calls) / 1e6
    seconds = sum(float(call["dur"]) for call in calls) / 1e6
    return f"{rank:>6} {len(steps):>8} {sum(steps) / 1e6:>10.3f} s {seconds:>14.3f} s {waited:>13.3f} s {share:>11}"


def _late(timeline: Timeline) -> Iterator[str]:
    """Yield the places where ranks waited longest, and for whom."""
    waited, late = Counter[str](), dict[str, Counter[int]]()
    for event in timeline.events:
        if "last_rank" in (args := event["args"]):
            line = f" at {args['line']}" if "line" in args else ""
            place = f"{args.get('call')}{line}"
            waited[place] += round(args["waited_us"])
            late.setdefault(place, Counter())[event["pid"]] += event["pid"] == args["last_rank"]
    for place, microseconds in waited.most_common(_MOST_PLACES):
        rank, times = late[place].most_common(1)[0]
        yield f"waited {microseconds / 1e6:.3f} s in {place}: rank {rank} came last to {times} of {late[place].total()}"
