"""What this process sees of the GPUs of its node.

Nothing here runs unless a program asks for GPUs.  CuPy is imported only where it is installed, and the NVIDIA driver
shows a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from mpistrategy.mpi.gpu import numa
from mpistrategy.mpi.gpu.cuda_driver import NoGpus
from mpistrategy.mpi.shared_memory.spin_wait import cores


class Gpus(Protocol):
    """The GPUs that this process sees: its own numbers from 0 on."""

    def count(self) -> int:
        """Return how many they are."""

    def uuid(self, index: int) -> str:
        """Return the unique identity of a GPU: ``GPU-...`` or ``MIG-...``; "" if unknown."""

    def pci_bus_id(self, index: int) -> str:
        """Return its address on the PCI bus: ``0000:3b:00.0``; "" if unknown."""

    def numa_node(self, index: int) -> int | None:
        """Return the NUMA node that it is attached to; None if unknown."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as one process sees it.

    Attributes:
        index: its number in that process.
        uuid, pci_bus_id, numa_node: as in `Gpus`.
    """

    index: int
    uuid: str = ""
    pci_bus_id: str = ""
    numa_node: int | None = None

    def __str__(self) -> str:
        return f"GPU:{self.index} ({self.uuid or self.pci_bus_id or 'nameless'})"


@dataclass(frozen=True)
class Sight:
    """What one process sees.

    Attributes:
        gpus: by their index.
        distances: how far each NUMA node is from the cores of the process; empty if unknown.
        host: the name of the node.
        reason, fix, is_strange: as in `NoGpus`, where there is no GPU.
    """

    gpus: tuple[Gpu, ...] = ()
    distances: tuple[tuple[int, int], ...] = ()
    host: str = ""
    reason: str = ""
    fix: str = ""
    is_strange: bool = False

    def text(self) -> str:
        """Return it as a text for the other ranks."""
        import json  # here, for the quick import

        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Sight:
        """Return what `text` was made of."""
        import json  # here, for the quick import

        told = json.loads(text)
        told["gpus"] = tuple(Gpu(**each) for each in told["gpus"])
        told["distances"] = tuple((node, distance) for node, distance in told["distances"])
        return cls(**told)


def look() -> Sight:
    """Return what this process sees; never raises."""
    host = os.uname().nodename
    try:
        gpus = (_seen_through[-1] if _seen_through else usable)()
        seen = tuple(
            Gpu(index, gpus.uuid(index), gpus.pci_bus_id(index), gpus.numa_node(index)) for index in range(gpus.count())
        )
        if not seen:
            raise NoGpus(
                "no GPU that this process may use", "Ask for one (srun --gpus-per-task=1); see CUDA_VISIBLE_DEVICES"
            )
    except NoGpus as error:
        return Sight(host=host, reason=error.reason, fix=error.fix, is_strange=error.is_strange)
    except Exception as error:  # a rank that raised here would leave the others waiting
        reason = f"GPUs that cannot be looked at ({type(error).__name__}: {error})"
        return Sight(host=host, reason=reason, fix="See what nvidia-smi says on that node", is_strange=True)
    return Sight(seen, tuple(numa.distances(cores()).items()), host)


def identity(index: int) -> str:
    """Return the identity of the GPU with this number, unique in the cluster; "" if unknown.  Never raises."""
    sight = look()
    found = next((gpu for gpu in sight.gpus if gpu.index == index), None)
    if found is None:
        return ""
    return found.uuid or (found.pci_bus_id and f"{found.pci_bus_id} on {sight.host}")


def usable() -> Gpus:
    """Return the GPUs of this process that CuPy can use.

    Raises:
        NoGpus: when there is no CuPy or no driver, or one does not work.
    """
    install = "Install the CuPy of your driver: pip install cupy-cuda12x, or cupy-cuda13x"
    from importlib.util import find_spec  # here, for the quick import

    from mpistrategy.mpi.gpu.cuda_driver import CudaDriver

    if "cupy" not in sys.modules and find_spec("cupy") is None:
        raise NoGpus("CuPy is not installed", install)

    gpus = CudaDriver()
    if gpus.count() == 0:
        return gpus
    try:
        import cupy

        found = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a CuPy for another CUDA, an old driver, a missing library: of many types
        raise NoGpus(f"CuPy does not work here ({type(error).__name__}: {error})", install, is_strange=True) from error
    if found != gpus.count():
        raise NoGpus(f"CuPy sees {found} GPUs where the driver shows {gpus.count()}", install, is_strange=True)
    return gpus


_seen_through: list[Callable[[], Gpus]] = []


@contextmanager
def seen_through(gpus: Callable[[], Gpus]) -> Iterator[None]:
    """Let `look` see these GPUs in the block: for tests on machines without GPUs."""
    _seen_through.append(gpus)
    try:
        yield
    finally:
        _seen_through.pop()
