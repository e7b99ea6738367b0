"""Device strings in TensorFlow's spelling: ``/job:worker/replica:0/task:3/device:GPU:0``.

The task is the rank.  Parts may be left out: ``GPU:0`` (that device of any rank), ``task:3`` or ``/task:3`` (the device
of rank 3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mpistrategy.errors import DeviceError

_FORM = re.compile(
    r"(?P<job>/job:worker)?(?P<replica>/replica:0)?(?:/task:(?P<task>[0-9]+))?"
    r"(?:/(?:device:)?(?P<kind>CPU|GPU)(?::(?P<index>[0-9]+|\*))?)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Device:
    """One device, or a pattern for several: a field that is None matches everything.

    Attributes:
        task: the rank that drives the device.
        kind: "CPU" or "GPU".
        index: the number of the device.  A CPU is a share of the node's cores; GPUs are numbered among those visible
            to the rank's process.
    """

    task: int | None = None
    kind: str | None = None
    index: int | None = None

    def __str__(self) -> str:
        place = "" if self.task is None else f"/job:worker/replica:0/task:{self.task}"
        index = "*" if self.index is None else self.index
        return place if self.kind is None else f"{place}/device:{self.kind}:{index}"

    def matches(self, other: Device) -> bool:
        """Return whether the complete device `other` matches this pattern."""
        return all(
            field in (None, value)
            for field, value in ((self.task, other.task), (self.kind, other.kind), (self.index, other.index))
        )


@lru_cache(maxsize=1024)
def parse(text: str, where: str = "a device string", argument: str = "device") -> Device:
    """Read a device string.

    Args:
        text: the string.
        where, argument: the public call and the name of its argument; for the error.

    Raises:
        DeviceError: for an empty string, an unknown part, or a device kind other than CPU and GPU.
    """
    match = _FORM.fullmatch(f"/{text.strip().strip('/')}")
    if match is None or not any(match.groups()):
        raise DeviceError.at(
            where,
            found=f"{argument}={text!r}",
            expected="a device such as 'CPU:0', 'GPU:1', 'task:3', or '/job:worker/replica:0/task:3/device:GPU:0'",
        )
    task, kind, index = match["task"], match["kind"], match["index"]
    return Device(
        None if task is None else int(task),
        None if kind is None else kind.upper(),
        None if index in (None, "*") else int(index),
    )


def gpu_of(devices: Sequence[Device], rank: int) -> int | None:
    """Return the number of the GPU that a rank drives; None for a CPU, and where the devices are not known."""
    return devices[rank].index if devices and devices[rank].kind == "GPU" else None
