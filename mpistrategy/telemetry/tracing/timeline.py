"""What all ranks did, on one clock: the recordings of a run put together, and written as one file for viewers.

Processes of one machine read the same clock.  Between machines the collectives themselves tell the difference, as the
messages of NTP do: no rank leaves an all-reduce or a barrier before every rank has entered it.  So each of them bounds
the difference of two clocks from both sides, and many of them narrow it down to about the time that the fastest took.
Nothing has to be sent for it, and a job that was killed can be put together, too.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrategy import own_files
from mpistrategy.errors import TraceError
from mpistrategy.telemetry.tracing.recordings import Recording, newest_run

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


@dataclass
class Timeline:
    """A run.

    Attributes:
        recordings: of its ranks, with times in microseconds since the beginning of the run.
        clocks: how the clocks were read, by their names.
        seconds: how long it was recorded.
        other_files: how many recordings of other runs are in the folder.
    """

    recordings: list[Recording]
    clocks: dict[str, Clock]
    seconds: float
    other_files: int = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        """Everything, by beginning; what lasts longer first."""
        everything = [each for recording in self.recordings for each in recording.events]
        return sorted(everything, key=lambda each: (each["ts"], -each["dur"]))

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order; those of which there is nothing but a header, too."""
        return sorted({each.header["rank"] for each in self.recordings} | {each["pid"] for each in self.events})

    def by_rank(self) -> dict[int, list[dict[str, Any]]]:
        """Return the events of each rank, in order."""
        found: dict[int, list[dict[str, Any]]] = {rank: [] for rank in self.ranks}
        for each in self.events:
            found[each["pid"]].append(each)
        return found

    def between(self, start: float, end: float) -> Timeline:
        """Return the part from one second to another."""
        for each in self.recordings:
            each.events = [e for e in each.events if e["ts"] + e["dur"] >= start * 1e6 and e["ts"] <= end * 1e6]
        return self

    def write(self, path: str) -> None:
        """Write a file for viewers, compressed if its name ends in .gz, as a whole.

        Who may read it: as of checkpoints (`mpistrategy.own_files.new_file`).

        Raises:
            TraceError: when it cannot be written.
        """
        about = {name: self.recordings[0].header[name] for name in ("program", "begun")}
        events = [*(each for recording in self.recordings for each in recording.names), *self.events]
        try:
            with own_files.whole_file(path) as whole:
                packed: Any = gzip.GzipFile("", "wb", fileobj=whole) if path.endswith(".gz") else whole
                with io.TextIOWrapper(packed, encoding="utf-8") as file:
                    file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n')
                    file.write(",\n".join(map(json.dumps, events)) + "\n]}\n")
        except OSError as error:
            found = f"{path}: {error.strerror or error}"
            raise TraceError.at("mpistrategy trace", found=found, expected="a file that can be written") from error


def timeline_of(folder: str) -> Timeline:
    """Return the newest run in a folder, on one clock.

    Raises:
        TraceError: where there is none that can be read.
    """
    recordings, others = newest_run(folder)
    clocks = common_clock(recordings)
    zero = min((e["ts"] + clocks[each.header["clock"]].offset for each in recordings for e in each.events), default=0.0)
    for recording in recordings:
        for each in recording.events:
            each["ts"] += clocks[recording.header["clock"]].offset - zero
    _find_out_who_was_late(recordings)
    last = max((e["ts"] + e["dur"] for each in recordings for e in each.events), default=0.0)
    return Timeline(recordings, clocks, last / 1e6, others)


def _find_out_who_was_late(recordings: Sequence[Recording]) -> None:
    for meeting in meetings_of(recordings):
        last = max(meeting, key=lambda each: float(each["ts"]))
        for each in meeting if len(meeting) > 1 else ():
            waited = max(0.0, min(last["ts"] - each["ts"], each["dur"]))
            each["args"] |= {"waited_us": waited, "last_rank": last["pid"]}


def meetings_of(recordings: Iterable[Recording]) -> list[list[dict[str, Any]]]:
    """Return the collectives that no rank can have left before all had entered, each as it was on all ranks."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for recording in recordings:
        for each in recording.events:
            if "group" in each["args"]:
                found.setdefault((each["args"]["group"], each["args"]["number"]), []).append(each)
    return list(found.values())


def common_clock(recordings: Sequence[Recording]) -> dict[str, Clock]:
    """Return how each clock is read: the common one is that of the first recording."""
    clock_of = {each.header["rank"]: each.header["clock"] for each in recordings}
    first = recordings[0].header
    clocks = {first["clock"]: Clock()}
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
    for header in (each.header for each in recordings):
        ahead = [each["monotonic_us"] - each["wall_us"] for each in (header, first)]
        clocks.setdefault(header["clock"], Clock(ahead[1] - ahead[0]))
    return clocks


def _by_clock(meeting: Sequence[dict[str, Any]], clock_of: dict[int, str]) -> dict[str, tuple[float, float]]:
    """Return by clock when the last of its ranks entered a collective, and when the first left it."""
    found: dict[str, tuple[float, float]] = {}
    for each in meeting:
        name, start = clock_of.get(each["pid"], ""), each["ts"]
        entered, left = found.get(name, (start, start + each["dur"]))
        found[name] = max(entered, start), min(left, start + each["dur"])
    return found
