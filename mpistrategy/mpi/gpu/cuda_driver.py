"""The GPUs that NVIDIA's driver shows this process, in CUDA's order; without CuPy, and without a context on any.

What is visible (CUDA_VISIBLE_DEVICES, a container, a Slurm cgroup) is decided by the driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from uuid import UUID

from mpistrategy.mpi.gpu import numa
from mpistrategy.objects.text import decoded

_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100
_HOST_NUMA_ID = 134
_ASK = "Ask for nodes with GPUs"


class NoGpus(Exception):  # noqa: N818  (no mistake of anybody's)
    """Why this process can use no GPU.

    Args:
        reason: in words.
        fix: what a user who wants GPUs should do; the beginning of a sentence.
        is_strange: whether something is installed and does not work, so that a fallback needs a warning.
    """

    def __init__(self, reason: str, fix: str, *, is_strange: bool = False) -> None:
        super().__init__(reason)
        self.reason: str = reason
        self.fix: str = fix
        self.is_strange: bool = is_strange


class CudaDriver:
    """What `mpistrategy.mpi.gpu.inventory.Gpus` asks for.

    Args:
        library: the loaded driver; None loads it.

    Raises:
        NoGpus: when there is no driver, or it does not work.
    """

    def __init__(self, library: Any = None) -> None:
        if library is None:
            try:
                library = ctypes.CDLL(_LIBRARY)
            except OSError as error:
                raise NoGpus(f"no NVIDIA driver here ({error})", _ASK) from error
        self._cuda = library
        code = library.cuInit(0)
        if code == _NO_DEVICE:
            self._count = 0
            return
        self._check(code, "cuInit")
        count = ctypes.c_int()
        self._check(library.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        self._count = count.value

    def count(self) -> int:
        """Return how many GPUs this process sees."""
        return self._count

    def uuid(self, index: int) -> str:
        """Return the unique identity of a GPU, or of a MIG device; "" if unknown."""
        device = self._device(index)
        whole = self._uuid("cuDeviceGetUuid", device)
        part = self._uuid("cuDeviceGetUuid_v2", device) or whole  # drivers before 470 have only this one
        if part is None:
            return ""
        return f"{'GPU' if whole in (None, part) else 'MIG'}-{part}"

    def pci_bus_id(self, index: int) -> str:
        """Return the address of a GPU on the PCI bus: ``0000:3b:00.0``; "" if unknown."""
        text = ctypes.create_string_buffer(32)
        code = self._cuda.cuDeviceGetPCIBusId(text, len(text), self._device(index))
        return "" if code else decoded(text.value).lower()

    def numa_node(self, index: int) -> int | None:
        """Return the NUMA node that a GPU is attached to; None if unknown."""
        known = numa.node_of_pci(self.pci_bus_id(index))
        if known is not None:
            return known
        number = ctypes.c_int(-1)  # where sysfs is hidden the driver may tell; older ones refuse
        code = self._cuda.cuDeviceGetAttribute(ctypes.byref(number), _HOST_NUMA_ID, self._device(index))
        return number.value if code == 0 and number.value >= 0 else None

    def _device(self, index: int) -> Any:
        device = ctypes.c_int()
        self._check(self._cuda.cuDeviceGet(ctypes.byref(device), index), f"cuDeviceGet({index})")
        return device

    def _uuid(self, function: str, device: Any) -> UUID | None:
        call = getattr(self._cuda, function, None)
        text = (ctypes.c_ubyte * 16)()
        if call is None or call(ctypes.byref(text), device):
            return None
        return UUID(bytes=bytes(text)) if any(text) else None

    def _check(self, code: int, function: str) -> None:
        if code:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            shown = decoded(name.value or b"error")
            raise NoGpus(
                f"an NVIDIA driver that does not work ({function}: {shown}, {code})",
                "See what nvidia-smi says on that node",
                is_strange=True,
            )


def stream_writer(stream: int, address: int, library: Any = None) -> Callable[[int, int, int], None] | None:
    """Return ``write(stream, address, number)``, which puts the writing of 32 bits to pinned memory on a stream.

    No copy, and no memory on the GPU: the least that a GPU can tell the host.

    Args:
        stream, address: a stream and pinned memory, to try it with: a 0 is written there.
        library: the loaded driver; None loads it.

    Returns:
        None where the driver does not offer it, or not for this memory.
    """
    try:
        call = getattr(library or ctypes.CDLL(_LIBRARY), "cuStreamWriteValue32_v2", None)
    except OSError:
        return None
    if call is None:
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def write(stream: int, address: int, number: int) -> None:
        code = call(stream, address, number, 0)
        if code:
            raise RuntimeError(f"cuStreamWriteValue32: error {code} of the CUDA driver")

    return None if call(stream, address, 0, 0) else write
