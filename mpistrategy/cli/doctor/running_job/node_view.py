"""Reads what the watchdogs of a job on this node have written into the memory that its ranks share.

The ranks need not do anything for it: it works on those that hang or are stopped.  The system must allow it: one's own
processes, and kernel.yama.ptrace_scope must be 0.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mpistrategy.cli.doctor.running_job.run_files import Seen
from mpistrategy.mpi.shared_memory.segments import FOLDER, SharedMemory
from mpistrategy.mpi.watchdog import local_process
from mpistrategy.mpi.watchdog.status_board import ANSWERED, CALLED, STATUS_BYTES, RankStatus, StatusBoard

_MOST_RANKS = 1024
_MAPPING = re.compile(
    rf"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)\s+(?:/memfd:mpistrategy |{FOLDER}/mpistrategy-)", re.M
)


@dataclass(frozen=True)
class View:
    """What is to be seen on this node.

    Attributes:
        seen: the ranks.
        processes: those that belong to the job and use this library, as far as the system shows them.
        trouble: why nothing is seen; "" when something is.
    """

    seen: tuple[Seen, ...] = ()
    processes: tuple[int, ...] = ()
    trouble: str = ""


def of_slurm_job(number: str) -> View:
    """Return the ranks of a Slurm job on this node."""
    return _view([process for process in _all_processes() if _belongs(process, number)])


def of_process(process: int) -> View:
    """Return the ranks of the job of a process, as far as they are on its node."""
    return _view([process])


def _view(processes: list[int]) -> View:
    ranks, trouble = [], ""
    for process in processes:
        for start, stop, _ in _mappings(process):
            ranks.append(process)
            try:
                block = _memory(process, start, stop)
            except OSError as error:
                trouble = f"the memory of process {process} cannot be read ({error.strerror})"
                with (
                    suppress(OSError, ValueError),
                    open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file,
                ):
                    trouble += f"; kernel.yama.ptrace_scope is {int(file.read())}" if os.geteuid() else ""
                continue
            lines = lines_in(block)
            if lines:
                return View(tuple(_seen(line, process) for line in lines), tuple(processes))
    if not processes:
        trouble = "no process of the job is on this node"
    elif not ranks:
        trouble = "its processes here share no memory: a rank alone on its node, or no strategy of mpistrategy (yet)"
    return View((), tuple(processes), trouble or "its watchdogs have said nothing yet")


def lines_in(block: bytes) -> list[RankStatus]:
    """Return the lines in a copy of the memory that ranks share; how many ranks these are is found out."""
    pages = len(block) // 4096
    for ranks in range(1, min(pages, _MOST_RANKS) + 1):
        if pages % ranks:
            continue
        size = len(block) // ranks
        segments = tuple(np.frombuffer(block, np.uint8, STATUS_BYTES, rank * size).copy() for rank in range(ranks))
        with suppress(ValueError, OverflowError):
            lines = StatusBoard(SharedMemory(segments)).read()
            if all(_is_line(line) for line in lines) and len({line.rank for line in lines}) == ranks:
                rest = {line.process for line in lines}
                if ranks == len(rest) and not _has_more(block, size):
                    return lines
    return []


def _has_more(block: bytes, size: int) -> bool:
    """Return whether a segment has another line in its middle: it is of several ranks, then."""
    for parts in range(2, min(size // 4096, _MOST_RANKS) + 1):
        if size % parts == 0 and (size // parts) % 4096 == 0:
            start = size // parts
            segment = np.frombuffer(block, np.uint8, STATUS_BYTES, start).copy()
            line = StatusBoard(SharedMemory((segment,))).read()[0]
            if _is_line(line):
                return True
    return False


def _is_line(line: RankStatus) -> bool:
    return (
        0 <= line.rank < 2**24
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
    return Seen(line.rank, age, line.waited, line.limit, line.text, line.process, shows_stacks, 0, silent)


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
    except OSError:
        return False
    return bool(_mappings(process))


def _mappings(process: int) -> list[tuple[int, int, int]]:
    """Return where a process has memory that this library shares: start, end, and the file; the smallest first."""
    try:
        with open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as file:
            found = [(int(a, 16), int(b, 16), int(inode)) for a, b, inode in _MAPPING.findall(file.read())]
    except OSError:
        return []
    return sorted(found, key=lambda each: each[1] - each[0])


def _memory(process: int, start: int, stop: int) -> bytes:
    with open(f"/proc/{process}/mem", "rb", 0) as file:
        file.seek(start)
        return file.read(stop - start)
