"""How much memory this process may still take: what the node has, and the limits of the control groups it runs in.

Shared memory that nobody can provide ends the process that touches it (SIGBUS, or the kernel's OOM killer), so that it
is asked for here first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

_MEMINFO, _CGROUP = "/proc/meminfo", "/proc/self/cgroup"
_MOUNT = "/sys/fs/cgroup"
#: Larger limits are none: cgroup v1 writes 2**63 rounded down to a page.
_NO_LIMIT = 2**60


class Room(NamedTuple):
    """What is left of something.

    Attributes:
        free: how many bytes may still be taken.
        total: how many there are in all.
        of: what it is, in words.
    """

    free: int
    total: int
    of: str


def memory() -> Room | None:
    """Return the least room of the node and of this process's control groups; None where the system says nothing."""
    rooms = [room for room in (_of_node(), *_of_groups()) if room is not None]
    return min(rooms, key=lambda room: room.free, default=None)


def file_system(folder: str) -> Room | None:
    """Return the room in the file system of `folder`; None where it cannot be asked."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return Room(state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize, folder)


def _of_node() -> Room | None:
    fields = _fields(_MEMINFO)
    if "MemAvailable" not in fields:
        return None
    return Room(fields["MemAvailable"] * 1024, fields.get("MemTotal", 0) * 1024, "the node's memory")


def _of_groups() -> Iterator[Room | None]:
    for line in _lines(_CGROUP):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for folder in _upwards(_MOUNT, path):
                yield _of_group(folder, "memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            for folder in _upwards(f"{_MOUNT}/memory", path):
                yield _of_group(
                    folder,
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    ("total_inactive_file", "total_active_file"),
                )


def _upwards(mount: str, path: str) -> Iterator[str]:
    """Yield the folder of a control group and of those above it; where a container hides them, what it shows."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield os.path.join(mount, *parts[:count])


def _of_group(folder: str, limit: str, usage: str, caches: tuple[str, ...]) -> Room | None:
    most, used = _number(f"{folder}/{limit}"), _number(f"{folder}/{usage}")
    if most is None or used is None or most >= _NO_LIMIT:
        return None
    # The pages of files are given up when memory runs short.
    cached = sum(_fields(f"{folder}/memory.stat").get(name, 0) for name in caches)
    return Room(max(0, most - used + cached), most, f"what {folder}/{limit} allows")


def _number(path: str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _fields(path: str) -> dict[str, int]:
    """Return the numbers of a file with lines such as ``MemFree:  123 kB`` or ``active_file 123``."""
    found = {}
    for line in _lines(path):
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return file.read(2**16).splitlines()
    return []
