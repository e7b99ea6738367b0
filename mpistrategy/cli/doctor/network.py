"""The networks between nodes: which MPI uses, as far as the process shows, and which are there."""

from __future__ import annotations

import os
from contextlib import suppress
from glob import glob
from pathlib import Path

#: What stands for a network where a process has it open.
_DEVICES = {
    "/dev/cxi": "Slingshot",
    "/dev/hfi1": "Omni-Path",
    "/dev/ipath": "Omni-Path",
    "/dev/infiniband/uverbs": "verbs",
}


def network(folder: str = "/proc/self/fd") -> str:
    """Return what messages between nodes go by: Slingshot, Omni-Path, verbs or TCP; "" where it cannot be seen."""
    opened = []
    for link in glob(f"{folder}/*"):  # none without /proc
        with suppress(OSError):  # closed meanwhile
            opened.append(os.readlink(link))
    kinds = (kind for device, kind in _DEVICES.items() if any(path.startswith(device) for path in opened))
    return next(kinds, "TCP" if opened else "")


def fabric(root: str = "/sys/class") -> str:
    """Return the fast network of this node: InfiniBand, RoCE, Slingshot or EFA; "" where none is seen."""
    if glob(f"{root}/cxi/*"):
        return "Slingshot"
    drivers = map(os.path.realpath, glob(f"{root}/infiniband/*/device/driver"))
    if "efa" in map(os.path.basename, drivers):
        return "EFA"
    layers = []
    for path in glob(f"{root}/infiniband/*/ports/*/link_layer"):
        with suppress(OSError):
            layers.append(Path(path).read_text(encoding="utf-8").strip())
    return "InfiniBand" if "InfiniBand" in layers else "RoCE" if layers else ""
