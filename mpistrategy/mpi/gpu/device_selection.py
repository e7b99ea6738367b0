"""Which device this rank drives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpistrategy.arrays import devices
from mpistrategy.arrays.devices import Device
from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.errors import DeviceError, FallbackWarning, OptionTypeError
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.nearest import did_you_mean

_WHERE = "MirroredStrategy"
_WORDS = ("auto", "gpu", "cpu", "shared")
_EXPECTED = f"a list of device strings, {', '.join(map(repr, _WORDS))}, or None"


@dataclass(frozen=True)
class Request:
    """What a program wants its ranks to drive.

    Attributes:
        word: "cpu", "auto", "gpu" or "shared"; the same on all ranks.
        index: the number of this rank's device, where the program named it.
    """

    word: str
    index: int | None = None

    def __str__(self) -> str:
        return self.word if self.index is None else f"a list of {self.word.upper()}s"


def requested(wanted: Any, local_rank: int, local_size: int) -> Request:
    """Read the argument `devices` of a strategy.

    Args:
        wanted: one of the words; a list of device strings, one for each rank of this node in order; None or an empty
            list mean "cpu".
        local_rank: this rank's index on its node.
        local_size: how many ranks the node has.

    Raises:
        DeviceError: for a list shorter than the ranks on the node, one with CPUs and GPUs for them, a CPU that is
            repeated or does not exist.
        OptionTypeError: for something else.
    """
    if wanted is None or (isinstance(wanted, (list, tuple)) and not wanted):
        return Request("cpu")
    if isinstance(wanted, str) and wanted.lower() in _WORDS:
        return Request(wanted.lower())
    if not isinstance(wanted, (list, tuple)) or not all(isinstance(text, str) for text in wanted):
        raise OptionTypeError.at(
            _WHERE, found=f"devices={wanted!r}", expected=_EXPECTED, fix=did_you_mean(wanted, _WORDS)
        )
    given = [devices.parse(text, _WHERE, "devices") for text in wanted]
    parsed = [Device(None, device.kind or "CPU", device.index or 0) for device in given]
    _refuse_repeated(wanted, parsed)
    if len(parsed) < local_size:
        raise DeviceError.at(
            _WHERE,
            found=f"{len(parsed)} devices for {local_size} ranks on this node",
            expected="at least one device for each rank of the node",
            fix="Name more devices, start fewer ranks, or leave devices out.",
        )
    if len({device.kind for device in parsed[:local_size]}) > 1:
        raise DeviceError.at(_WHERE, found=f"devices={wanted!r}", expected="either CPUs or GPUs, for all ranks alike")
    mine = parsed[local_rank]
    if mine.kind == "CPU":
        check_exists(mine, _WHERE, local_size)
    return Request(str(mine.kind).lower(), mine.index)


def choose_device(request: Request, ranks: Ranks) -> Device:
    """Return the complete device of this rank.  Collective, after the ranks agreed on the word of the request.

    Raises:
        DeviceError: on every rank alike, when a rank can have no GPU and should, or would have to share one.
    """
    if request.word == "cpu":
        return Device(ranks.rank, "CPU", request.index or 0)
    from mpistrategy.mpi.gpu import binding, inventory  # here, for the quick import

    told = [text.partition(" ") for text in ranks.allgather_text(f"{_text(request.index)} {inventory.look().text()}")]
    sights = [inventory.Sight.read(sight) for _, _, sight in told]
    if request.word == "auto":
        bound, reason = binding.bind_if_possible(sights, ranks.node_of)
        if reason and ranks.rank == 0:
            warn(f'devices="auto": all ranks work on CPUs. {reason}', FallbackWarning)
    else:
        named = [int(index) if index != "-" else None for index, _, _ in told]
        bound = binding.bind(sights, ranks.node_of, sharing=request.word == "shared", named=named)
    if not bound:
        return Device(ranks.rank, "CPU", 0)
    return Device(ranks.rank, "GPU", bound[ranks.rank].index)


def activate(device: Device, guard: Guard) -> None:
    """Let CuPy work on this device, where it is a GPU: from now on in this thread, and in any in a collective."""
    if device.kind == "GPU":
        cuda = cupy_for(_WHERE).cuda
        cuda.Device(device.index).use()
        guard.on_gpu = partial(cuda.Device, device.index)


def check_exists(device: Device, where: str, local_size: int = 1) -> None:
    """Raise DeviceError unless this process has the device.

    A CPU index is a share of the cores: there are as many as cores, or as ranks on the node if these are more.
    """
    if device.kind == "GPU":
        from mpistrategy.mpi.gpu import inventory  # here, for the quick import

        sight = inventory.look()
        if not sight.gpus:
            raise DeviceError.at(where, found=f"device {device}, and {sight.reason}", expected="a GPU", fix=sight.fix)
        if device.index not in [gpu.index for gpu in sight.gpus]:
            seen = ", ".join(map(str, sight.gpus))
            raise DeviceError.at(where, found=f"device {device}, and {seen}", expected="a GPU that this process sees")
        return
    cores = max(os.cpu_count() or 1, local_size)
    if device.index is not None and device.index >= cores:
        raise DeviceError.at(where, found=f"device {device}", expected=f"an index below {cores} on this node")


def _refuse_repeated(texts: Sequence[str], parsed: list[Device]) -> None:
    # The same number of a GPU may be another one in each rank: the GPUs themselves are compared later.
    for index, device in enumerate(parsed):
        if device.kind == "CPU" and device in parsed[:index]:
            raise DeviceError.at(_WHERE, found=f"device {texts[index]!r} twice", expected="each device once")


def _text(index: int | None) -> str:
    return "-" if index is None else str(index)
