"""Reads what the watchdogs of a job on this node have written into the memory that its ranks share.

The ranks need not do anything for it: it works on those that hang or are stopped.  Linux lets users do so with their
own processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mpistrategy.cli.doctor.running_job.last_calls import NodeCalls, of_node
from mpistrategy.cli.doctor.running_job.run_files import Seen
from mpistrategy.mpi.shared_memory.segments import FOLDER, SharedMemory
from mpistrategy.mpi.watchdog import local_process, run_directory
from mpistrategy.mpi.watchdog.status_board import ANSWERED, CALLED, SEEN_BYTES, STATUS_BYTES, RankStatus, StatusBoard

_MOST_RANKS = 1024
_RUN_DIR = run_directory.VARIABLE.encode()
_FILES = ("/memfd:mpistrategy", f"{FOLDER}/mpistrategy-")
#: In which part of a second no watchdog writes: they all do at its beginning, for the same calls.
_QUIET_FROM, _QUIET_UNTIL = 0.3, 0.9

#: Returns so many bytes from a place on.
Read = Callable[[int, int], bytes]


@dataclass(frozen=True)
class View:
    """What is to be seen on this node.

    Attributes:
        seen: the ranks.
        processes: those that belong to the job and use this library, as far as the system shows them.
        trouble: why nothing is seen; "" when something is.
        calls: when these ranks came to their last collectives, for each strategy.
    """

    seen: tuple[Seen, ...] = ()
    processes: tuple[int, ...] = ()
    trouble: str = ""
    calls: tuple[NodeCalls, ...] = ()


def of_slurm_job(number: str) -> View:
    """Return the ranks of a Slurm job on this node."""
    return _view([process for process in _all_processes() if _belongs(process, number)])


def of_process(process: int) -> View:
    """Return the ranks of the job of a process, as far as they are on its node."""
    return _view([process])


def place_of_run_directories(process: int) -> str:
    """Return the folder in which a process's watchdog makes its run directory; "" where the system does not show it."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            variables = dict(each.partition(b"=")[::2] for each in file.read().split(b"\0"))
        return os.path.join(os.readlink(f"/proc/{process}/cwd"), os.fsdecode(variables.get(_RUN_DIR, b"")))
    except OSError:
        return ""


def _view(processes: list[int]) -> View:
    trouble, users = "", 0
    seen: dict[int, Seen] = {}
    calls: list[NodeCalls] = []
    done: set[tuple[int, int]] = set()
    _wait_for_the_quiet()
    for process in processes:
        try:
            files = _shared_files(process)
        except OSError as error:
            trouble = f"the memory of process {process} cannot be read ({error.strerror})"
            continue
        users += bool(files)
        for identity, path in files.items():
            if identity in done:
                continue
            done.add(identity)
            try:
                lines, board = _board_in(path)
            except OSError as error:
                trouble = f"the memory of process {process} cannot be read ({error.strerror})"
                continue
            for each in (_seen(line, process) for line in lines):
                if each.rank not in seen or each.age < seen[each.rank].age:  # an older one is of a closed strategy
                    seen[each.rank] = each
            if board is not None:
                offset = time.time_ns() - time.monotonic_ns()
                calls += of_node([line.rank for line in lines], board.calls(), offset, -identity[1])
    if seen:
        return View(tuple(seen[rank] for rank in sorted(seen)), tuple(processes), "", tuple(calls))
    if not processes:
        trouble = trouble or "no process of the job is on this node"
    elif not users:
        trouble = trouble or "its processes here have no strategy of several ranks (yet)"
    return View((), tuple(processes), trouble or "its watchdogs have said nothing yet")


def _wait_for_the_quiet() -> None:
    part = time.time() % 1
    if not _QUIET_FROM <= part <= _QUIET_UNTIL:
        time.sleep((_QUIET_FROM - part) % 1)


def _board_in(path: str) -> tuple[list[RankStatus], StatusBoard | None]:
    """Return the statuses in a file of shared memory, and their board; of any other memory nothing."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(descriptor).st_size

        def read(start: int, length: int) -> bytes:
            return os.pread(descriptor, length, start)  # a mapping would take pages, and end with a file that shrinks

        lines = lines_in(read, size)
        return lines, _board(read, len(lines), size // len(lines), SEEN_BYTES) if lines else None
    finally:
        os.close(descriptor)


def lines_in(read: Read, nbytes: int) -> list[RankStatus]:
    """Return the statuses in the memory that ranks share; how many ranks these are is found out."""
    pages = nbytes // 4096
    if not pages or not _is_line(_line(read, 0)):
        return []
    for ranks in range(1, min(pages, _MOST_RANKS) + 1):
        if pages % ranks:
            continue
        size = nbytes // ranks
        with suppress(ValueError, OverflowError):
            lines = _board(read, ranks, size, STATUS_BYTES).read()
            if all(_is_line(line) for line in lines) and len({line.rank for line in lines}) == ranks:
                rest = {line.process for line in lines}
                if ranks == len(rest) and not _has_more(read, size):
                    return lines
    return []


def _board(read: Read, ranks: int, size: int, nbytes: int) -> StatusBoard:
    """Return a copy of so many bytes from the beginning of each rank's part."""
    parts = [read(rank * size, min(size, nbytes)).ljust(nbytes, b"\0") for rank in range(ranks)]
    return StatusBoard(SharedMemory(tuple(np.frombuffer(part, np.uint8).copy() for part in parts)))


def _line(read: Read, start: int) -> RankStatus | None:
    with suppress(ValueError, OverflowError):
        return _board(lambda at, length: read(start + at, length), 1, STATUS_BYTES, STATUS_BYTES).read()[0]
    return None


def _has_more(read: Read, size: int) -> bool:
    """Return whether a segment has another line in its middle: it is of several ranks, then."""
    for parts in range(2, min(size // 4096, _MOST_RANKS) + 1):
        if size % parts == 0 and (size // parts) % 4096 == 0 and _is_line(_line(read, size // parts)):
            return True
    return False


def _is_line(line: RankStatus | None) -> bool:
    return (
        line is not None
        and 0 <= line.rank < 2**24
        and 0 < line.process < 2**22
        and 0 <= line.state <= CALLED
        and 0 < line.beat <= time.monotonic() + 1
        and 0 <= line.signal < 65
        and line.text.isprintable()
        and bool(line.text)
    )


def _seen(line: RankStatus, told_by: int) -> Seen:
    age = max(0.0, time.monotonic() - line.beat)
    # The watchdog writes once a second: nobody writes an older line any more.
    silent = local_process.why_silent(line.process) if age > 3 and line.state < ANSWERED else ""
    # The owner can write anything into that memory, such as the number of another user's process.
    shows_stacks = bool(line.signal) and _owner(line.process) == _owner(told_by) is not None
    host = local_process.node_name()
    return Seen(line.rank, age, line.waited, line.limit, line.text, line.process, shows_stacks, 0, silent, host)


def _owner(process: int) -> int | None:
    with suppress(OSError):
        return os.stat(f"/proc/{process}").st_uid
    return None


def _all_processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            yield int(name)


def _belongs(process: int, number: str) -> bool:
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            if f"SLURM_JOB_ID={number}".encode() not in file.read().split(b"\0"):
                return False
        return bool(_shared_files(process))
    except OSError:
        return False


def _shared_files(process: int) -> dict[tuple[int, int], str]:
    """Return the files of memory that this library shares and a process has open: a path to each, by its identity."""
    found: dict[tuple[int, int], str] = {}
    folder = f"/proc/{process}/fd"
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with suppress(OSError):  # closed meanwhile
            if os.readlink(path).startswith(_FILES):
                state = os.stat(path)
                found.setdefault((state.st_dev, state.st_ino), path)
    return found
