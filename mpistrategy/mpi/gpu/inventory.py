"""What this process sees of the GPUs of its node, by CuPy.  Nothing here runs unless a program asks for GPUs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from mpistrategy.errors import DeviceError
from mpistrategy.mpi.shared_memory.spin_wait import cores

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
        named: the number of the GPU that the program names for this rank; None where it names none.
        reason: why there is no GPU, in words.
        fix: what a user who wants GPUs should do; the beginning of a sentence.
        is_strange: whether something is installed and does not work, so that a fallback needs a warning.
    """

    gpus: tuple[Gpu, ...] = ()
    host: str = ""
    named: int | None = None
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
        """Return what `text` was made of."""
        gpus, *others = json.loads(text)
        return cls(tuple(Gpu(*each) for each in gpus), *others)


def look(named: int | None = None) -> Sight:
    """Return what this process sees; never raises: the other ranks wait for what it tells them."""
    host = os.uname().nodename
    try:
        return Sight(visible_gpus(), host, named)
    except DeviceError as error:
        return Sight((), host, named, error.found, error.fix)
    except Exception as error:  # a CuPy for another CUDA, an old driver, a missing library: of many types
        reason = f"CuPy does not work here ({type(error).__name__}: {error})"
        return Sight((), host, named, reason, f"{_INSTALL}; and see what nvidia-smi says there", is_strange=True)


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CuPy can use in this process; what is visible is decided by the driver.

    Raises:
        DeviceError: where there is none, or no CuPy.
        Exception: of CuPy's own types, where it does not work.
    """
    from importlib.util import find_spec  # here, for the quick import

    if "cupy" not in sys.modules and find_spec("cupy") is None:
        raise DeviceError.at("GPUs", found="CuPy is not installed", expected="CuPy", fix=_INSTALL)
    import cupy

    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if runtime.driverGetVersion() and error.status != _NO_DEVICE:  # without a driver the version is 0
            raise
        count = 0
    if not count:
        raise DeviceError.at(
            "GPUs",
            found="no NVIDIA driver here, or no GPU that this process may use",
            expected="a GPU",
            fix="Ask for one (srun --gpus-per-task=1); see CUDA_VISIBLE_DEVICES",
        )
    return tuple(_gpu(runtime, index) for index in range(count))


def _gpu(runtime: Any, index: int) -> Gpu:
    place = str(runtime.deviceGetPCIBusId(index)).lower()
    # Parts of one GPU (MIG) have one place.  CuPy cuts a UUID off at a byte of 0; it may even begin with one.
    uuid: bytes = runtime.getDeviceProperties(index).get("uuid", b"")
    name = f"GPU-{uuid.hex()} at {place}" if uuid else f"{place} on {os.uname().nodename}"
    return Gpu(name, distance(place, cores()))


def distance(pci_bus_id: str, mine: Iterable[int], system: str = "/sys") -> int:
    """Return how far a GPU is from the nearest of these cores; 0 where the system does not tell.

    Args:
        pci_bus_id: the address of the GPU, such as ``0000:3b:00.0``.
        mine: the numbers of the cores.
        system: where the system describes itself.
    """
    with suppress(OSError, ValueError, KeyError):
        home = int(Path(system, "bus/pci/devices", pci_bus_id, "numa_node").read_text())  # -1: unknown
        row = Path(system, f"devices/system/node/node{home}/distance").read_text().split()
        nodes = sorted(int(path.rpartition("node")[2]) for path in glob(f"{system}/devices/system/node/node[0-9]*"))
        far = dict(zip(nodes, map(int, row), strict=True))
        beside = [path for core in mine for path in glob(f"{system}/devices/system/cpu/cpu{core}/node[0-9]*")]
        return min(far[int(path.rpartition("node")[2])] for path in beside)
    return 0
