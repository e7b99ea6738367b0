"""Reading what ranks have recorded: their files, and which of those in a folder belong to one run."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from mpistrategy import own_files
from mpistrategy.errors import TraceError
from mpistrategy.telemetry.tracing.file_format import FORMAT, PREFIX, SUFFIX, VERSION

_WHERE = "mpistrategy trace"
#: Ranks of one run begin to record within so much time.
_TOGETHER_NS = 600 * 10**9
#: Far more than a rank writes into a file, and into a line.
_MOST_BYTES, _LONGEST_LINE = 2**29, 2**20
_MOST_RANKS = 2**20
#: A process that is killed damages one line; a file with so many is something else.
MOST_DAMAGED = 10_000
_KINDS = ("call", "step", "span")
#: What is used of a header, and of a call in words.
_HEADER = {
    **dict.fromkeys(("rank", "size", "pid", "monotonic_ns", "wall_ns"), int),
    **dict.fromkeys(("host", "clock", "program", "begun"), str),
}
_WHAT = {**dict.fromkeys(("call", "place", "name", "verb", "op", "values", "destination"), str), "bytes": int}


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
        what: a call in words; see `mpistrategy.telemetry.tracing.file_format`.
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
        damaged: how many lines could not be read; after `MOST_DAMAGED` the rest is left out.
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
    """Return what is in a file, as far as it goes; None for a file that is not a recording.

    Raises:
        TraceError: for a file of a later version, and one that cannot be read, or is not a file; where everybody can
            write, for somebody else's.
    """
    try:
        with _opened(path) as file:
            header = _object(file.readline(_LONGEST_LINE))
            if header is None or header.get("format") != FORMAT:
                return None
            if header.get("version") != VERSION:
                raise TraceError.at(
                    _WHERE,
                    found=f"version {header.get('version')!r} of the format in {path}",
                    expected=f"version {VERSION}",
                    fix="Read it with the mpistrategy that wrote it.",
                )
            _check_header(header)
            reader = _Reader(Recording(path, header))
            while reader.damaged < MOST_DAMAGED and (line := file.readline(_LONGEST_LINE)):
                reader.take(line)
    except OSError as error:
        raise TraceError.at(
            _WHERE, found=f"{path}: {error.strerror}", expected="a file of yours that can be read"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TraceError.at(
            _WHERE, found=f"{path}, with a line that is not of a trace ({error!r:.200})", expected="a trace"
        ) from error
    return reader.finished()


@contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    descriptor = own_files.open_trusted(path)
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        if os.fstat(descriptor).st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES} bytes")
        yield file


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _check_header(header: dict[str, Any]) -> None:
    if not all(type(header[name]) is kind for name, kind in _HEADER.items()):
        raise ValueError("a header of other values")
    if not 0 <= header["rank"] < _MOST_RANKS or not 0 < header["size"] <= _MOST_RANKS:
        raise ValueError(f"rank {header['rank']} of {header['size']}"[:200])
    _number(header["monotonic_ns"]), _number(header["wall_ns"])


def _number(number: Any) -> float:
    """Return a time, or a number of bytes; ValueError for what can be none."""
    if type(number) not in (int, float) or not -(2**63) < number < 2**63:
        raise ValueError("a number out of range")
    return float(number)


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
        if told is None or type(kind) is not str:  # others are of a later version
            into.damaged += 1
        elif kind == "what":
            if not all(type(told.get(name, kind())) is kind for name, kind in _WHAT.items()):
                raise ValueError("a call in other words")
            _number(told.get("bytes", 0))
            self._whats[told["what"]] = told
        elif kind == "group":
            self._ids[told["group"]] = str(told["id"])
            into.groups[str(told["id"])] = [int(rank) for rank in told["ranks"]]
        elif kind == "thread":
            replica = None if told["replica"] is None else int(told["replica"])
            into.threads[int(told["thread"])] = (str(told["name"]), replica)
        elif kind == "inside":
            interval = self._interval({**told, "kind": told["of"], "to": told["from"]})
            interval.is_open = True
            self._inside[told["thread"], told["from"]] = interval
        elif kind in _KINDS:
            self._inside.pop((told["thread"], told["from"]), None)
            into.intervals.append(self._interval(told))
        elif kind == "alive":
            self._alive = _number(told["at"])
        elif kind == "lost":
            into.lost += int(told["events"])
        elif kind == "end":
            into.is_whole = True

    @property
    def damaged(self) -> int:
        """How many lines could not be read so far."""
        return self._into.damaged

    def _interval(self, told: dict[str, Any]) -> Interval:
        if told["kind"] not in _KINDS:
            raise ValueError("something of an unknown kind")
        what = self._whats[told["what"]] if told["kind"] == "call" else {}
        replica = self._into.threads.get(told["thread"], ("", None))[1]
        rank = self._into.rank if replica is None else replica
        name = str(what.get("call", told.get("name", "?")))
        group = self._ids.get(told.get("group", -1), "") if what else ""
        start, end = _number(told["from"]), _number(told["to"])
        return Interval(told["kind"], name, rank, int(told["thread"]), start, end, int(told["number"]), group, what)

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
