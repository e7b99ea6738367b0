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
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']} of the format")
    into = Recording(path, header, damaged=events.count(None))
    inside: dict[Any, list[dict[str, Any]]] = {}
    last = header["monotonic_us"]
    for event in filter(None, events[1:]):
        phase, name, track, args = event["ph"], event["name"], (event["pid"], event["tid"]), event["args"]
        last = max(last, event["ts"] + event.get("dur", 0))
        if phase == "B":
            inside.setdefault(track, []).append(event)
        elif phase == "E":
            same = [each for each in inside.get(track, ()) if each["name"] == name]
            if not same:  # its beginning was in a line that was cut off, or lost
                into.damaged += 1
                continue
            inside[track].remove(same[-1])
            into.events.append(event | {"ph": "X", "ts": same[-1]["ts"], "dur": event["ts"] - same[-1]["ts"]})
        elif phase == "X":
            into.events.append(event)
        elif name == "lost":
            into.lost += args["events"]
        elif name == "end":
            into.is_whole = True
        elif phase == "M":
            into.names.append(event)
    for each in (each for open_ones in inside.values() for each in open_ones):
        args = {**each["args"], "not_left": True}
        name = f"{each['name']} (not left)"
        into.events.append(each | {"name": name, "ph": "X", "dur": last - each["ts"], "args": args})
    into.events.sort(key=lambda each: (each["ts"], -each["dur"]))
    into.groups.update(each["args"]["group"] for each in into.events if "group" in each["args"])
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
    newest = max(each.header["wall_us"] for each in found)
    size = next(each.header["size"] for each in found if each.header["wall_us"] == newest)
    near = [e for e in found if e.header["size"] == size and newest - e.header["wall_us"] < _TOGETHER_US]
    groups = near[-1].groups  # rather those that met: a program that a rank has started may have recorded, too
    run = [each for each in near if not (each.groups and groups) or each.groups & groups]
    process = {each.header["rank"]: each.header["process"] for each in run}  # of each rank the newest
    run = [each for each in run if process[each.header["rank"]] == each.header["process"]]
    return sorted(run, key=lambda each: (each.header["rank"], each.header["wall_us"])), len(found) - len(run)
