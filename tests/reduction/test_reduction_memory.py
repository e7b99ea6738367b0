"""How much memory a reduction takes besides the arrays that it is given: NumPy's, and that of shared segments.

Both are counted, not measured: whatever else runs on the machine changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import launching
import numpy as np
import pytest
from replicas import in_step

import mpistrategy as ms

PROGRAM = """
import gc
import tracemalloc
import numpy as np
import mpistrategy as ms

ALGORITHMS = [ms.MpiAllReduce(), ms.HierarchicalCopyAllReduce(), ms.OrderedAllReduce()]
ALGORITHMS += [ms.ReductionToOneDevice(), ms.ReductionToOneDevice("task:1")]
tracemalloc.start()

def mapped():
    # Each rank maps the segments of all ranks of its node.
    with open("/proc/self/maps") as lines:
        ends = [line.split()[0].split("-") for line in lines if line.split()[1][3] == "s"]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ends) / on_node

def check(what, most, right, reduce):
    gc.collect()
    before, segments = tracemalloc.get_traced_memory()[0], mapped()
    for _ in range(2):
        tracemalloc.reset_peak()
        result = reduce()
        taken = tracemalloc.get_traced_memory()[1] - before + mapped() - segments
        assert taken <= most * NBYTES + 2**20, f"{what}: {taken / NBYTES:.2f} times the array"
        assert np.array_equal(np.asarray(result).reshape(-1)[::1001], right.reshape(-1)[::1001]), what
        del result

for algorithm in ALGORITHMS:
    # The room for the pieces of ordered sums has a size of its own, and is little beside this.
    NBYTES = (16 if isinstance(algorithm, ms.OrderedAllReduce) else 5) * 2**20
    with ms.MirroredStrategy(cross_device_ops=algorithm) as strategy:
        node_of, rank = strategy.extended.communicator.node_of, strategy.replica_id_in_sync_group
        assert (max(node_of) > 0) == ON_NODES
        on_node, size = node_of.count(node_of[rank]), strategy.num_replicas_in_sync

        def all_reduce(*arguments, **options):
            return strategy.run(lambda: ms.get_replica_context().all_reduce(*arguments, **options))

        def in_the_background(*arguments):
            return strategy.run(lambda: ms.get_replica_context().all_reduce_async(*arguments)).wait()

        for reduce in (all_reduce, in_the_background):  # what is made once
            reduce("SUM", np.ones(3 * NBYTES // 32))
        for dtype in (np.uint16, np.int8):
            name = f"{type(algorithm).__name__}, {np.dtype(dtype)}"
            every = [np.arange(NBYTES // np.dtype(dtype).itemsize).astype(dtype) * dtype(1 + r) for r in range(size)]
            x, total, greatest = every[rank], sum(every[1:], every[0]), np.max(every, axis=0)
            out, mean = np.empty_like(x), np.mean(every, axis=0, dtype=np.float64).astype(np.float32)
            del every
            check(f"{name}: SUM", 2, total, lambda: all_reduce("SUM", x))
            if dtype is np.uint16:
                continue
            check(f"{name}: MAX", 2, greatest, lambda: all_reduce("MAX", x))
            check(f"{name}: SUM of a list", 2, total, lambda: all_reduce("SUM", [x, x[:50]])[0])
            check(f"{name}: SUM with out=", 1, total, lambda: all_reduce("SUM", x, out=out))
            # Integers are added in 64 bits for a mean.
            check(f"{name}: MEAN", 2 + 4 * 8 / x.itemsize, mean, lambda: all_reduce("MEAN", x))
            check(f"{name}: along an axis", 0.5, total.reshape(16, -1).sum(axis=0, dtype=dtype),
                  lambda: strategy.reduce("SUM", x.reshape(16, -1), axis=0))
            check(f"{name}: in the background", 2, total, lambda: in_the_background("SUM", x))
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_integers_of_8_and_16_bits_take_twice_the_array_at_most(
    launch: Callable[..., launching.Finished], nodes: int
) -> None:
    if nodes > 1 and not launching.LIBRARY.startswith("MPICH"):
        pytest.skip("only MPICH pretends to run on several nodes")
    source = f"ON_NODES = {nodes > 1}\n{PROGRAM}"
    launch(2, source, env={"MPIR_CVAR_NUM_CLIQUES": str(nodes)}, timeout=100).check()


@pytest.mark.mpi
def test_a_lone_number_keeps_no_pack_alive(strategy: ms.Strategy) -> None:
    value = [np.array(1.0), np.ones(1), *[np.full(900, 1.0) for _ in range(20)], 2.0]
    for number in (0, 1, -1):
        kept = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value))[number]
        base = getattr(kept, "base", None)
        assert base is None or base.nbytes <= 4096, "a few bytes hold the memory of a whole pack"
