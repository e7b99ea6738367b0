"""GPUs that are not there: what tests let `mpistrategy.mpi.gpu.inventory.look` see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import cupy_double

from mpistrategy.mpi.gpu import inventory
from mpistrategy.mpi.gpu.inventory import Gpu


class PretendedGpus:
    """GPUs by their descriptions; see `mpistrategy.mpi.gpu.inventory.Gpus`."""

    def __init__(self, described: Sequence[Gpu]) -> None:
        self._described = described

    def count(self) -> int:
        return len(self._described)

    def uuid(self, index: int) -> str:
        return self._described[index].uuid

    def pci_bus_id(self, index: int) -> str:
        return self._described[index].pci_bus_id

    def numa_node(self, index: int) -> int | None:
        return self._described[index].numa_node


@contextmanager
def pretended(*uuids: str) -> Iterator[None]:
    """Let this process see GPUs with these UUIDs, and a CuPy."""
    seen = inventory.seen_through(lambda: PretendedGpus([Gpu(index, uuid) for index, uuid in enumerate(uuids)]))
    with seen, cupy_double.installed():
        yield


def raising(error: Callable[[], BaseException]) -> AbstractContextManager[None]:
    """Let this process fail to look at its GPUs."""

    def fail() -> inventory.Gpus:
        raise error()

    return inventory.seen_through(fail)
