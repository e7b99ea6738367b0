"""The engine leaves the core to the program while it computes, and takes it while the program waits for a job."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
from replicas import RANKS, SIZE, OnNodes, context

import mpistrategy as ms
from mpistrategy.mpi.over_mpi import progress

pytestmark = pytest.mark.mpi(min_size=2)


def test_it_naps_between_two_looks_only_while_the_program_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = OnNodes(list(RANKS), ms.MpiAllReduce())
    strategy.run(lambda: context().all_reduce_async("SUM", 1.0)).wait()
    ranks: Any = strategy.extended.communicator
    engine, computing, naps = ranks.once.made[progress.AtOnce], threading.Event(), []
    monkeypatch.setattr(progress, "patiently", naps.append)

    def work() -> None:
        engine.communicator.manner.pause(1)
        computing.set()
        while not engine._waiting:
            time.sleep(1e-4)
        engine.communicator.manner.pause(2)

    job = progress.Job(work)
    engine.submit(job)
    assert computing.wait(60)
    engine.finish(job)
    job.result()
    assert naps == [1]
    strategy.close()


class Interruption:
    """A trace that raises KeyboardInterrupt before a line of `Engine.submit`."""

    def __init__(self, line: int) -> None:
        self.lines_left: int = line

    def __call__(self, frame: FrameType, what: str, _: object) -> Any:
        if frame.f_code is not progress.Engine.submit.__code__:
            return None
        self.lines_left -= what == "line"
        if self.lines_left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self


def test_a_start_that_is_interrupted_leaves_no_wait_for_ever() -> None:
    """All ranks are interrupted at the same line, once at each; later sums are right, and the strategy ends."""
    strategy = OnNodes(list(RANKS), ms.MpiAllReduce())
    strategy.run(lambda: context().all_reduce_async("SUM", 1.0)).wait()
    engine = strategy.extended.communicator.once.made[progress.AtOnce]  # type: ignore[attr-defined]
    interrupted = True
    line = 0
    while interrupted:
        before = sys.gettrace()
        trace = Interruption(line)
        sys.settrace(trace)
        try:
            engine.submit(progress.Job(time.monotonic))
            interrupted = False
        except KeyboardInterrupt:
            line += 1
        finally:
            sys.settrace(before)
        if interrupted and line % 2:
            assert strategy.run(lambda: context().all_reduce_async("SUM", 1.0)).wait() == SIZE
    assert line >= 3
    strategy.close()
