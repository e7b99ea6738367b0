"""Reading what ranks have recorded: their files, and which of those in a folder belong to one run."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field
from typing import Any

from mpistrategy import own_files
from mpistrategy.errors import TraceError
from mpistrategy.telemetry.tracing.recorder import PREFIX, SUFFIX, VERSION

_WHERE = "mpistrategy trace"
#: Ranks of one run begin to record within so much time.
_TOGETHER_US = 600e6
#: Far more than a rank writes into a file.
_MOST_BYTES = 2**29
_MOST_RANKS = 2**20


@dataclass
class Recording:
    """One file.

    Attributes:
        path: where it is.
        header: what its first event says.
        events: what happened, by beginning: events of the phase ``X``; those that were never left end with the
            recording, and have ``not_left`` among their arguments.
        names: events with the names of ranks and threads.
        groups: those whose ranks met in it.
        damaged: how many lines could not be read.
        lost: how many events were not written.
        is_whole: whether the recording was ended in order.
    """

    path: str
    header: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    names: list[dict[str, Any]] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    damaged: int = 0
    lost: int = 0
    is_whole: bool = False

    @property
    def rank(self) -> int:
        """The rank that wrote it."""
        return int(self.header["rank"])

    @property
    def clock(self) -> str:
        """Which clock its times are of."""
        return str(self.header["clock"])


def read(path: str) -> Recording | None:
    """Return what is in a file, as far as it goes; None for a file that is not a recording.

    Raises:
        TraceError: for a file of another version, and one that cannot be read, or is not a file; where everybody can
            write, for somebody else's.
    """
    try:
        with os.fdopen(own_files.open_trusted(path), encoding="utf-8", errors="replace") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES} bytes")
            events = [_object(line) for line in file if line.strip() not in ("", "[", "]")]
        return _put_together(path, events)
    except OSError as error:
        expected = "a file of yours that can be read"
        raise TraceError.at(_WHERE, found=f"{path}: {error.strerror}", expected=expected) from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        found = f"{path}, with a line that is not of a trace ({error!r:.200})"
        raise TraceError.at(_WHERE, found=found, expected=f"a trace of version {VERSION}") from error


def _object(line: str) -> Any:
    try:
        return json.loads(line.strip().rstrip(","))
    except (ValueError, RecursionError):
        return None


def _put_together(path: str, events: list[Any]) -> Recording | None:
    if not events or type(events[0]) is not dict or events[0].get("name") != "mpistrategy":
        return None
    header = events[0]["args"]
    if header["version"] != VERSION or not 0 <= int(header["rank"]) < int(header["size"]) <= _MOST_RANKS:
        raise ValueError(f"version {header['version']} of the format")
    words = {name: str(header[name]) for name in ("host", "program", "clock", "begun")}
    numbers = {name: float(header[name]) for name in ("monotonic_us", "wall_us")}
    into = Recording(path, header | words | numbers, damaged=events.count(None))
    inside: dict[tuple[int, int], list[dict[str, Any]]] = {}
    last = numbers["monotonic_us"]
    for event in filter(None, events[1:]):
        name, phase, args, start = str(event["name"]), event["ph"], dict(event["args"]), float(event["ts"])
        track = int(event["pid"]), int(event["tid"])
        kept = {"name": name, "cat": event.get("cat", ""), "ph": phase, "ts": start, "dur": float(event.get("dur", 0))}
        kept |= {"pid": track[0], "tid": track[1], "args": args}
        last = max(last, start + kept["dur"])
        if phase == "B":
            inside.setdefault(track, []).append(kept)
        elif phase == "E":
            begun = inside[track].pop()["ts"]
            into.events.append(kept | {"ph": "X", "ts": begun, "dur": start - begun})
        elif phase == "X":
            into.events.append(kept)
        elif name == "lost":
            into.lost += int(args["events"])
        elif name == "end":
            into.is_whole = True
        elif phase == "M":
            into.names.append(kept)
    for open_ones in inside.values():
        for each in open_ones:
            each["args"]["not_left"] = True
            into.events.append(each | {"name": f"{each['name']} (not left)", "ph": "X", "dur": last - each["ts"]})
    into.events.sort(key=lambda each: (each["ts"], -each["dur"]))
    into.groups.update(str(each["args"]["group"]) for each in into.events if "group" in each["args"])
    return into


def newest_run(folder: str) -> tuple[list[Recording], int]:
    """Return the recordings of the newest run in a folder, by rank, and how many others there are.

    Raises:
        TraceError: where there are none.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(PREFIX) and name.endswith(SUFFIX))
    except OSError as error:
        expected = "a folder with a trace in it"
        raise TraceError.at(_WHERE, found=f"{folder}: {error.strerror}", expected=expected) from error
    found = [recording for name in names if (recording := read(os.path.join(folder, name))) is not None]
    if not found:
        fix = f"Make some: MPISTRATEGY_TRACE={folder} mpiexec -n 4 python program.py"
        expected = f"files {PREFIX}*{SUFFIX}"
        raise TraceError.at(_WHERE, found=f"no recordings in {folder}", expected=expected, fix=fix)
    found.sort(key=lambda each: (bool(each.groups), each.header["wall_us"]))
    newest = max(found, key=lambda each: float(each.header["wall_us"]))
    near = [each for each in found if _may_belong(each, newest)]
    newest = near[-1]  # rather one whose ranks met: a program that a rank has started may have recorded, too
    run = [each for each in near if not (each.groups and newest.groups) or each.groups & newest.groups]
    process = {each.rank: each.header["process"] for each in run}  # of each rank the newest; it may record twice
    run = [each for each in run if process[each.rank] == each.header["process"]]
    return sorted(run, key=lambda each: (each.rank, each.header["wall_us"])), len(found) - len(run)


def _may_belong(other: Recording, newest: Recording) -> bool:
    apart = newest.header["wall_us"] - other.header["wall_us"]
    return bool(apart < _TOGETHER_US and other.header["size"] == newest.header["size"])
