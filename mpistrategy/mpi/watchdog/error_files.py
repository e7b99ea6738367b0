"""An error of several ranks as a file of JSON in the run directory, for scripts that look why a job ended."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mpistrategy.errors import CollectiveMismatchError, RemoteError, ReplicasDivergedError
from mpistrategy.mpi.watchdog import watchdog
from mpistrategy.mpi.watchdog.alarm import FILE_SECONDS, within

_KINDS = (CollectiveMismatchError, ReplicasDivergedError, RemoteError)


def write(error: BaseException, rank: int) -> str:
    """Write an error that ends this rank's program; return the path, or "" where nothing was written.

    All ranks raise these errors alike, so the first rank of each node writes.  Nothing here raises, and a file system
    that hangs is waited for a short time only.

    Args:
        error: what was not caught.
        rank: this rank's number in the job.
    """
    watching = watchdog.in_this_process()
    groups = [] if watching is None else watching.groups()
    if not isinstance(error, _KINDS) or not groups:
        return ""
    widest = max(groups, key=lambda group: len(group.ranks))
    name, written = f"error-{rank}.json", []
    if rank == min((status.rank for status in widest.board.read() if status.process), default=rank):
        text = json.dumps(as_data(error, rank), indent=1)
        within(FILE_SECONDS, lambda: written.append(widest.directory.write(name, text)))
    return f"{widest.directory.path}/{name}" if any(written) else ""


def as_data(error: CollectiveMismatchError | ReplicasDivergedError | RemoteError, rank: int) -> dict[str, Any]:
    """Return what a file says of an error: its class and text, which rank wrote it, and its public attributes."""
    data: dict[str, Any] = {"class": type(error).__name__, "text": str(error), "written_by": rank}
    data |= {name: kept for name, kept in vars(error).items() if not name.startswith("_")}
    if isinstance(error, CollectiveMismatchError):
        data["calls"] = {number: dataclasses.asdict(call) for number, call in error.calls.items()}
    return data
