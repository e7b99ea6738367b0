"""Reads the statuses that the watchdogs of a job on this node have written into its shared memory.

The ranks take no part: this works on ranks that hang or are stopped.  Linux lets users read the memory of their own
processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.watchdog.local_process import node_name, why_silent
from mpistrategy.mpi.watchdog.status_board import MARK, ROW, RankStatus, StatusBoard

_MOST_RANKS = 1024
_FILE = "/memfd:mpistrategy"
#: The watchdog writes once a second: nobody writes an older status any more.
_SILENT_SECONDS = 3.0


@dataclass(frozen=True)
class NodeCalls:
    """The last collectives of one strategy on one node.

    Attributes:
        strategy: its number, the same on all nodes.
        ranks: how many ranks it has.
        here: how many of them are on this node.
        arrivals: of the collectives that all ranks of this node have noted: the number of the collective, when the last
            rank came, the number of this rank, and when the first rank came; in seconds of time.time().
    """

    strategy: int
    ranks: int
    here: int
    arrivals: Sequence[tuple[int, float, int, float]]


@dataclass
class View:
    """The state of a job, as its watchdogs have written it.

    Attributes:
        statuses: of the ranks, in order.
        calls: when they came to their last collectives, for each node and strategy.
        troubles: what could not be read, and why.
    """

    statuses: list[RankStatus]
    calls: list[NodeCalls]
    troubles: list[str]


def of_slurm_job(number: str) -> View:
    """Return the state of a Slurm job on this node."""
    variable, processes = f"SLURM_JOB_ID={number}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if variable in file.read().split(b"\0"):
                processes.append(int(name))
    return of_processes(processes)


def of_processes(processes: Sequence[int]) -> View:
    """Return the state of the jobs of these processes on their node."""
    trouble = "its processes here have no strategy of several ranks (yet)" if processes else "it has no process here"
    time.sleep(1 - time.time() % 1)  # at the same time on all nodes, so that they show the same calls
    boards: dict[int, StatusBoard | None] = {}  # by the inode of their memory
    for process in processes:
        try:
            for inode, path in _shared_files(process).items():
                if inode not in boards:
                    boards[inode] = _board_in(path)
        except OSError as error:
            trouble = f"the memory of process {process} cannot be read ({error.strerror})"
    newest, calls = dict[int, RankStatus](), list[NodeCalls]()
    for inode, board in boards.items():
        statuses = [] if board is None else board.read()
        if board is None or not all(status.process and status.text for status in statuses):
            continue
        for status in statuses:  # an older status is of a closed strategy
            if status.rank not in newest or status.beat > newest[status.rank].beat:
                is_old = time.monotonic() - status.beat > _SILENT_SECONDS and not status.state
                silent = why_silent(status.process) if is_old else ""
                newest[status.rank] = replace(status, host=node_name(), silent=silent)
        strategy, size = (int(board.all(name)[0]) for name in ("strategy", "size"))
        calls.append(last_calls(statuses, strategy or -inode, size, time.time() - time.monotonic()))
    return View([newest[rank] for rank in sorted(newest)], calls, [] if newest else [trouble])


def last_calls(statuses: Sequence[RankStatus], strategy: int, ranks: int, offset: float) -> NodeCalls:
    """Return the last collectives of the ranks of one board.

    Args:
        statuses: of the ranks.
        strategy, ranks: the number of their strategy, and how many ranks it has.
        offset: seconds to add to their times, for times of time.time().
    """
    arrivals = []
    for number in set.intersection(*(set(status.calls) for status in statuses)):
        times = [(status.calls[number] + offset, status.rank) for status in statuses]
        arrivals.append((number, *max(times), min(times)[0]))
    return NodeCalls(strategy, ranks, len(statuses), arrivals)


def _shared_files(process: int) -> dict[int, str]:
    """Return the shared-memory files of this library that a process has open: inode to path."""
    files: dict[int, str] = {}
    for name in os.listdir(f"/proc/{process}/fd"):
        path = f"/proc/{process}/fd/{name}"
        with suppress(OSError):  # closed meanwhile
            if os.readlink(path).startswith(_FILE):
                files[os.stat(path).st_ino] = path
    return files


def _board_in(path: str) -> StatusBoard | None:
    """Return a copy of the status board in a file of shared memory; None for any other memory."""
    with open(path, "rb", buffering=0) as file:  # a mapping would take pages, and end with a file that shrinks
        first, nbytes = file.read(ROW.itemsize), os.fstat(file.fileno()).st_size
        ranks = int(np.frombuffer(first, ROW)[0]["ranks"]) if len(first) == ROW.itemsize and first[:16] == MARK else 0
        if not 0 < ranks <= _MOST_RANKS or nbytes % ranks:
            return None
        starts = range(0, nbytes, nbytes // ranks)
        rows = [os.pread(file.fileno(), ROW.itemsize, start).ljust(ROW.itemsize, b"\0") for start in starts]
    return StatusBoard(SharedMemory(tuple(np.frombuffer(row, np.uint8) for row in rows)))
