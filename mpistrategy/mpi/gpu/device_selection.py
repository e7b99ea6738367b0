"""Which device this rank drives.

Which GPU is a function of what all ranks see, which every rank computes alike: in rank order, those that see fewer
first, each takes the nearest to its cores of those that are free.
"""

from __future__ import annotations

import os
from collections import Counter
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
from mpistrategy.mpi.gpu.inventory import Sight, look
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.nearest import did_you_mean
from mpistrategy.objects.shown import ranks_in_words

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
    for index, device in enumerate(parsed):  # one number of a GPU may be another GPU in each rank: `bind` compares them
        if device.kind == "CPU" and device in parsed[:index]:
            raise DeviceError.at(_WHERE, found=f"device {wanted[index]!r} twice", expected="each device once")
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
    sights = [Sight.read(text) for text in ranks.allgather_text(look(request.index).text())]
    try:
        return Device(ranks.rank, "GPU", bind(sights, sharing=request.word == "shared")[ranks.rank])
    except DeviceError as error:
        if request.word != "auto":
            raise
        if ranks.rank == 0 and any(sight.gpus or sight.is_strange for sight in sights):
            warn(f'devices="auto": all ranks work on CPUs. {error}', FallbackWarning)
    return Device(ranks.rank, "CPU", 0)


def bind(sights: Sequence[Sight], *, sharing: bool = False) -> tuple[int, ...]:
    """Return the number of each rank's GPU, from what each rank sees.

    Args:
        sights: what each rank sees.
        sharing: whether ranks may share a GPU where there are not enough; as evenly as can be, then.

    Raises:
        DeviceError: when a rank sees no GPU or not the one that it was told, or when ranks would have to share one.
    """
    _check_that_all_see(sights)
    choices = [[number for number in range(len(sight.gpus)) if sight.named in (None, number)] for sight in sights]
    holders, bound = Counter[str](), dict[int, int]()
    for rank in sorted(range(len(sights)), key=lambda rank: len(choices[rank])):
        gpus = sights[rank].gpus
        number = min(choices[rank], key=lambda each: (holders[gpus[each].name], gpus[each].distance))
        name = gpus[number].name
        if holders[name] and not sharing:
            names = [{each.gpus[n].name for n in those} for each, those in zip(sights, choices, strict=True)]
            raise _shortage(names, rank, sights[rank])
        holders[name] += 1
        bound[rank] = number
    return tuple(bound[rank] for rank in range(len(sights)))


def _check_that_all_see(sights: Sequence[Sight]) -> None:
    for rank, sight in enumerate(sights):
        if not sight.gpus:
            alike = [other for other, each in enumerate(sights) if not each.gpus and each.reason == sight.reason]
            more = len({sights[other].host for other in alike}) - 1
            where = f"{sight.host}{f' and {more} more nodes' if more else ''}"
            raise DeviceError.at(
                _WHERE,
                found=f"{sight.reason} on {ranks_in_words(alike)} ({where})",
                expected="a GPU for each rank",
                fix=f'{sight.fix}; for CPUs leave devices out, or give devices="cpu".',
            )
        if sight.named is not None and sight.named >= len(sight.gpus):
            raise DeviceError.at(
                _WHERE,
                found=f"GPU:{sight.named} for rank {rank}, which sees {sight.shown}",
                expected="a GPU that the rank sees",
                fix='devices="gpu" takes those that are there, whatever their numbers.',
            )


def _shortage(open_to: Sequence[set[str]], rank: int, sight: Sight) -> DeviceError:
    """Return the error of ranks that have too few GPUs between them: those that may take no others than this rank."""
    wanted = open_to[rank]
    ranks = [other for other, names in enumerate(open_to) if names <= wanted]
    count = f"{len(wanted)} GPU{'s' * (len(wanted) > 1)}"
    fix = "Name another GPU for each rank of the node"
    if sight.named is None:
        fix = (
            f"Start at most {len(wanted)} rank{'s' * (len(wanted) > 1)} there or, if {sight.host} has more GPUs, let "
            "each rank see its own or all of them (srun --gpus-per-task=1, or no CUDA_VISIBLE_DEVICES)"
        )
    return DeviceError.at(
        _WHERE,
        found=f"{ranks_in_words(ranks)} on {sight.host} with {count} between them: {', '.join(sorted(wanted))}",
        expected="a GPU for each rank",
        fix=f'{fix}; to share on purpose give devices="shared".',
    )


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
    index = device.index or 0
    if device.kind == "GPU":
        sight = look()
        if index >= len(sight.gpus):
            seen = sight.reason or sight.shown
            expected = "a GPU that this process sees"
            raise DeviceError.at(where, found=f"device {device}, and {seen}", expected=expected, fix=sight.fix)
    elif index >= (cores := max(os.cpu_count() or 1, local_size)):
        raise DeviceError.at(where, found=f"device {device}", expected=f"an index below {cores} on this node")
