"""Strategies of ranks on pretended nodes, for arrays in GPU memory: the double's GPUs are read by the node's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import cupy_here
import ipc_double
import pytest
from replicas import OnNodes

import mpistrategy as ms


@contextmanager
def on_nodes(path: str, nodes: str) -> Iterator[ms.Strategy]:
    """Give a strategy for a path, in `cupy_here.installed`; `nodes` are digits: the node of each rank."""
    import cupy

    is_double = "ipc" in path and not cupy_here.IS_REAL
    if is_double and ipc_double.COMPILER is None:
        pytest.skip("no C++ compiler")
    readable: Any = ipc_double.added_to(cupy) if is_double else nullcontext()
    with readable, _made(path, nodes) as made:
        yield made


def _made(path: str, nodes: str) -> ms.Strategy:
    if len(set(nodes)) == 1:
        return ms.MirroredStrategy("gpu" if path == "nccl" else "shared")
    return OnNodes([int(node) for node in nodes], ms.MpiAllReduce(), "GPU")
