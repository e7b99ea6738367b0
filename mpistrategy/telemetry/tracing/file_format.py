"""The files in which ranks write down what they do: one for each rank, JSON lines, read by `mpistrategy trace`.

The first line is the header; every further line is an object with a `kind`:

* ``group``: the ranks of one strategy; its ``id`` is the same on all of them, and no other strategy's.
* ``what``: a collective in words: the call, operation, values, bytes, place in the program.
* ``thread``: a thread of the rank.
* ``call``: one collective: what, its group and number there, thread, and when it was entered and left.
* ``step``, ``span``: the same for a call of `Strategy.run`, and for what the program has named.
* ``inside``: a call, step or span that lasts already; the rank was in it to the end if no line says that it was left.
* ``alive``: at this time the rank was still in what it was in.
* ``lost``: so many events were not written.  ``end``: the recording was ended in order.

Numbers that refer to another line come after it.  Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a
machine share.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from typing import Any

FORMAT = "mpistrategy trace"
VERSION = 1
#: How the files are called.
PREFIX, SUFFIX = "rank-", ".jsonl"


def header(rank: int, size: int) -> dict[str, Any]:
    """Return the first line of this process's file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "size": size,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "program": _program(),
        "clock": clock_name(),
        "monotonic_ns": time.monotonic_ns(),
        "wall_ns": time.time_ns(),
        "begun": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def file_name(rank: int, attempt: int = 0) -> str:
    """Return a name for this process's file that no other job's, and no other process's, has."""
    now = f"{datetime.now():%Y%m%d-%H%M%S}"
    return f"{PREFIX}{rank}.{now}.{os.getpid()}{f'-{attempt}' if attempt else ''}{SUFFIX}"


def clock_name() -> str:
    """Return a name of the clock of time.monotonic() here: equal where two processes read one and the same."""
    boot = _first_line("/proc/sys/kernel/random/boot_id") or os.uname().nodename
    # A container may have a clock that is ahead of the machine's.
    ahead = " ".join(_first_line("/proc/self/timens_offsets").split()[1:])
    return boot if ahead.replace("0", "").strip() == "" else f"{boot} {ahead}"


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _program() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
