"""Reading what ranks have recorded: their files, and which of those in a folder belong to one run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpistrategy.errors import TraceError
from mpistrategy.telemetry.trace_format import FORMAT, PREFIX, SUFFIX, VERSION

_WHERE = "mpistrategy trace"
#: Ranks of one run begin to record within so much time.
_TOGETHER_NS = 600 * 10**9


@dataclass(slots=True)
class Interval:
    """Something that lasted, on one rank.

    Attributes:
        kind: "call", "step" or "span".
        name: of a step or a span; of a call, what was called.
        rank: the rank.
        thread: its thread, by number.
        start, end: nanoseconds, first of the rank's clock, later of the common one.
        number: of a step, among those of the rank; of a call, among those of its group.
        group: the id of a call's group; "" without one.
        what: a call in words; see `mpistrategy.telemetry.trace_format`.
        is_open: whether it was never left: `end` is when the rank's recording ends.
        waited: how long a call waited for the last rank to come, in nanoseconds.
        last_rank: the rank that came last; -1 when it is not known.
    """

    kind: str
    name: str
    rank: int
    thread: int
    start: float
    end: float
    number: int = 0
    group: str = ""
    what: dict[str, Any] = field(default_factory=dict)
    is_open: bool = False
    waited: float = 0.0
    last_rank: int = -1


@dataclass
class Recording:
    """One file.

    Attributes:
        path: where it is.
        header: its first line.
        intervals: what happened.
        threads: name and replica of each thread.
        groups: the ids of groups whose ranks met in it.
        damaged: how many lines could not be read.
        lost: how many events were not written.
        is_whole: whether the recording was ended in order.
    """

    path: str
    header: dict[str, Any]
    intervals: list[Interval] = field(default_factory=list)
    threads: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    groups: dict[str, list[int]] = field(default_factory=dict)
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
    """Return what is in a file, as far as it goes; None for a file that is no recording.

    Raises:
        TraceError: for a file of a later version, and one that cannot be read.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            header = _object(file.readline())
            if header is None or header.get("format") != FORMAT:
                return None
            if header.get("version") != VERSION:
                raise TraceError.at(
                    _WHERE,
                    found=f"version {header.get('version')!r} of the format in {path}",
                    expected=f"version {VERSION}",
                    fix="Read it with the mpistrategy that wrote it.",
                )
            reader = _Reader(Recording(path, header))
            for line in file:
                reader.take(line)
    except OSError as error:
        raise TraceError.at(_WHERE, found=f"{path}: {error.strerror}", expected="a file that can be read") from error
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError.at(
            _WHERE, found=f"{path}, a line that is none of ours ({error!r})", expected="a trace"
        ) from error
    return reader.finished()


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class _Reader:
    """Puts the lines of a file together."""

    def __init__(self, recording: Recording) -> None:
        self._into = recording
        self._whats: dict[int, dict[str, Any]] = {}
        self._ids: dict[int, str] = {}
        self._inside: dict[tuple[int, int], Interval] = {}
        self._alive = float(recording.header["monotonic_ns"])

    def take(self, line: str) -> None:
        told, into = _object(line), self._into
        kind = None if told is None else told.get("kind")
        if told is None:
            into.damaged += 1
        elif kind == "what":
            self._whats[told["what"]] = told
        elif kind == "group":
            self._ids[told["group"]] = told["id"]
            into.groups[told["id"]] = told["ranks"]
        elif kind == "thread":
            into.threads[told["thread"]] = (told["name"], told["replica"])
        elif kind == "inside":
            interval = self._interval({**told, "kind": told["of"], "to": told["from"]})
            interval.is_open = True
            self._inside[told["thread"], told["from"]] = interval
        elif kind in ("call", "step", "span"):
            self._inside.pop((told["thread"], told["from"]), None)
            into.intervals.append(self._interval(told))
        elif kind == "alive":
            self._alive = float(told["at"])
        elif kind == "lost":
            into.lost += told["events"]
        elif kind == "end":
            into.is_whole = True

    def _interval(self, told: dict[str, Any]) -> Interval:
        what = self._whats[told["what"]] if told["kind"] == "call" else {}
        replica = self._into.threads.get(told["thread"], ("", None))[1]
        rank = self._into.rank if replica is None else replica
        name = str(what.get("call", told.get("name", "?")))
        group = self._ids.get(told.get("group", -1), "")
        start, end = float(told["from"]), float(told["to"])
        return Interval(told["kind"], name, rank, told["thread"], start, end, told["number"], group, what)

    def finished(self) -> Recording:
        into = self._into
        into.intervals += self._inside.values()
        last = max([self._alive, *(each.end for each in into.intervals)])
        for each in self._inside.values():
            each.end = last
        # A call that turned out to go another way stands there twice: the second is the one that was made.
        made = {(each.group, each.number): each for each in into.intervals if each.kind == "call" and each.group}
        into.intervals = [each for each in into.intervals if not each.group or made[each.group, each.number] is each]
        into.intervals.sort(key=lambda each: (each.start, -each.end))
        return into


def newest_run(folder: str) -> tuple[list[Recording], int]:
    """Return the recordings of the newest run in a folder, by rank, and how many others there are.

    Raises:
        TraceError: where there are none.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(PREFIX) and name.endswith(SUFFIX))
    except OSError as error:
        raise TraceError.at(
            _WHERE, found=f"{folder}: {error.strerror}", expected="a folder with a trace in it"
        ) from error
    found = [recording for name in names if (recording := read(os.path.join(folder, name))) is not None]
    if not found:
        raise TraceError.at(
            _WHERE,
            found=f"no recordings in {folder}",
            expected=f"files {PREFIX}*{SUFFIX}",
            fix=f"Make some: MPISTRATEGY_TRACE={folder} mpiexec -n 4 python program.py",
        )
    found.sort(key=lambda each: -int(each.header["wall_ns"]))
    # A program that a rank has started may have recorded, too: the ranks are those that have met.
    run = [next((each for each in found if each.groups and _began_with(each, found[0])), found[0])]
    for each in found:
        if each is not run[0] and _belongs(each, run):
            run.append(each)
    return sorted(run, key=lambda each: (each.rank, each.header["wall_ns"])), len(found) - len(run)


def _belongs(other: Recording, run: Sequence[Recording]) -> bool:
    """Return whether a recording was made in the run of others: their ranks have met, or may have."""
    mine = {name for each in run for name in each.groups}
    same_rank = [each for each in run if each.rank == other.rank]
    if same_rank:  # one program may record twice
        process = ("pid", "host", "clock")
        return all(each.header[name] == other.header[name] for each in same_rank for name in process)
    if mine and other.groups:
        return not mine.isdisjoint(other.groups)
    return _began_with(run[0], other)


def _began_with(one: Recording, other: Recording) -> bool:
    apart = abs(int(one.header["wall_ns"]) - int(other.header["wall_ns"]))
    return bool(one.header["size"] == other.header["size"]) and apart < _TOGETHER_NS
