"""run_replicas: several replicas in one process do what MPI's ranks do, in the same order every time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import DTYPES, SIZE, bits, expected, laid_out, part_of, value_of

import mpistrategy as ms
from mpistrategy.testing import run_replicas


def sum_of(values: list[Any]) -> Any:
    return np.sum(values, axis=0)


ALGORITHMS: dict[str, Callable[[], ms.CrossDeviceOps]] = {
    "MpiAllReduce": lambda: ms.MpiAllReduce(),
    "ReductionToOneDevice": lambda: ms.ReductionToOneDevice(),
    "to rank 0": lambda: ms.ReductionToOneDevice("task:0"),
    "accumulation_fn": lambda: ms.ReductionToOneDevice(accumulation_fn=sum_of),
    "hierarchical": lambda: ms.HierarchicalCopyAllReduce(),
    "hierarchical, packs": lambda: ms.HierarchicalCopyAllReduce(2),
}


@pytest.fixture
def alone() -> None:
    """What needs no MPI runs once, in the session on 1 rank."""
    if SIZE > 1:
        pytest.skip("runs in the session on 1 rank")


def all_reduce(op: str, value: Any) -> Any:
    return ms.get_replica_context().all_reduce(op, value)


# ---------------------------------------------------------------------------------------------- the same results


@pytest.mark.usefixtures("alone")
@settings(max_examples=part_of(60))
@given(
    name=st.sampled_from(list(ALGORITHMS)),
    op=st.sampled_from(["SUM", "MEAN"]),
    plan=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (0,), (7,), (3, 5)]), st.integers(0, 5)),
        min_size=1,
        max_size=4,
    ),
    nodes=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    seed=st.integers(0, 100),
)
def test_reductions_by_definition(name: str, op: str, plan: list[Any], nodes: list[int], seed: int) -> None:
    """On 1 to 7 replicas that sit on nodes in any order."""
    if name == "accumulation_fn":
        plan = [(np.dtype(np.float64), shape, layout) for _, shape, layout in plan]
    n = len(nodes)
    everyone = [
        [value_of(rank, dtype, shape, seed + i) for i, (dtype, shape, _) in enumerate(plan)] for rank in range(n)
    ]

    def program() -> Any:
        strategy = ms.MirroredStrategy(cross_device_ops=ALGORITHMS[name]())
        rank = strategy.extended.communicator.rank
        mine = [laid_out(a, plan[i][2] + rank) for i, a in enumerate(everyone[rank])]
        return strategy.run(lambda: all_reduce(op, mine))

    for results in run_replicas(program, n, nodes=nodes):
        for i, found in enumerate(results):
            right = expected(op, [values[i] for values in everyone])
            assert (found.dtype, found.shape) == (right.dtype, right.shape)
            assert bits(found) == bits(right)


# ---------------------------------------------------------------------------------------------- order


@pytest.mark.usefixtures("alone")
def test_replicas_run_one_at_a_time_in_rank_order_and_change_at_collectives() -> None:
    def trace() -> list[tuple[int, str]]:
        events: list[tuple[int, str]] = []

        def program() -> None:
            strategy = ms.MirroredStrategy()
            rank = strategy.extended.communicator.rank

            def step() -> None:
                for stage in "abc":
                    events.append((rank, stage))
                    events.append((rank, f"{stage} still"))  # nobody else runs in between
                    all_reduce("SUM", 1)

            strategy.run(step)

        run_replicas(program, 4)
        return events

    right = [(rank, text) for stage in "abc" for rank in range(4) for text in (stage, f"{stage} still")]
    assert trace() == trace() == right


@pytest.mark.usefixtures("alone")
def test_sums_are_taken_in_rank_order() -> None:
    values = [np.random.default_rng(rank).standard_normal(50) * 10.0 ** (3 * rank) for rank in range(5)]
    total = values[0]
    for value in values[1:]:
        total = total + value

    def program() -> Any:
        strategy = ms.MirroredStrategy()
        return strategy.reduce("SUM", values[strategy.extended.communicator.rank])

    for found in run_replicas(program, 5):
        np.testing.assert_array_equal(found, total)


# ---------------------------------------------------------------------------------------------- around it


@pytest.mark.usefixtures("alone")
def test_replicas_within_replicas_and_strategies_side_by_side() -> None:
    def inner() -> float:
        return float(ms.MirroredStrategy().reduce("SUM", 1.0))

    def program() -> Any:
        first, second = ms.MirroredStrategy(), ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice())
        rank = first.extended.communicator.rank
        with first.scope():
            v = ms.Variable(float(rank), aggregation="SUM")
            one = float(first.reduce("SUM", rank))
        within = run_replicas(inner, rank + 1)
        with second.scope():
            two = float(second.reduce("MAX", rank))
        first.run(lambda: v.assign_add(1.0))
        return one, within, two, float(v), ms.has_strategy()

    assert run_replicas(program, 3) == [(3.0, [r + 1.0] * (r + 1), 2.0, 3.0, False) for r in range(3)]


@pytest.mark.usefixtures("alone")
def test_it_needs_no_mpi(tmp_path: Path) -> None:
    """Not even installed."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')\n")
    (tmp_path / "program.py").write_text(
        "import sys\nimport mpistrategy as ms\nfrom mpistrategy.testing import run_replicas\n"
        "print(run_replicas(lambda: float(ms.MirroredStrategy().reduce('SUM', 2.0)), 3))\n"
        "assert not [name for name in sys.modules if name.startswith('mpi4py')]\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launching.LAUNCHER_PREFIXES)}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(ms.__file__).parents[1])])
    command = [sys.executable, "-W", "error", str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[6.0, 6.0, 6.0]\n"), done.stderr
