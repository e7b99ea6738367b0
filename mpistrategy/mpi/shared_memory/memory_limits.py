"""How much memory this process may still take: the free memory of the node, and the limits of control groups.

Touching shared memory that is not there ends the process (SIGBUS, or the kernel's OOM killer): limits are read first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

_MEMINFO, _CGROUP = "/proc/meminfo", "/proc/self/cgroup"
_MOUNT = "/sys/fs/cgroup"
#: From here on there is no limit: cgroup v1 writes 2**63 rounded down to a page.
_NO_LIMIT = 2**60
#: By the controller that a line of `_CGROUP` names, "" in version 2: the folder; the files of the limit and of what is
#: used; and in memory.stat cached pages of files, which the system drops when memory runs short.
_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file", "active_file"),
    "memory": (
        *("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        *("total_inactive_file", "total_active_file"),
    ),
}


class Room(NamedTuple):
    """Room in a memory: free bytes, bytes in all, and its name in words."""

    free: int
    total: int
    of: str


def memory() -> Room | None:
    """Return the least room of the node and of this process's control groups; None where the system does not say."""
    return min(filter(None, (_of_node(), *_of_groups())), key=lambda room: room.free, default=None)


def _of_node() -> Room | None:
    fields = _fields(_MEMINFO)
    if "MemAvailable" not in fields:
        return None
    return Room(fields["MemAvailable"] * 1024, fields.get("MemTotal", 0) * 1024, "the node's memory")


def _of_groups() -> Iterator[Room | None]:
    """Yield the room in the groups of this process and in the groups above, as far as a container shows them."""
    for line in _lines(_CGROUP):
        controllers, _, path = line.partition(":")[2].partition(":")
        parts = [part for part in path.split("/") if part and part != ".."]
        for controller in set(controllers.split(",")) & _FILES.keys():
            top, *files = _FILES[controller]
            for count in range(len(parts) + 1):
                yield _of_group(os.path.join(_MOUNT, top, *parts[:count]), *files)


def _of_group(folder: str, limit: str, usage: str, *caches: str) -> Room | None:
    most, used = _number(f"{folder}/{limit}"), _number(f"{folder}/{usage}")
    if most is None or used is None or most >= _NO_LIMIT:
        return None
    cached = sum(_fields(f"{folder}/memory.stat").get(name, 0) for name in caches)
    return Room(max(0, most - used + cached), most, f"what {folder}/{limit} allows")


def _number(path: str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _fields(path: str) -> dict[str, int]:
    """Return the numbers of a file with lines such as ``MemFree:  123 kB`` or ``active_file 123``."""
    rows = (line.replace(":", " ").split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return file.read(2**16).splitlines()
    return []
