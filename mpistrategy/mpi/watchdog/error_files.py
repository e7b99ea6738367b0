"""An error of several ranks as a file of JSON in the run directory, for scripts that look why a job ended."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpistrategy.errors import CollectiveMismatchError, CollectiveTimeoutError, RemoteError, ReplicasDivergedError
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.mpi.watchdog.run_directory import in_time

_KINDS = (CollectiveMismatchError, ReplicasDivergedError, RemoteError)


def write(error: BaseException, rank: int) -> str:
    """Write an error that ends this rank's program; return the path, or "" where nothing was written.

    All ranks raise these errors alike, so the first rank of each node writes, and of different calls the first rank
    that made one.  Nothing here raises, and a file system that hangs is waited for a short time only.

    Args:
        error: what was not caught.
        rank: this rank's number in the job.
    """
    watching = watchdog.in_this_process()
    groups = [] if watching is None else watching.groups()
    if not isinstance(error, _KINDS) or not groups:
        return ""
    widest = max(groups, key=lambda group: len(group.ranks))
    writers = {min((status.rank for status in widest.board.read() if status.process), default=rank)}
    if isinstance(error, CollectiveMismatchError):
        writers |= {*[number for number, call in error.calls.items() if not call.left][:1]}
    if rank not in writers:
        return ""
    kind = type(error).__name__
    return in_time(lambda: widest.directory.write_error(kind, str(error), rank, _data(error)), "")


def _data(error: BaseException) -> dict[str, Any]:
    """Return the public attributes of an error, as JSON has them."""
    data = {name: kept for name, kept in vars(error).items() if not name.startswith("_")}
    if isinstance(error, (CollectiveMismatchError, CollectiveTimeoutError)):
        data["calls"] = {number: dataclasses.asdict(call) for number, call in error.calls.items()}
    return data
