"""Run directories that earlier starts of this job have left: which they are, and their removal by the next start.

A run directory is called ``mpistrategy-run-JOB-STEP-rRESTART-MARK``: the Slurm job and its step (without Slurm
neither), how often it had gone back into the queue (not before the first time), and 20 hexadecimal digits: 8 for the
machine, 8 for the process that gave the name, 4 at random.

One of the same job is left over when it is of an earlier restart; or when it was named on this machine, by a process
that is there no more.  Everything else stays: other jobs', those of steps that may go on beside this one, and files
that this library has not written.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpistrategy.mpi.watchdog import run_directory
from mpistrategy.mpi.watchdog.local_process import stat_of
from mpistrategy.objects.later import later

if TYPE_CHECKING:
    from mpistrategy import own_files
else:
    later(globals(), "mpistrategy.own_files")

_NAME = re.compile(
    r"mpistrategy-run(?:-(\d{1,18}))?(?:-(\d{1,18}))?(?:-r(\d{1,9}))?-([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{4}"
)
#: What may be in one: what the watchdogs write, or wrote in version 0.1.0, while they write it as well.
_OURS = re.compile(
    r"(?:alarm|busy-\d{1,9}-\d{1,12}|error-\d{1,9}\.json|node-\d{1,9}\.json|rank-\d{1,9}\.txt|roll-call\.txt)"
    r"(?:\.\d{1,9}\.new)?"
)
_REPORT = "mpistrategy-last-report"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_REPORT_BYTES, _MOST_RECORD_BYTES = 2**24, 2**20
_PATIENCE_SECONDS = 1.0
_done: list[bool] = []


@dataclass(frozen=True)
class Run:
    """What the name of a run directory says.

    Attributes:
        job: the Slurm job; "" without one.
        restart: how often it had gone back into the queue.
        machine, process: digests of where the name was made, and by which process.
    """

    job: str
    restart: int
    machine: str
    process: str

    @classmethod
    def named(cls, name: str) -> Run | None:
        """Return what a name says; None for one that is not ours."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(found[1] or "", int(found[3] or 0), found[4], found[5])


def name_of_this_run() -> str:
    """Return a name for a run directory of this start, which no other one has."""
    job, step, restart = map(_number, ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    again = f"r{restart}" if job and int(restart or 0) else ""
    mark = _digest(*_machine()) + _digest_of_process(os.getpid()) + os.urandom(2).hex()
    return "-".join(filter(None, ("mpistrategy-run", job, step if job else "", again, mark)))


def proposal() -> str:
    """Return the path of a new run directory, which is not made yet; all ranks use rank 0's."""
    try:
        return os.path.join(run_directory.place(), name_of_this_run())
    except OSError:  # the current folder is gone
        return ""


def remove_left_ones() -> None:
    """Remove what earlier starts of this job have left, at the first call of a process.

    Their reports are kept, in one file beside them.  A file system that hangs is waited for one second.
    """
    if _done:
        return
    _done.append(True)
    thread = threading.Thread(target=_remove_quietly, name="mpistrategy earlier runs", daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)


def _remove_quietly() -> None:
    with contextlib.suppress(OSError, ValueError):
        remove_in(run_directory.place(), name_of_this_run())


def remove_in(place: str, this: str) -> None:
    """Remove what earlier starts have left in a folder.

    Args:
        place: the folder.
        this: what a run directory of this start would be called.
    """
    mine = Run.named(this)
    found = {name: run for name in os.listdir(place) if (run := Run.named(name)) is not None}
    if mine is None or not found:
        return
    alive = set(_processes())
    can_see = mine.process in alive  # else the system may hide others as well
    left = []
    for name, run in found.items():
        is_dead = can_see and run.machine == mine.machine and run.process not in alive
        if run.job == mine.job and (is_dead or run.restart < mine.restart):
            left.append(name)
    folder = os.open(place, _FOLDER)
    try:
        _condense(folder, place, f"{_REPORT}{f'-{mine.job}' if mine.job else ''}.txt", left)
    finally:
        os.close(folder)


def _condense(place: int, path: str, kept: str, left: Sequence[str]) -> None:
    """Remove run directories; what they report stays, in the file `kept` beside them."""
    reports = {}
    for name in left:
        with contextlib.suppress(OSError), _opened(place, name) as folder:
            reports[name] = os.fstat(folder).st_mtime, _report_in(folder)
    written = [name for name in sorted(reports, key=reports.__getitem__, reverse=True) if reports[name][1]]
    if written:
        heads = {name: f"What {name} held; written {time.ctime(reports[name][0])}.\n\n".encode() for name in written}
        if _keep(place, kept, written[0], b"".join(heads[name] + reports[name][1] for name in written)):
            where = os.path.join(path, kept)
            sys.stderr.write(f"mpistrategy: an earlier start of this job ended with a report: {where}\n")
        else:
            for name in written:
                del reports[name]
    for name in reports:
        with contextlib.suppress(OSError):
            _remove(place, name)


@contextlib.contextmanager
def _opened(place: int, name: str) -> Iterator[int]:
    """Open a folder of this user's own; OSError for anything else."""
    folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=place)
    try:
        if not own_files.is_own(os.fstat(folder), os.fstat(place)):
            raise PermissionError(name)
        yield folder
    finally:
        os.close(folder)


def _remove(place: int, name: str) -> None:
    with _opened(place, name) as folder:
        for inside in filter(_OURS.fullmatch, os.listdir(folder)):
            os.unlink(inside, dir_fd=folder)
    os.rmdir(name, dir_fd=place)  # which fails while there is anything else in it


def _report_in(folder: int) -> bytes:
    """Return the roll call, and what the ranks wrote in a run directory, one after the other; their beginnings.

    What nodes told each other is no report, unless the roll was called.
    """
    written = os.listdir(folder)
    names = []
    for kind in (run_directory.ERROR, run_directory.NODE_FILE):
        names += sorted(filter(kind.fullmatch, written), key=lambda name: int(re.findall(r"\d+", name)[0]))
    if run_directory.ROLL_CALL not in written:
        names = [name for name in names if run_directory.ERROR.fullmatch(name)]
    told, left = [], _MOST_REPORT_BYTES
    for name in (run_directory.ROLL_CALL, *names):
        with contextlib.suppress(OSError):
            file = own_files.open_own(name, folder)
            try:
                text = os.read(file, min(_MOST_RECORD_BYTES, left))
            finally:
                os.close(file)
            told.append(f"== {name}\n".encode() + text.rstrip() + b"\n\n")
            left -= len(text)
    return b"".join(told)


def _keep(place: int, kept: str, name: str, report: bytes) -> bool:
    """Write a report in the place of the last one; return whether that was possible."""
    # In the directory that goes: so it does not stay if this job is killed now.
    temporary = f"{run_directory.ROLL_CALL}.{os.getpid()}.new"
    try:
        with _opened(place, name) as folder, own_files.replacing(kept, place, temporary, folder) as file:
            file.write(report)
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ who is who


def _number(variable: str) -> str:
    text = os.environ.get(variable, "")
    return text if re.fullmatch(r"[0-9]{1,18}", text) else ""


def _digest(*words: str) -> str:
    import hashlib  # here, for the quick import

    return hashlib.blake2b("\0".join(words).encode(errors="replace"), digest_size=4).hexdigest()


def _machine() -> tuple[str, ...]:
    """Return what identifies this machine, and this view of its processes."""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
        return os.uname().nodename, _line("/etc/machine-id"), space
    return os.uname().nodename, os.urandom(8).hex()  # without a view of processes, no process is known to be dead


def _digest_of_process(process: int) -> str:
    try:
        state = stat_of(process)
        began = state[19] if state[0] not in "ZX" else ""
    except (OSError, IndexError):
        began = ""
    return _digest(_line("/proc/sys/kernel/random/boot_id"), str(process), began)


def _processes() -> Iterator[str]:
    """Yield the digests of all processes that are there."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield _digest_of_process(int(name))


@functools.cache
def _line(path: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8", errors="replace") as file:
        return file.readline(256).strip()
    return ""
