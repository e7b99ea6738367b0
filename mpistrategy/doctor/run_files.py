"""Reads the files of a run directory: what the watchdogs of a job have said last, and what they wrote at its end."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from glob import escape, glob

_RECORD = re.compile(r"rank-(\d+)\.txt$")
_MOST_BYTES = 2**20
#: Node 0's first rank writes its file about every minute: who is silent for longer is gone, or stands still.
SILENT_SECONDS = 150.0


@dataclass(frozen=True)
class Seen:
    """One rank, as it was last heard of.

    Attributes:
        rank: its number.
        age: how long ago that was, in seconds.
        waited: how long it had waited in a collective by then; 0 when it was in none.
        limit: after how long it gives up; 0 if unknown.
        text: where it was.
        process: its number on its node; 0 if unknown.
        shows_stacks: whether SIGQUIT makes it show its stacks.
        node: the number of its node, from 0 on.
        silent: why it cannot say anything any more; "" when it can.
    """

    rank: int
    age: float
    waited: float
    limit: float
    text: str
    process: int = 0
    shows_stacks: bool = False
    node: int = 0
    silent: str = ""


@dataclass(frozen=True)
class RunFiles:
    """What is in a run directory.

    Attributes:
        folder: its path.
        seen: the ranks.
        roll_call: what the job wrote at its end, if it ended because a collective was late.
        newest: when something was last written, in seconds of time.time().
    """

    folder: str
    seen: tuple[Seen, ...]
    roll_call: str
    newest: float


def folders_of(number: str, places: Iterable[str]) -> list[str]:
    """Return the run directories of a Slurm job in these places, the newest first."""
    found = {
        os.path.realpath(path)
        for place in places
        if place
        for path in glob(os.path.join(escape(place), f"mpistrategy-run-{number}-*"))
    }
    return sorted(found, key=_newest, reverse=True)


def read(folder: str, now: float) -> RunFiles:
    """Return what is in a run directory; files that cannot be read, or are something else, are passed over.

    Args:
        folder: its path.
        now: time.time().
    """
    seen: dict[int, Seen] = {}
    for path in glob(os.path.join(escape(folder), "node-*.json")):
        for each in _node(path, now):
            seen[each.rank] = each
    for path in glob(os.path.join(escape(folder), "rank-*.txt")):
        number = _RECORD.search(path)
        first = _text(path).partition("\n")[0]
        if number and int(number[1]) not in seen:
            age = max(0.0, now - _newest(path))
            waited = re.search(r"^in #.* for (\d+\.\d+) s; ", first)
            seen[int(number[1])] = Seen(int(number[1]), age, float(waited[1]) if waited else 0.0, 0.0, first)
    ordered = tuple(seen[rank] for rank in sorted(seen))
    return RunFiles(folder, ordered, _text(os.path.join(folder, "roll-call.txt")), _newest(folder))


def _node(path: str, now: float) -> list[Seen]:
    try:
        told = json.loads(_text(path))
        passed = max(0.0, now - float(told["wall"]))
        node = int(re.findall(r"\d+", os.path.basename(path))[0])
        return [
            Seen(
                int(line["rank"]),
                passed - min(0.0, float(line["beat"])),
                float(line["waited"]),
                float(line["limit"]),
                str(line["text"]),
                int(line["process"]),
                bool(line["signal"]),
                node,
                str(told["silent"].get(str(line["rank"]), "")),
            )
            for line in told["lines"]
            if line["process"]
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return ""


def _newest(path: str) -> float:
    """Return when a file, or something in a folder, was last written."""
    try:
        times = [os.stat(path).st_mtime]
        if os.path.isdir(path):
            times += [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)]
        return max(times)
    except OSError:
        return 0.0
