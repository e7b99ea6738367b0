"""What all ranks did, on one clock: the recordings of a run put together, and written as one file for viewers.

Processes of one machine read the same clock.  Between machines the collectives themselves tell the difference, as the
messages of NTP do: no rank leaves an all-reduce or a barrier before every rank has entered it.  So each of them bounds
the difference of two clocks from both sides, and many of them narrow it down to about the time that the fastest took.
Nothing has to be sent for it, and a job that was killed can be put together, too.
"""

from __future__ import annotations

import errno
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
    """One file.

    Attributes:
        path: where it is.
        header: what its first event says.
        events: what happened, by beginning.
        damaged: how many lines could not be read.
        is_whole: whether the recording was ended in order.
    """

    path: str
    header: Event
    events: list[Event]
    damaged: int = 0
    is_whole: bool = False

    @property
    def groups(self) -> set[str]:
        """Those whose ranks met in it."""
        return {each["args"]["group"] for each in self.events if "group" in each["args"]}


@dataclass(frozen=True)
class Clock:
    """How the times of one clock become those of the first recording's.

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
        other_files: how many recordings of other runs are in the folder.
    """

    recordings: list[Recording]
    clocks: dict[str, Clock]
    other_files: int = 0

    def __post_init__(self) -> None:
        everything = [each for recording in self.recordings for each in recording.events]
        #: Everything, by beginning; what lasts longer first.
        self.events: list[Event] = sorted(everything, key=lambda each: (each["ts"], -each["dur"]))
        #: How long it was recorded.
        self.seconds: float = max((each["ts"] + each["dur"] for each in everything), default=0.0) / 1e6

    def by_rank(self) -> dict[int, list[Event]]:
        """Return the events of each rank, in order; of those with nothing but a header, too."""
        found: dict[int, list[Event]] = {each.header["rank"]: [] for each in self.recordings}
        for each in self.events:
            found.setdefault(each["pid"], []).append(each)
        return dict(sorted(found.items()))

    def write(self, path: str) -> None:
        """Write a file for viewers, as a whole.

        Who may read it: as of checkpoints (`mpistrategy.own_files.new_file`).

        Raises:
            TraceError: when it cannot be written.
        """
        about = {name: self.recordings[0].header[name] for name in ("program", "begun")}
        about_rank = {"name": "process_name", "ph": "M", "ts": 0, "tid": 0}
        named = [about_rank | {"pid": rank, "args": {"name": f"rank {rank}"}} for rank in self.by_rank()]
        text = json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*named, *self.events]})
        try:
            with own_files.whole_file(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise _refusal(f"{path}: {error.strerror or error}", "a file that can be written") from error


def timeline_of(folder: str) -> Timeline:
    """Return the newest run in a folder, on one clock.

    Raises:
        TraceError: where there is none that can be read.
    """
    recordings, others = _newest_run(folder)
    clocks = common_clock(recordings)
    zero = min((e["ts"] + clocks[each.header["clock"]].offset for each in recordings for e in each.events), default=0.0)
    for recording in recordings:
        for each in recording.events:
            each["ts"] += clocks[recording.header["clock"]].offset - zero
    for meeting in meetings_of(recordings):
        last = max(meeting, key=lambda each: float(each["ts"]))
        for each in meeting if len(meeting) > 1 else ():
            waited = max(0.0, min(last["ts"] - each["ts"], each["dur"]))
            each["args"] |= {"waited_us": waited, "last_rank": last["pid"]}
    return Timeline(recordings, clocks, others)


def meetings_of(recordings: Iterable[Recording]) -> list[list[Event]]:
    """Return the collectives that no rank can have left before all had entered, each as it was on all ranks."""
    found: dict[tuple[str, int], list[Event]] = {}
    for recording in recordings:
        for each in recording.events:
            if "group" in each["args"]:
                found.setdefault((each["args"]["group"], each["args"]["number"]), []).append(each)
    return list(found.values())


def common_clock(recordings: Sequence[Recording]) -> dict[str, Clock]:
    """Return how each clock is read: by what its ranks met in with ranks of the first clock."""
    clock_of, first = {each.header["rank"]: each.header["clock"] for each in recordings}, recordings[0].header
    bounds: dict[str, list[tuple[float, float]]] = {}
    for meeting in meetings_of(recordings):
        seen: dict[str, tuple[float, float]] = {}
        for each in meeting:
            name, start, end = clock_of[each["pid"]], each["ts"], each["ts"] + each["dur"]
            entered, left = seen.get(name, (start, end))
            seen[name] = max(entered, start), min(left, end)  # when the last of its ranks came, and the first went
        came, went = seen.pop(first["clock"], (0.0, 0.0))
        for name, (entered, left) in seen.items() if went else ():
            bounds.setdefault(name, []).append((came - left, went - entered))
    clocks = {first["clock"]: Clock()}
    for header in (each.header for each in recordings):
        ahead = [each["monotonic_us"] - each["wall_us"] for each in (header, first)]
        clocks.setdefault(header["clock"], Clock(ahead[1] - ahead[0]))
    for name, pairs in bounds.items():
        lowest, highest = max(low for low, _ in pairs), min(high for _, high in pairs)
        clocks[name] = Clock((lowest + highest) / 2, (highest - lowest) / 2, len(pairs))
    return clocks


# ------------------------------------------------------------------------------------------- reading recordings


def _newest_run(folder: str) -> tuple[list[Recording], int]:
    """Return the recordings of the newest run in a folder, by rank, and how many others there are."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(PREFIX) and name.endswith(SUFFIX))
        found = [recording for name in names if (recording := read(os.path.join(folder, name))) is not None]
    except OSError as error:
        told = f"{error.filename or folder}: {error.strerror}"
        raise _refusal(told, "a folder with a trace in it, of files of yours") from error
    if not found:
        fix = f"Make some: MPISTRATEGY_TRACE={folder} mpiexec -n 4 python program.py"
        raise _refusal(f"no recordings in {folder}", f"files {PREFIX}*{SUFFIX}", fix)
    found.sort(key=lambda each: (bool(each.groups), each.header["wall_us"]))
    newest = found[-1]  # rather one that met others: a program that a rank has started may have recorded, too
    near = [
        each
        for each in found
        if each.header["size"] == newest.header["size"]
        and newest.header["wall_us"] - each.header["wall_us"] < _TOGETHER_US
        and (each.groups & newest.groups or not (each.groups or newest.groups))
    ]
    process = {each.header["rank"]: each.header["process"] for each in near}  # of each rank the newest
    run = [each for each in near if process[each.header["rank"]] == each.header["process"]]
    return sorted(run, key=lambda each: (each.header["rank"], each.header["wall_us"])), len(found) - len(run)


def read(path: str) -> Recording | None:
    """Return what is in a file, as far as it goes; None for a file that is not a recording.

    Raises:
        OSError: for a file that cannot be read; where everybody can write, for somebody else's.
        TraceError: for one of another version.
    """
    with os.fdopen(own_files.open_trusted(path), encoding="utf-8", errors="replace") as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        lines = [line.strip().rstrip(",") for line in file]
    events = [_event_in(line) for line in lines if line not in ("", "[", "]")]
    if not events or events[0] is None or events[0]["name"] != "mpistrategy":
        return None
    header = events[0]["args"]
    if header["version"] != VERSION:
        raise _refusal(f"{path} of version {header['version']} of the format", f"version {VERSION}")
    known = [each for each in events if each is not None]
    happened = sorted((each for each in known if each["ph"] == "X"), key=lambda each: (each["ts"], -each["dur"]))
    return Recording(path, header, happened, len(events) - len(known), known[-1]["name"] == "end")


def _event_in(line: str) -> Event | None:
    """Return an event; None for a line that was cut off, or damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.keys() >= _FIELDS else None


def _refusal(found: str, expected: str, fix: str = "") -> TraceError:
    return TraceError.at(_WHERE, found=found, expected=expected, fix=fix)
