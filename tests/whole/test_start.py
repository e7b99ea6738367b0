"""What a process loads up to its first all-reduce: thousands of ranks read these files at once."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

import mpistrategy as ms

pytestmark = pytest.mark.one_rank

FIRST_SUM = """
import sys, time
import numpy as np
import mpistrategy as ms
from mpistrategy.mpi.watchdog.watchdog import LOADED_AFTER_START
strategy = ms.MirroredStrategy()
strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3)))
ours = [name for name in sys.modules if name.partition(".")[0] == "mpistrategy"]
ours = [name for name in ours if getattr(getattr(sys.modules[name], "__spec__", None), "loader", None)]  # a file
at_start = {*ours} - {*LOADED_AFTER_START}
unneeded = sum(".training" in name or ".checkpoint" in name or ".input." in name for name in ours)
print(len(at_start), unneeded, "nodes", strategy.extended.communicator.nodes, flush=True)
end = time.monotonic() + 60
while not sys.modules.keys() >= {*LOADED_AFTER_START}:
    assert time.monotonic() < end, {*LOADED_AFTER_START} - sys.modules.keys()
    time.sleep(0.01)
"""


def test_the_first_sum_loads_few_modules_and_the_watchdog_its_own_later(
    launch: Callable[..., launching.Finished],
) -> None:
    job = launch(2, FIRST_SUM).check()
    most = 95 if "nodes 1" in job.stdout else 100  # between nodes other routes are looked at
    most += 1  # which look at the variables of the environment that tests set
    for line in job.stdout.splitlines():
        modules, unneeded, *_ = map(int, line.replace("nodes", "").split())
        assert modules <= most, "each is four calls of stat and one of open"
        assert unneeded == 0


def test_public_modules_are_there_before_anything_in_them_is_used() -> None:
    program = """
import inspect, pickle, sys
import mpistrategy
from mpistrategy.metrics import Mean
import mpistrategy.optimizers as by_name
assert by_name is mpistrategy.optimizers is sys.modules["mpistrategy.optimizers"]
assert by_name.SGD.__module__ == "mpistrategy.optimizers" and Mean is mpistrategy.metrics.Mean
assert mpistrategy.GradientBuckets.__module__ == "mpistrategy"
assert pickle.loads(pickle.dumps(by_name.SGD)) is by_name.SGD
"""
    for first in ("", "import inspect\ninspect.getmodule(inspect.currentframe())\n"):
        subprocess.run([sys.executable, "-c", first + program], check=True, env=environment())
    unpickle = f"import pickle; print(pickle.loads({pickle.dumps(ms.optimizers.SGD)!r}))"
    told = subprocess.run([sys.executable, "-c", unpickle], check=True, env=environment(), stdout=subprocess.PIPE)
    assert b"mpistrategy.optimizers.SGD" in told.stdout
    star = "from mpistrategy.gradients import *\nassert clip_by_global_norm\n"
    subprocess.run([sys.executable, "-c", star], check=True, env=environment())


def environment() -> dict[str, str]:
    return {**launching.environment(), "PYTHONPATH": os.pathsep.join([str(Path(ms.__file__).parents[1])])}
