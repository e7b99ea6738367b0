"""Helpers of the tests of traces: the rules of the viewers' format, and recordings with other clocks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mpistrategy.telemetry.tracing.timeline import Timeline, meetings_of

NAMES = {"process_name": "name"}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, after a look at every rule of the Trace Event Format that a viewer relies on."""
    told = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert told["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = told["traceEvents"]
    named = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        assert is_time(event["ts"])
        if event["ph"] == "M":
            assert NAMES[event["name"]] in event["args"]
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert is_time(event["dur"])
            assert event["cat"] in ("collective", "step", "span")
    for event in events:
        assert ("process_name", event["pid"], 0) in named
    _check_nesting([event for event in events if event["ph"] == "X"])
    return events


def is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """In one thread an event is inside another one or beside it: viewers draw them as stacks."""
    tracks: dict[tuple[int, int], list[float]] = {}
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    for event in events:
        ends = tracks.setdefault((event["pid"], event["tid"]), [])
        end = event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 0.002:  # times are rounded to a thousandth
            ends.pop()
        assert not ends or end <= ends[-1] + 0.002, event
        ends.append(end)


def overlapping(timeline: Timeline, ranks: int, apart: float = 0.001) -> int:
    """Return how many collectives all ranks met in, after a look whether they overlap on all of them.

    Args:
        timeline: the run.
        ranks: how many ranks there are.
        apart: by how many microseconds they may miss each other.
    """
    count = 0
    for meeting in meetings_of(timeline.recordings):
        assert len({tuple(each["args"].get(name) for name in ("call", "op", "line")) for each in meeting}) == 1
        assert max(each["ts"] for each in meeting) <= min(each["ts"] + each["dur"] for each in meeting) + apart
        count += len(meeting) == ranks
    return count
