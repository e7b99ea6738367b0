"""run_replicas: several replicas in one process do what MPI's ranks do, in the same order every time.

It never hangs: calls that do not fit, replicas that leave or fail, impossible arguments.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import DTYPES, bits, expected, laid_out, part_of, value_of

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.one_rank


ALGORITHMS: dict[str, Callable[[], ms.CrossDeviceOps]] = {
    "MpiAllReduce": lambda: ms.MpiAllReduce(),
    "ReductionToOneDevice": lambda: ms.ReductionToOneDevice(),
    "to rank 0": lambda: ms.ReductionToOneDevice("task:0"),
    "accumulation_fn": lambda: ms.ReductionToOneDevice(accumulation_fn=lambda values: np.sum(values, axis=0)),
    "hierarchical": lambda: ms.HierarchicalCopyAllReduce(),
    "hierarchical, packs": lambda: ms.HierarchicalCopyAllReduce(2),
}


def all_reduce(op: str, value: Any) -> Any:
    return ms.get_replica_context().all_reduce(op, value)


# ---------------------------------------------------------------------------------------------- the same results


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


def test_sums_are_taken_in_rank_order() -> None:
    values = [np.random.default_rng(rank).standard_normal(50) * 10.0 ** (3 * rank) for rank in range(5)]

    def program() -> Any:
        strategy = ms.MirroredStrategy()
        return strategy.reduce("SUM", values[strategy.extended.communicator.rank])

    for found in run_replicas(program, 5):
        np.testing.assert_array_equal(found, sum(values))


# ---------------------------------------------------------------------------------------------- around it


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


# ---------------------------------------------------------------------------------------------- mistakes


def caught(rank_does: Callable[[int, ms.Strategy], Any], n: int = 3) -> list[Any]:
    """What came of a program on each replica: an exception that it caught, or a result."""

    def program() -> Any:
        strategy = ms.MirroredStrategy()
        try:
            return rank_does(strategy.extended.communicator.rank, strategy)
        except Exception as error:
            return error

    return run_replicas(program, n)


@pytest.mark.parametrize("odd_one", range(3))
def test_a_mismatch_raises_on_every_replica_and_is_over_then(odd_one: int) -> None:
    def program(rank: int, strategy: ms.Strategy) -> Any:
        with pytest.raises(errors.CollectiveMismatchError, match=r"replica|rank") as raised:
            strategy.reduce("MEAN" if rank == odd_one else "SUM", np.ones(2))
        assert "test_over_threads.py" in str(raised.value)
        return float(strategy.reduce("SUM", rank))

    assert caught(program) == [3.0] * 3


@pytest.mark.parametrize("leaves", range(3))
def test_who_waits_for_one_that_has_left_is_told(leaves: int) -> None:
    endings = caught(lambda rank, strategy: "left" if rank == leaves else strategy.reduce("SUM", 1))
    for rank, ending in enumerate(endings):
        if rank == leaves:
            assert ending == "left"
        else:
            assert isinstance(ending, errors.CollectiveMismatchError)
            assert f"replica {leaves}: has come to its end" in str(ending)
            assert "waits at" in str(ending)


def test_replicas_that_wait_in_different_places_are_told() -> None:
    def program(rank: int, strategy: ms.Strategy) -> Any:
        other = ms.MirroredStrategy()
        with pytest.raises(errors.CollectiveMismatchError, match="no replica can go on"):
            (other if rank else strategy).barrier()
        strategy.barrier()
        other.barrier()
        return "met again"

    assert caught(program) == ["met again"] * 3


@pytest.mark.parametrize(
    "error", [KeyError("mine"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_an_exception_comes_out_with_a_note(error: BaseException) -> None:
    def program() -> None:
        strategy = ms.MirroredStrategy()
        strategy.barrier()
        if strategy.extended.communicator.rank == 1:
            raise error
        strategy.barrier()

    with pytest.raises(type(error)) as raised:
        run_replicas(program, 3)
    assert raised.value is error
    assert error.__notes__ == ["raised on replica 1 of 3"]


def test_of_several_the_first_that_is_no_consequence() -> None:
    def program() -> None:
        rank = ms.MirroredStrategy().extended.communicator.rank
        if rank == 0:
            ms.MirroredStrategy().barrier()
        raise ValueError(f"of replica {rank}")

    with pytest.raises(ValueError, match="of replica 1") as raised:
        run_replicas(program, 3)
    assert "replica 1 of 3" in raised.value.__notes__[0]
    with pytest.raises(errors.CollectiveMismatchError) as mismatch:
        run_replicas(lambda: ms.MirroredStrategy().barrier(str(threading.get_ident())), 2)
    assert "replica 0 of 2" in mismatch.value.__notes__[-1]


BAD: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"fn": 5, "n": 2}, errors.OptionTypeError),
    ({"n": 0}, errors.OptionError),
    ({"n": -1}, errors.OptionError),
    ({"n": 2.5}, errors.OptionTypeError),
    ({"n": "3"}, errors.OptionTypeError),
    ({"n": None}, errors.OptionTypeError),
    ({"n": True}, errors.OptionTypeError),
    ({"n": 2, "nodes": [0]}, errors.OptionError),
    ({"n": 2, "nodes": 2}, errors.OptionTypeError),
]


@pytest.mark.parametrize(("arguments", "kind"), BAD, ids=lambda value: str(value))
def test_impossible_arguments(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match="run_replicas"):
        run_replicas(**{"fn": lambda: None, **arguments})
