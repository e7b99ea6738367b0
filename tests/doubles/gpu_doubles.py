"""GPUs that are not there: what tests let `mpistrategy.mpi.gpu.device_selection.look` see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import cupy_double

from mpistrategy.errors import DeviceError
from mpistrategy.mpi.gpu import device_selection
from mpistrategy.mpi.gpu.device_selection import Gpu


def seen(*names: str) -> AbstractContextManager[object]:
    """Let this process see GPUs with these names."""
    gpus = tuple(map(Gpu, names))
    return (
        mock.patch.object(device_selection, "visible_gpus", return_value=gpus)
        if gpus
        else none("no GPU is here", "Get one")
    )


@contextmanager
def pretended(*names: str) -> Iterator[None]:
    """Let this process see GPUs with these names, and a CuPy."""
    with seen(*names), cupy_double.installed():
        yield


def raising(error: Callable[[], BaseException]) -> AbstractContextManager[object]:
    """Let this process fail to look at its GPUs."""

    def fail() -> tuple[Gpu, ...]:
        raise error()

    return mock.patch.object(device_selection, "visible_gpus", fail)


def none(reason: str, fix: str) -> AbstractContextManager[object]:
    """Let this process see no GPU."""
    return raising(lambda: DeviceError.at("GPUs", found=reason, expected="a GPU", fix=fix))
