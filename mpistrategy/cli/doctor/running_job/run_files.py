"""Reads the files of a run directory: what the nodes of a job have said after an alarm, and its roll call.

Other users may write where run directories are searched for.  Files of other users and large files are left out, and
named in the result.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mpistrategy import own_files
from mpistrategy.mpi.watchdog import run_directory
from mpistrategy.objects.text import printable

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_RANK = 2**24
_MOST_FOLDERS = 64


@dataclass(frozen=True)
class Seen:
    """The last report of one rank.

    Attributes:
        rank: its number.
        age: how long ago that was, in seconds.
        waited: how long it had waited in a collective by then; 0 when it was in none.
        limit: after how long it gives up; 0 if unknown.
        text: where it was.
        process: its number on its node; 0 if unknown.
        shows_stacks: whether SIGQUIT makes it show its stacks.
        silent: why it cannot say anything any more; "" when it can.
        host: the name of its node; "" if unknown.

    Texts are printable.
    """

    rank: int
    age: float
    waited: float
    limit: float
    text: str
    process: int = 0
    shows_stacks: bool = False
    silent: str = ""
    host: str = ""


@dataclass(frozen=True)
class RunFiles:
    """What is in a run directory.

    Attributes:
        folder: its path.
        seen: the ranks.
        roll_call: what the job wrote at its end, if it ended because a collective was late.
        left_out: what was not read, and why.
    """

    folder: str
    seen: tuple[Seen, ...]
    roll_call: str
    left_out: tuple[str, ...] = ()


def folders_of(number: str, places: Iterable[str]) -> list[str]:
    """Return the run directories of a Slurm job in these places: first the user's own, the newest first."""
    found: dict[str, tuple[bool, float]] = {}
    for place in dict.fromkeys(os.path.realpath(place) for place in places if place):
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.name.startswith(f"{run_directory.PREFIX}{number}-"):
                        found[entry.path] = _newest(entry)
        except OSError:
            continue
    return sorted(found, key=lambda path: found[path], reverse=True)[:_MOST_FOLDERS]


def _newest(entry: os.DirEntry[str]) -> tuple[bool, float]:
    """Return whether a folder is the user's own, and when something in it was last written."""
    try:
        state = entry.stat(follow_symlinks=False)
        if not own_files.is_own(state) or not entry.is_dir(follow_symlinks=False):
            return False, state.st_mtime
        with os.scandir(entry.path) as inside:
            return True, max([state.st_mtime, *(inner.stat(follow_symlinks=False).st_mtime for inner in inside)])
    except OSError:
        return False, 0.0


def read(path: str, now: float, *, follow: bool = False) -> RunFiles:
    """Return what is in a run directory; files that cannot be read, or are something else, are left out.

    Args:
        path: of the directory.
        now: time.time().
        follow: whether it may be a symbolic link.
    """
    left_out: list[str] = []
    try:
        with _opened(path, follow) as folder:
            seen, roll_call = _seen_in(folder, now, left_out)
    except OSError as error:
        return RunFiles(path, (), "", (f"{path}: {_why(error)}",))
    return RunFiles(path, tuple(seen[rank] for rank in sorted(seen)), roll_call, tuple(left_out))


@contextmanager
def _opened(path: str, follow: bool) -> Iterator[int]:
    folder = os.open(path, _FOLDER if follow else _FOLDER | os.O_NOFOLLOW)
    try:
        state = os.fstat(folder)
        if not own_files.is_own(state):
            owner = own_files.user_in_words(state.st_uid)
            raise PermissionError(0, f"it belongs to {owner}, and is not read: what is in it may be made up")
        yield folder
    finally:
        os.close(folder)


def _why(error: OSError) -> str:
    return "it is a symbolic link, or no folder" if isinstance(error, NotADirectoryError) else str(error.strerror)


def _seen_in(folder: int, now: float, left_out: list[str]) -> tuple[dict[int, Seen], str]:
    """Return the ranks in an open directory, and its roll call; note what is left out."""

    def text(name: str) -> tuple[str, os.stat_result | None]:
        try:
            descriptor = own_files.open_own(name, folder)
            try:
                state = os.fstat(descriptor)
                if own_files.others_can_write(state):
                    raise PermissionError(0, "others can write to it")
                told = own_files.read_all(descriptor, run_directory.MOST_BYTES, name)
                return printable(told.decode(errors="replace")), state
            finally:
                os.close(descriptor)
        except OSError as error:
            left_out.append(f"{name!r}: {error.strerror}")
            return "", None

    names = sorted(os.listdir(folder))
    seen: dict[int, Seen] = {}
    for name in filter(run_directory.ERROR.fullmatch, names):
        told, state = text(name)
        if state is not None:
            for each in _called(told, max(0.0, now - state.st_mtime)):
                seen.setdefault(each.rank, each)
    return seen, text(run_directory.ROLL_CALL)[0] if run_directory.ROLL_CALL in names else ""


def _called(text: str, age: float) -> list[Seen]:
    """Return the ranks of a roll call that was written as JSON."""
    try:
        ranks = {int(rank): told for rank, told in json.loads(text)["ranks"].items()}
        return [
            Seen(
                rank,
                age,
                _finite(told["waited_seconds"]),
                _finite(told["timeout_seconds"] or 0.0),
                printable(str(told["text"]), ""),
                silent=printable(str(told["silent"]), ""),
            )
            for rank, told in ranks.items()
            if 0 <= rank < _MOST_RANK
        ]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return []


def _finite(number: Any) -> float:
    found = float(number)
    if not math.isfinite(found):
        raise ValueError(found)
    return found
