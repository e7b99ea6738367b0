"""Strategies of ranks on pretended nodes, for arrays in GPU memory: the double's GPUs are read by the node's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import cupy_here
import ipc_double
import pytest
from replicas import OnNodes

import mpistrategy as ms

#: The paths by nodes that this machine has.
PATHS = tuple(
    f"ipc+{between}"
    for between in ("mpi", "staged")
    if not cupy_here.IS_REAL or {"ipc", between} <= set(cupy_here.PATHS)
)


def readable(cupy: Any) -> AbstractContextManager[None]:
    """Let the ranks of a node read the memory of the double's GPUs meanwhile."""
    if cupy_here.IS_REAL:
        return nullcontext()
    if ipc_double.COMPILER is None:
        pytest.skip("no C++ compiler")
    return ipc_double.added_to(cupy)


@contextmanager
def on_nodes(nodes: str, path: str = "ipc") -> Iterator[ms.Strategy]:
    """Give a strategy for a path, in `cupy_here.installed`; `nodes` are digits: the node of each rank."""
    import cupy

    with readable(cupy) if "ipc" in path else nullcontext(), _made(nodes, path) as made:
        yield made


def _made(nodes: str, path: str) -> ms.Strategy:
    if len(set(nodes)) == 1:
        return ms.MirroredStrategy("gpu" if path == "nccl" else "shared")
    return OnNodes([int(node) for node in nodes], ms.MpiAllReduce(), "GPU")
