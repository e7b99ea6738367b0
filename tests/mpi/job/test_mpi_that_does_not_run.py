"""An MPI that has not been initialized, or was finalized: every public call says so, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import launching
import pytest

Launch = Callable[..., launching.Finished]
pytestmark = pytest.mark.each_mpi

FINALIZED = """
import numpy as np
from mpi4py import MPI
import mpistrategy as ms

strategy = ms.MirroredStrategy()
with strategy.scope():
    variable, optimizer = ms.Variable(np.zeros(2)), ms.optimizers.SGD(0.1)
    mean, checkpoint = ms.metrics.Mean(), ms.Checkpoint(variable=variable)


def step(work):
    return lambda: strategy.run(lambda: work(ms.get_replica_context()))


calls = {
    "reduce": lambda: strategy.reduce("SUM", 1.0),
    "a small sum": step(lambda replica: replica.all_reduce("SUM", 1.0)),
    "a dict": step(lambda replica: replica.all_reduce("SUM", {"a": 1.0, "b": np.ones(9)})),
    "a large sum": step(lambda replica: replica.all_reduce("SUM", np.ones(500_000))),
    "a sum with a name": step(lambda replica: replica.all_reduce("SUM", 1.0, name="x")),
    "a handle": step(lambda replica: replica.all_reduce_async("SUM", np.ones(9)).wait()),
    "all_gather": step(lambda replica: replica.all_gather(np.ones(3), 0)),
    "apply_gradients": step(lambda replica: optimizer.apply_gradients([(np.ones(2), variable)])),
    "broadcast": lambda: strategy.broadcast(1.0),
    "barrier": lambda: strategy.barrier("x"),
    "result": lambda: mean.result(),
    "assert_mirrored": lambda: strategy.assert_mirrored(),
}
for _ in range(3):
    for call in calls.values():
        call()
MPI.Finalize()
calls |= {"another": ms.MirroredStrategy, "alone": lambda: ms.MirroredStrategy(communicator=MPI.COMM_SELF)}
calls |= {"save": lambda: checkpoint.save("never")}
for name, call in calls.items():
    try:
        raise SystemExit(f"{name} returned {call()}")
    except ms.errors.ContextError as error:
        assert "MPI.Finalize()" in str(error), error
strategy.close()
"""
NOT_INITIALIZED = """
import mpi4py
mpi4py.rc.initialize = False
import mpistrategy as ms
try:
    ms.MirroredStrategy()
except ms.errors.LaunchError as error:
    assert "MPI.Init_thread()" in str(error), error
else:
    raise SystemExit("made")
from mpi4py import MPI
MPI.Init_thread()
assert ms.MirroredStrategy().reduce("SUM", 1) == 2
MPI.Finalize()
"""


@pytest.mark.parametrize("source", [FINALIZED, NOT_INITIALIZED], ids=["finalized", "not initialized"])
def test_what_is_said_of_an_mpi_that_does_not_run(launch: Launch, tmp_path: Path, source: str) -> None:
    job = launch(2, launching.program(source, tmp_path), timeout=30, cwd=tmp_path)
    assert (job.returncode, job.stderr.strip()) == (0, ""), job
