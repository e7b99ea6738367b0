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
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.watchdog import local_process
from mpistrategy.mpi.watchdog.status_board import ANSWERED, CALLED, MARK, ROW, RankStatus, StatusBoard

_MOST_RANKS = 1024
_FILE = "/memfd:mpistrategy"


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


def _view(processes: list[int]) -> View:
    trouble, users = "", 0
    seen: dict[int, Seen] = {}
    calls: list[NodeCalls] = []
    done: set[tuple[int, int]] = set()
    time.sleep(1 - time.time() % 1)  # at the same time on all nodes: who came last is seen in calls that they all show
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
                board = _board_in(path)
            except OSError as error:
                trouble = f"the memory of process {process} cannot be read ({error.strerror})"
                continue
            lines = [] if board is None else board.read()
            if board is None or not all(map(_is_line, lines)):
                continue
            for each in (_seen(line, process) for line in lines):
                if each.rank not in seen or each.age < seen[each.rank].age:  # an older one is of a closed strategy
                    seen[each.rank] = each
            offset = time.time() - time.monotonic()
            calls += of_node([line.rank for line in lines], board.calls(), offset, -identity[1])
    if seen:
        return View(tuple(seen[rank] for rank in sorted(seen)), tuple(processes), "", tuple(calls))
    if not processes:
        trouble = trouble or "no process of the job is on this node"
    elif not users:
        trouble = trouble or "its processes here have no strategy of several ranks (yet)"
    return View((), tuple(processes), trouble or "its watchdogs have said nothing yet")


def _board_in(path: str) -> StatusBoard | None:
    """Return a copy of the status board in a file of shared memory; None for any other memory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # A mapping would take pages, and end with a file that shrinks.
        return board_in(lambda start: os.pread(descriptor, ROW.itemsize, start), os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def board_in(read: Callable[[int], bytes], nbytes: int) -> StatusBoard | None:
    """Return a copy of the status board in so many bytes of memory; None where there is none.

    Args:
        read: returns the bytes of a row that begins at a place.
        nbytes: the size of the memory.
    """
    first = read(0)
    ranks = int(np.frombuffer(first, ROW)[0]["ranks"]) if len(first) == ROW.itemsize and first[:16] == MARK else 0
    if not 0 < ranks <= _MOST_RANKS or nbytes % ranks:
        return None
    rows = [read(rank * (nbytes // ranks)).ljust(ROW.itemsize, b"\0") for rank in range(ranks)]
    return StatusBoard(SharedMemory(tuple(np.frombuffer(row, np.uint8) for row in rows)))


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
    host = local_process.node_name()
    return Seen(line.rank, age, line.waited, line.limit, line.text, line.process, shows_stacks, silent, host)


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
            if os.readlink(path).startswith(_FILE):
                state = os.stat(path)
                found.setdefault((state.st_dev, state.st_ino), path)
    return found
