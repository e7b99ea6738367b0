"""Which device this rank drives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpistrategy import devices
from mpistrategy.devices import Device
from mpistrategy.errors import DeviceError, OptionTypeError

_WHERE = "MirroredStrategy"


def choose_device(wanted: Any, rank: int, local_rank: int, local_size: int) -> Device:
    """Return the complete device of this rank.

    Args:
        wanted: a list of device strings, one for each rank of this node in order; None or an empty list means
            automatic.
        rank: this rank's number.
        local_rank: its index on its node.
        local_size: how many ranks the node has.

    Raises:
        DeviceError: for a list shorter than the ranks on the node, a repeated or an impossible device.
        OptionTypeError: for something that is no list of strings.
    """
    if wanted is None or (isinstance(wanted, (list, tuple)) and not wanted):
        return Device(rank, "CPU", 0)
    if not isinstance(wanted, (list, tuple)) or not all(isinstance(text, str) for text in wanted):
        raise OptionTypeError.at(_WHERE, found=f"devices={wanted!r}", expected="a list of device strings, or None")
    parsed = [Device(None, device.kind or "CPU", device.index or 0) for device in map(devices.parse, wanted)]
    _refuse_repeated(wanted, parsed)
    if len(parsed) < local_size:
        raise DeviceError.at(
            _WHERE,
            found=f"{len(parsed)} devices for {local_size} ranks on this node",
            expected="at least one device for each rank of the node",
            fix="Name more devices, start fewer ranks, or leave devices out.",
        )
    mine = parsed[local_rank]
    device = Device(rank, mine.kind, mine.index)
    check_exists(device, _WHERE, local_size)
    return device


def check_exists(device: Device, where: str, local_size: int = 1) -> None:
    """Raise DeviceError unless this machine has the device.

    A CPU index is a share of the cores: there are as many as cores, or as ranks on the node if these are more.
    """
    if device.kind == "GPU":
        raise DeviceError.at(
            where,
            found=f"device {device}",
            expected="a CPU device",
            fix="This version of mpistrategy works on NumPy arrays; use 'CPU:0' or leave devices out.",
        )
    cores = max(os.cpu_count() or 1, local_size)
    if device.index is not None and device.index >= cores:
        raise DeviceError.at(where, found=f"device {device}", expected=f"an index below {cores} on this node")


def _refuse_repeated(texts: Sequence[str], parsed: list[Device]) -> None:
    for index, device in enumerate(parsed):
        if device in parsed[:index]:
            raise DeviceError.at(_WHERE, found=f"device {texts[index]!r} twice", expected="each device once")
