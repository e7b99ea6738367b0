"""Merges the recordings of all ranks of a run on one clock, and writes one file for viewers.

Processes of one machine read the same clock.  Between machines the collectives themselves tell the difference, as the
messages of NTP do: no rank leaves an all-reduce or a barrier before every rank has entered it.  So every collective
bounds the difference of two clocks from both sides.  Many collectives narrow the difference down to about the duration
of the fastest.  This takes no messages, so that the recordings of a killed job can be merged, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrategy import own_files
from mpistrategy.errors import TraceError
from mpistrategy.telemetry.tracing.recorder import PREFIX, SUFFIX, VERSION

_WHERE = "mpistrategy trace"
#: Ranks of one run begin to record within so much time.
_TOGETHER_US = 600e6
#: Far more than a rank writes into a file.
_MOST_BYTES = 2**29
#: What every event has.
_FIELDS = {"name", "ph", "ts", "pid", "tid", "args"}

Event = dict[str, Any]


@dataclass
class Recording:
    """The recording of a rank: one file.

    Attributes:
        header: what its first event says.
        events: what happened, by end.
        is_whole: whether the recording was ended in order.
    """

    header: Event
    events: list[Event]
    is_whole: bool = False

    @property
    def groups(self) -> set[str]:
        """The groups of ranks whose collectives were recorded."""
        return {event["args"]["group"] for event in self.events if "group" in event["args"]}


@dataclass(frozen=True)
class Clock:
    """The correction from the times of a clock to the clock of the first recording.

    Attributes:
        offset: microseconds to add.
        uncertainty: how far the offset may be wrong, in microseconds; negative where no single offset fits all
            collectives: the clocks drifted apart, or a clock was set.
        meetings: how many collectives bound the offset; 0 where the wall clocks give it.
    """

    offset: float = 0.0
    uncertainty: float = 0.0
    meetings: int = 0


@dataclass
class Timeline:
    """A run.

    Attributes:
        recordings: of its ranks, with times in microseconds since the beginning of the run.
        clocks: how the clocks were read, by their names.
    """

    recordings: list[Recording]
    clocks: dict[str, Clock]

    def __post_init__(self) -> None:
        everything = [event for recording in self.recordings for event in recording.events]
        #: All events by start; of two with the same start, the longer first.
        self.events: list[Event] = sorted(everything, key=lambda event: (event["ts"], -event["dur"]))
        #: The length of the recording.
        self.seconds: float = max((event["ts"] + event["dur"] for event in everything), default=0.0) / 1e6

    def by_rank(self) -> dict[int, list[Event]]:
        """Return the events of each rank, in order; a rank that recorded nothing has an empty list."""
        events_of: dict[int, list[Event]] = {recording.header["rank"]: [] for recording in self.recordings}
        for event in self.events:
            events_of.setdefault(event["pid"], []).append(event)
        return dict(sorted(events_of.items()))

    def write(self, path: str) -> None:
        """Write a file for viewers, as a whole.

        Who may read it: as of checkpoints (`mpistrategy.own_files.new_file`).

        Raises:
            OSError: when it cannot be written.
        """
        about_rank = {"name": "process_name", "ph": "M", "ts": 0, "tid": 0}
        rank_names = [about_rank | {"pid": rank, "args": {"name": f"rank {rank}"}} for rank in self.by_rank()]
        header = self.recordings[0].header
        text = json.dumps({"displayTimeUnit": "ms", "otherData": header, "traceEvents": rank_names + self.events})
        with own_files.whole_file(path) as file:
            file.write(text.encode())


def timeline_of(folder: str) -> Timeline:
    """Return the newest run in a folder, on one clock.

    Raises:
        TraceError: where the folder has no run that can be read.
    """
    recordings = _newest_run(folder)
    clocks = common_clock(recordings)
    zero = min((e["ts"] + clocks[file.header["clock"]].offset for file in recordings for e in file.events), default=0.0)
    for recording in recordings:
        for event in recording.events:
            event["ts"] += clocks[recording.header["clock"]].offset - zero
    for meeting in meetings_of(recordings):
        last = max(meeting, key=lambda event: float(event["ts"]))
        for event in meeting if len(meeting) > 1 else ():
            waited = max(0.0, min(last["ts"] - event["ts"], event["dur"]))
            event["args"] |= {"waited_us": waited, "last_rank": last["pid"]}
    return Timeline(recordings, clocks)


def meetings_of(recordings: Iterable[Recording]) -> list[list[Event]]:
    """Return the events of all ranks for each collective that no rank leaves before all have entered."""
    meetings: dict[tuple[str, int], list[Event]] = {}
    for recording in recordings:
        for event in recording.events:
            if "group" in event["args"]:
                meetings.setdefault((event["args"]["group"], event["args"]["number"]), []).append(event)
    return list(meetings.values())


def common_clock(recordings: Sequence[Recording]) -> dict[str, Clock]:
    """Return the correction of each clock, from the collectives that its ranks share with ranks of the first clock."""
    clock_of, first = {file.header["rank"]: file.header["clock"] for file in recordings}, recordings[0].header
    bounds: dict[str, list[tuple[float, float]]] = {}
    for meeting in meetings_of(recordings):
        windows: dict[str, tuple[float, float]] = {}
        for event in meeting:
            name, start, end = clock_of[event["pid"]], event["ts"], event["ts"] + event["dur"]
            last_in, first_out = windows.get(name, (start, end))
            windows[name] = max(last_in, start), min(first_out, end)  # the last rank's entry, the first rank's exit
        reference_in, reference_out = windows.pop(first["clock"], (0.0, 0.0))
        for name, (last_in, first_out) in windows.items() if reference_out else ():
            bounds.setdefault(name, []).append((reference_in - first_out, reference_out - last_in))
    clocks = {first["clock"]: Clock()}
    for recording in recordings:
        header = recording.header
        clocks.setdefault(header["clock"], Clock(header["zero_us"] - first["zero_us"]))
    for name, pairs in bounds.items():
        lowest, highest = max(low for low, _ in pairs), min(high for _, high in pairs)
        clocks[name] = Clock((lowest + highest) / 2, (highest - lowest) / 2, len(pairs))
    return clocks


# ------------------------------------------------------------------------------------------- reading recordings


def _newest_run(folder: str) -> list[Recording]:
    """Return the recordings of the newest run in a folder, by rank."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(PREFIX) and name.endswith(SUFFIX))
        recordings = [recording for name in names if (recording := read(os.path.join(folder, name))) is not None]
    except OSError as error:
        message = f"{error.filename or folder}: {error.strerror}"
        raise refusal(message, "a folder with a trace in it, of files of yours") from error
    if not recordings:
        fix = f"Make some: MPISTRATEGY_TRACE={folder} mpiexec -n 4 python program.py"
        raise refusal(f"no recordings in {folder}", f"files {PREFIX}*{SUFFIX}", fix)
    recordings.sort(key=lambda file: (bool(file.groups), file.header["wall_us"]))
    newest = recordings[-1]  # one with collectives, if any: a program that a rank started may record, too
    candidates = [
        file
        for file in recordings
        if file.header["size"] == newest.header["size"]
        and newest.header["wall_us"] - file.header["wall_us"] < _TOGETHER_US
        and (file.groups & newest.groups or not (file.groups or newest.groups))
    ]
    process = {file.header["rank"]: file.header["process"] for file in candidates}  # of each rank the newest
    run = [file for file in candidates if process[file.header["rank"]] == file.header["process"]]
    return sorted(run, key=lambda file: (file.header["rank"], file.header["wall_us"]))


def read(path: str) -> Recording | None:
    """Return the recording in a file, as far as it can be read; None for a file that is not a recording.

    Raises:
        OSError: for a file that cannot be read; where everybody can write, for somebody else's.
        TraceError: for a recording of another version.
    """
    text = own_files.read(path, _MOST_BYTES, only_own=False).decode(errors="replace")
    lines = [line.strip().rstrip(",") for line in text.split("\n")]
    events = [event for event in map(_event_in, lines) if event is not None]
    if not events or events[0]["name"] != "mpistrategy":
        return None
    header = events[0]["args"]
    if header["version"] != VERSION:
        raise refusal(f"{path} of version {header['version']} of the format", f"version {VERSION}")
    return Recording(header, [event for event in events if event["ph"] == "X"], events[-1]["name"] == "end")


def _event_in(line: str) -> Event | None:
    """Return an event; None for a line that was cut off, or damaged."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and event.keys() >= _FIELDS else None


def refusal(found: str, expected: str, fix: str = "") -> TraceError:
    """Return the error of `mpistrategy trace`."""
    return TraceError.at(_WHERE, found=found, expected=expected, fix=fix)
