"""What a process loads up to its first all-reduce: thousands of ranks read these files at once."""

from __future__ import annotations

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
import sys
import numpy as np
import mpistrategy as ms
strategy = ms.MirroredStrategy()
strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3)))
ours = [name for name in sys.modules if name.partition(".")[0] == "mpistrategy"]
ours = [name for name in ours if getattr(getattr(sys.modules[name], "__spec__", None), "loader", None)]  # a file
unneeded = sum(".training" in name or ".checkpoint" in name for name in ours)
print(len(ours), unneeded, "nodes", strategy.extended.communicator.nodes, flush=True)
"""


def test_the_first_sum_loads_what_calls_may_need_and_no_more(
    launch: Callable[..., launching.Finished],
) -> None:
    job = launch(2, FIRST_SUM).check()
    most = 165  # nothing is loaded later, in a call or for an error
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
assert mpistrategy.GradientBuckets is sys.modules["mpistrategy.training.gradient_buckets"].GradientBuckets
assert pickle.loads(pickle.dumps(by_name.SGD)) is by_name.SGD
"""
    environment = {**launching.environment(), "PYTHONPATH": str(Path(ms.__file__).parents[1])}
    pickled = pickle.dumps(ms.optimizers.SGD)
    for first in (
        "from mpistrategy.gradients import *\nassert clip_by_global_norm\n",
        "import inspect\ninspect.getmodule(inspect.currentframe())\n",
        f"import pickle\nassert 'mpistrategy.optimizers.SGD' in repr(pickle.loads({pickled!r}))\n",
    ):
        subprocess.run([sys.executable, "-c", first + program], check=True, env=environment)


NOTHING_MORE_IS_LOADED = """
import sys
import numpy as np
import mpistrategy as ms
from mpistrategy import optimizers, metrics, gradients

strategy = ms.MirroredStrategy()
rank = strategy.rank
algorithms = ms.ReductionToOneDevice(), ms.HierarchicalCopyAllReduce(), ms.OrderedAllReduce()


class Refuses:
    def find_spec(self, name, *_):
        raise OSError(f"{name}: too many open files")


sys.meta_path.insert(0, Refuses())
context = ms.get_replica_context
large, few = np.ones(300_000), np.ones(3)
slices = ms.IndexedSlices(np.ones((2, 3)), np.arange(2), (5, 3))


def step():
    ctx = context()
    for options in (None, ms.CommunicationOptions(bytes_per_pack=2**16)):
        for value in (1.0, few, large, few.astype(np.float16), large.astype(np.float16), {"a": few, "b": [large, 2]}):
            ctx.all_reduce("SUM", value, options)
    ctx.all_reduce("MEAN", np.arange(3), name="named")
    ctx.all_reduce("MAX", large, out=large.copy())
    ctx.all_reduce("MEAN", large, weight=2.0)
    ctx.all_reduce("MEAN", slices)
    ctx.all_reduce_async("SUM", large).wait()
    ctx.all_gather(np.ones((2, rank + 1)), 1)
    ctx.reduce_scatter("SUM", large)


with strategy.scope():
    strategy.run(step)
    arena = strategy.arena([large])
    strategy.run(lambda: context().all_reduce("SUM", arena))
    for axis in (None, 0):
        strategy.reduce("MEAN", few, axis=axis)
    strategy.gather(few, 0)
    strategy.broadcast([few, large])
    strategy.barrier("here")
    for algorithm in algorithms:
        strategy.extended.cross_device_ops = algorithm
        strategy.extended.batch_reduce_to("SUM", [(few, few), (large, large)])
    strategy.extended.broadcast_to(few, few)
    variable = ms.Variable(few, aggregation="SUM")
    total = ms.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: (variable.assign(few), total.assign_add(1.0)))
    total.read_value()
    strategy.assert_mirrored()
    for batch in strategy.experimental_distribute_dataset([np.ones((4, 2))]):
        pass
    optimizer = optimizers.Adam(0.1)
    strategy.run(lambda: optimizer.apply_gradients([(few, variable)]))
    mean = metrics.Mean()
    strategy.run(lambda: mean.update_state(1.0))
    mean.result()
    for wrong in (lambda: strategy.reduce("SUMM", few), lambda: strategy.reduce("SUM" if rank else "MAX", few)):
        try:
            wrong()
        except (ms.errors.ReduceOpError, ms.errors.CollectiveMismatchError):
            print("an error in words", flush=True)
    strategy.run(lambda: context().all_reduce("SUM", few if rank else "text"))
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_nothing_is_loaded_in_a_call_or_for_an_error(launch: Callable[..., launching.Finished], nodes: int) -> None:
    """One rank alone may have too many open files, or a network file system that hiccups."""
    job = launch(2, NOTHING_MORE_IS_LOADED, env={"MPIR_CVAR_NUM_CLIQUES": str(nodes)})
    assert "open files" not in job.stdout + job.stderr, job
    assert job.stdout.count("an error in words") == 4, job
    assert "DTypeError" in job.stderr, job
