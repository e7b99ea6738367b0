"""What this process sees of the GPUs of its node, by CuPy, and which device this rank drives.

Which GPU is a function of what all ranks see, which every rank computes alike: in rank order, ranks that see fewer GPUs
first, each rank takes the free GPU nearest to its cores.  Nothing here looks unless a program asks for GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from mpistrategy.arrays.convert import cupy_for
from mpistrategy.arrays.devices import Device, parse
from mpistrategy.errors import DeviceError, FallbackWarning, OptionTypeError
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.shown import did_you_mean, ranks_in_words

_INSTALL = "Install the CuPy of your driver: pip install cupy-cuda12x, or cupy-cuda13x"
_NO_DEVICE = 100  # cudaErrorNoDevice


class Gpu(NamedTuple):
    """A GPU as a process sees it, whose number there is its place among all of them.

    Attributes:
        name: unique in the cluster: the UUID that ``nvidia-smi -L`` shows, and the address on the PCI bus of its node.
        distance: from the cores of the process, as the system counts it between NUMA nodes: 10 is beside them, more is
            further away; 0 where it does not tell.
    """

    name: str
    distance: int = 0


class Sight(NamedTuple):
    """What one process sees.

    Attributes:
        gpus: in its order.
        host: the name of the node.
        device_index: the number of the GPU that the program names for this rank; None without a name.
        reason: why there is no GPU, in words.
        fix: advice for a user who wants GPUs; the beginning of a sentence.
        is_strange: whether something is installed and does not work, so that a fallback needs a warning.
    """

    gpus: tuple[Gpu, ...] = ()
    host: str = ""
    device_index: int | None = None
    reason: str = ""
    fix: str = ""
    is_strange: bool = False

    @property
    def shown(self) -> str:
        """The GPUs in words."""
        return ", ".join(f"GPU:{number} ({gpu.name})" for number, gpu in enumerate(self.gpus))

    def text(self) -> str:
        """Return it as a text for the other ranks."""
        return json.dumps(self)

    @classmethod
    def read(cls, text: str) -> Sight:
        """Return the `Sight` of a `text`."""
        gpus, *fields = json.loads(text)
        return cls(tuple(Gpu(*arguments) for arguments in gpus), *fields)


def look(device_index: int | None = None) -> Sight:
    """Return the GPUs that this process sees; never raises: the other ranks wait for the result."""
    host = os.uname().nodename
    try:
        gpus, reason, fix = visible_gpus()
    except Exception as error:  # a CuPy for another CUDA, an old driver, a missing library: of many types
        reason = f"CuPy does not work here ({type(error).__name__}: {error})"
        return Sight((), host, device_index, reason, f"{_INSTALL}; and see what nvidia-smi says there", is_strange=True)
    return Sight(gpus, host, device_index, reason, fix)


def visible_gpus() -> tuple[tuple[Gpu, ...], str, str]:
    """Return the GPUs that CuPy can use in this process; without any, why, and advice.

    The driver decides which are visible.

    Raises:
        Exception: of CuPy's own types, where it does not work.
    """
    from importlib.util import find_spec  # here, for the quick import

    if "cupy" not in sys.modules and find_spec("cupy") is None:
        return (), "CuPy is not installed", _INSTALL
    import cupy

    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if runtime.driverGetVersion() and error.status != _NO_DEVICE:  # without a driver the version is 0
            raise
        count = 0
    if not count:
        return (
            (),
            "no NVIDIA driver here, or no GPU that this process may use",
            "Ask for one (srun --gpus-per-task=1); see CUDA_VISIBLE_DEVICES",
        )
    return tuple(_gpu(runtime, index) for index in range(count)), "", ""


def _gpu(runtime: Any, index: int) -> Gpu:
    place = str(runtime.deviceGetPCIBusId(index)).lower()
    # Parts of one GPU (MIG) have one place.  CuPy cuts a UUID off at a byte of 0; it may even begin with one.
    uuid: bytes = runtime.getDeviceProperties(index).get("uuid", b"")
    name = f"GPU-{uuid.hex()} at {place}" if uuid else f"{place} on {os.uname().nodename}"
    return Gpu(name, distance(place, os.sched_getaffinity(0)))


def distance(pci_bus_id: str, own_cores: Iterable[int], system: str = "/sys") -> int:
    """Return how far a GPU is from the nearest of these cores; 0 where the system does not tell.

    Args:
        pci_bus_id: the address of the GPU, such as ``0000:3b:00.0``.
        own_cores: the numbers of the cores.
        system: where the system describes itself.
    """
    with suppress(OSError, ValueError, KeyError):
        home = int(Path(system, "bus/pci/devices", pci_bus_id, "numa_node").read_text())  # -1: unknown
        row = Path(system, f"devices/system/node/node{home}/distance").read_text().split()
        nodes = sorted(int(path.rpartition("node")[2]) for path in glob(f"{system}/devices/system/node/node[0-9]*"))
        far = dict(zip(nodes, map(int, row), strict=True))
        beside = [path for core in own_cores for path in glob(f"{system}/devices/system/cpu/cpu{core}/node[0-9]*")]
        return min(far[int(path.rpartition("node")[2])] for path in beside)
    return 0


_WHERE = "MirroredStrategy"
_WORDS = ("auto", "gpu", "cpu", "shared")


@dataclass(frozen=True)
class Request:
    """What a program wants its ranks to drive.

    Attributes:
        word: "cpu", "auto", "gpu", "shared", or "a list of CPUs" or "of GPUs"; the same on all ranks.
        index: the number of this rank's device, where the program named it.
    """

    word: str
    index: int | None = None


def requested(devices: Any, local_rank: int, local_size: int) -> Request:
    """Read the argument `devices` of a strategy.

    Args:
        devices: one of the words; a list of device strings, one for each rank of this node in order; None or an empty
            list mean "cpu".
        local_rank: this rank's index on its node.
        local_size: how many ranks the node has.

    Raises:
        DeviceError: for a list shorter than the ranks on the node, one with CPUs and GPUs for them, a CPU that is
            repeated or does not exist.
        OptionTypeError: for something else.
    """
    if devices is None or (isinstance(devices, (list, tuple)) and not devices):
        return Request("cpu")
    if isinstance(devices, str) and devices.lower() in _WORDS:
        return Request(devices.lower())
    if not isinstance(devices, (list, tuple)) or not all(isinstance(text, str) for text in devices):
        raise OptionTypeError.at(
            _WHERE,
            found=f"devices={devices!r}",
            expected=f"a list of device strings, {', '.join(map(repr, _WORDS))}, or None",
            fix=did_you_mean(devices, _WORDS),
        )
    partial_devices = [parse(text, _WHERE, "devices") for text in devices]
    parsed = [Device(None, device.kind or "CPU", device.index or 0) for device in partial_devices]
    for index, device in enumerate(parsed):  # one number of a GPU may be another GPU in each rank: `bind` compares them
        if device.kind == "CPU" and device in parsed[:index]:
            raise DeviceError.at(_WHERE, found=f"device {devices[index]!r} twice", expected="each device once")
    if len(parsed) < local_size:
        raise DeviceError.at(
            _WHERE,
            found=f"{len(parsed)} devices for {local_size} ranks on this node",
            expected="at least one device for each rank of the node",
            fix="Name more devices, start fewer ranks, or leave devices out.",
        )
    if len({device.kind for device in parsed[:local_size]}) > 1:
        raise DeviceError.at(_WHERE, found=f"devices={devices!r}", expected="either CPUs or GPUs, for all ranks alike")
    own_device = parsed[local_rank]
    if own_device.kind == "CPU":
        check_exists(own_device, _WHERE, local_size)
    return Request(f"a list of {own_device.kind}s", own_device.index)


def choose_devices(request: Request, ranks: Ranks) -> tuple[Device, ...]:
    """Return the device of each rank.  Collective, after the ranks agreed on the word of the request.

    Raises:
        DeviceError: on every rank alike, when a rank cannot have its GPU, or would have to share it.
    """
    if request.word == "a list of CPUs":
        numbers = [int(text) for text in ranks.allgather_text(str(request.index))]
        return tuple(Device(rank, "CPU", number) for rank, number in enumerate(numbers))
    sights = [Sight.read(text) for text in ranks.allgather_text(look(request.index).text())]
    try:
        bound = bind(sights, sharing=request.word == "shared")
        return tuple(Device(rank, "GPU", number) for rank, number in enumerate(bound))
    except DeviceError as error:
        if request.word != "auto":
            raise
        if ranks.rank == 0 and any(sight.gpus or sight.is_strange for sight in sights):
            warn(f'devices="auto": all ranks work on CPUs. {error}', FallbackWarning)
    return tuple(Device(rank, "CPU", 0) for rank in range(ranks.size))


def bind(sights: Sequence[Sight], *, sharing: bool = False) -> tuple[int, ...]:
    """Return the number of each rank's GPU, from the GPUs that each rank sees.

    Args:
        sights: the GPUs that each rank sees.
        sharing: whether ranks may share a GPU where there are not enough; as evenly as can be, then.

    Raises:
        DeviceError: when a rank does not see its GPU, or when ranks would have to share a GPU.
    """
    _check_that_all_see(sights)
    choices = [
        [number for number in range(len(sight.gpus)) if sight.device_index in (None, number)] for sight in sights
    ]
    holders, bound = Counter[str](), dict[int, int]()
    for rank in sorted(range(len(sights)), key=lambda rank: len(choices[rank])):
        gpus = sights[rank].gpus
        number = min(choices[rank], key=lambda index: (holders[gpus[index].name], gpus[index].distance))
        name = gpus[number].name
        if holders[name] and not sharing:
            names = [{peer.gpus[n].name for n in numbers} for peer, numbers in zip(sights, choices, strict=True)]
            raise _shortage(names, rank, sights[rank])
        holders[name] += 1
        bound[rank] = number
    return tuple(bound[rank] for rank in range(len(sights)))


def _check_that_all_see(sights: Sequence[Sight]) -> None:
    for rank, sight in enumerate(sights):
        if not sight.gpus:
            peers = [peer for peer, peer_sight in enumerate(sights) if peer_sight.reason == sight.reason]
            more = len({sights[peer].host for peer in peers}) - 1
            where = f"{sight.host}{f' and {more} more nodes' if more else ''}"
            raise DeviceError.at(
                _WHERE,
                found=f"{sight.reason} on {ranks_in_words(peers)} ({where})",
                expected="a GPU for each rank",
                fix=f'{sight.fix}; for CPUs leave devices out, or give devices="cpu".',
            )
        if sight.device_index is not None and sight.device_index >= len(sight.gpus):
            raise DeviceError.at(
                _WHERE,
                found=f"GPU:{sight.device_index} for rank {rank}, which sees {sight.shown}",
                expected="a GPU that the rank sees",
                fix='devices="gpu" takes those that are there, whatever their numbers.',
            )


def _shortage(open_to: Sequence[set[str]], rank: int, sight: Sight) -> DeviceError:
    """Return the error of ranks that have too few GPUs between them: the ranks that may take only this rank's GPUs."""
    gpus = open_to[rank]
    ranks = [peer for peer, names in enumerate(open_to) if names <= gpus]
    count = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}"
    fix = "Name another GPU for each rank of the node"
    if sight.device_index is None:
        fix = (
            f"Start at most {len(gpus)} rank{'s' * (len(gpus) > 1)} there or, if {sight.host} has more GPUs, let "
            "each rank see its own or all of them (srun --gpus-per-task=1, or no CUDA_VISIBLE_DEVICES)"
        )
    return DeviceError.at(
        _WHERE,
        found=f"{ranks_in_words(ranks)} on {sight.host} with {count} between them: {', '.join(sorted(gpus))}",
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

    A CPU index is a share of the cores: there are as many as cores, or as ranks on the node if those are more.
    """
    index = device.index or 0
    if device.kind == "GPU":
        sight = look()
        if index >= len(sight.gpus):
            raise DeviceError.at(
                where,
                found=f"device {device}, and {sight.reason or sight.shown}",
                expected="a GPU that this process sees",
                fix=sight.fix,
            )
    elif index >= (cores := max(os.cpu_count() or 1, local_size)):
        raise DeviceError.at(where, found=f"device {device}", expected=f"an index below {cores} on this node")
