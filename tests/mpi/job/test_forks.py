"""Forked children of a rank: they take no turn of their parent, and write into no memory of it."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import SIZE, in_step, new_variable, one_node, several, still_works

import mpistrategy as ms
from mpistrategy.errors import ForkedProcessError

pytestmark = pytest.mark.mpi


def in_child(work: Callable[[], Any]) -> str:
    """Return what `work` returns in a forked child, in words: the error that it raises, else its value."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@several
def test_what_a_child_writes_stays_with_it(strategy: ms.Strategy) -> None:
    variable = new_variable(strategy, np.ones(3), aggregation="SUM")
    local = new_variable(strategy, np.ones(3), synchronization="ON_READ", aggregation="SUM")
    arena = strategy.arena([np.zeros(100_000)])
    arena.values[0][...] = 1
    for _ in range(3):
        result = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", np.ones(300_000)))

    def change() -> Any:
        arena.values[0][...] = result[...] = 0
        for each in (variable, local):
            ctypes.memset(each.local_view.ctypes.data, 0, 3 * 8)
        return [float(x) for x in (arena.values[0][0], result[0], variable.local_view[0], local.local_view[0])]

    before = [float(variable.local_view[0]), float(local.local_view[0])]
    assert 0.0 not in before
    assert in_child(change) == repr([0.0] * 4)
    strategy.barrier()
    assert (arena.values[0] == 1).all()
    assert (result == SIZE).all()
    assert [float(variable.local_view[0]), float(local.local_view[0])] == before


@one_node
@several
def test_a_child_without_memory_of_its_own_writes_nowhere(strategy: ms.Strategy) -> None:
    """The limit stands for a system that promises no more memory than it has."""
    arena = strategy.arena([np.full(1 << 21, 1.0)])
    arena.values[0][...] = 1
    gc.collect()
    data = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert data is not None
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((int(data[1]) << 10) + (1 << 22), limits[1]))
    try:
        child = os.fork()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        arena.values[0][...] = 7
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    strategy.barrier()
    assert (arena.values[0] == 1).all()


CALLS: dict[str, Callable[[ms.Strategy, Any], Any]] = {
    "all_reduce": lambda strategy, _: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", 1000.0)),
    "all_reduce of an array": lambda strategy, _: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", np.ones(5))),
    "all_reduce of a large array": lambda strategy, _: in_step(
        strategy, lambda ctx: ctx.all_reduce("SUM", np.ones(300_000))
    ),
    "all_reduce_async": lambda strategy, _: in_step(strategy, lambda ctx: ctx.all_reduce_async("SUM", 1.0).wait()),
    "all_gather": lambda strategy, _: in_step(strategy, lambda ctx: ctx.all_gather(np.ones(1), 0)),
    "reduce": lambda strategy, _: strategy.reduce("SUM", 1.0),
    "gather": lambda strategy, _: strategy.gather(np.ones(1), 0),
    "barrier": lambda strategy, _: strategy.barrier(),
    "assign": lambda strategy, variable: in_step(strategy, lambda _: variable.assign(np.ones(3))),
    "arena": lambda strategy, _: strategy.arena([np.zeros(3)]),
    "another strategy": lambda *_: ms.MirroredStrategy(),
}


@several
@pytest.mark.parametrize("what", CALLS)
def test_a_collective_in_a_child_takes_nobodys_turn(strategy: ms.Strategy, what: str) -> None:
    variable = new_variable(strategy, np.zeros(3), aggregation="SUM")
    make = CALLS[what]
    for _ in range(2):  # the quick ways are known
        if what != "another strategy":
            make(strategy, variable)
    told = in_child(lambda: make(strategy, variable))
    assert told.startswith("ForkedProcessError: "), told
    assert "a call in a forked child of a rank" in told
    assert still_works(strategy)
    assert in_step(strategy, lambda ctx: ctx.all_reduce("SUM", 1.0)) == SIZE


@several
def test_what_needs_no_other_rank_works_in_a_child(strategy: ms.Strategy) -> None:
    def work() -> Any:
        strategy.close()  # closed it is
        alone = ms.OneDeviceStrategy("CPU:0")
        variable = new_variable(alone, 1.0)
        return [float(alone.reduce("SUM", 3.0)), float(variable.numpy()), ForkedProcessError.__mro__[1].__name__]

    assert in_child(work) == repr([3.0, 1.0, "ContextError"])


@several
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_pool_of_forked_workers(strategy: ms.Strategy) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, range(-9, 1)) == [*range(9, -1, -1)]
