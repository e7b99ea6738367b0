"""The engine leaves the core to the program while it computes, and takes it while the program waits for a job."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from replicas import RANKS, OnNodes, context

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
