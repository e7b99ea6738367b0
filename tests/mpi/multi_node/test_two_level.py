"""The two-level all-reduce: right and equal everywhere, however the ranks sit on the nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import launching
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from replicas import DTYPES, RANK, RANKS, SIXTEEN_BITS, SIZE, OnNodes, context, same_everywhere, value_of

import mpistrategy as ms
from mpistrategy.arrays.dtypes import COMBINE, Array
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract import mpi_channel
from mpistrategy.mpi.multi_node import two_level
from mpistrategy.mpi.over_mpi import ranks as over_mpi
from mpistrategy.mpi.over_mpi.ranks import MpiRanks
from mpistrategy.mpi.shared_memory.segments import private_memory

pytestmark = pytest.mark.mpi

PLACEMENTS: dict[str, Sequence[int]] = {
    "one node": [0 for _ in RANKS],
    "every rank a node": list(RANKS),
    "odd and even": [r % 2 for r in RANKS],
    "halves": [int(r >= SIZE / 2) for r in RANKS],
    "one alone first": [min(r, 1) for r in RANKS],
    "one alone last, numbers that say nothing": [7 if r == SIZE - 1 else 3 for r in RANKS],
    "three nodes": [(0, 2, 1, 0)[r % 4] for r in RANKS],
}
# bfloat16 and float16 travel as float32.
WIRE_DTYPES = [dtype for dtype in DTYPES if dtype not in SIXTEEN_BITS]
FEW = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=PLACEMENTS)
def ranks(request: pytest.FixtureRequest) -> Iterator[MpiRanks]:
    made = on_nodes(PLACEMENTS[request.param][RANK])
    yield made
    made.free()


@pytest.fixture(params=["blocking", "without waiting"])
def allreduce(request: pytest.FixtureRequest, ranks: MpiRanks) -> Callable[..., None]:
    """The all-reduce in blocking calls of MPI, where there is one piece, or not."""
    ranks.pause = None if request.param == "blocking" else lambda looks: os.sched_yield()
    return partial(ranks.allreduce, by_lanes=True)


def on_nodes(node: int) -> MpiRanks:
    """Return a communicator with this rank on a node."""
    return MpiRanks(MPI.COMM_WORLD, node_key=node)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_level, "PIECE_BYTES", 2**14)


def reference(op: str, arrays: Sequence[Array]) -> Array:
    with np.errstate(all="ignore"):
        return reduce(COMBINE[op], arrays)


def operations(dtype: np.dtype[Any]) -> list[str]:
    return ["SUM"] if dtype.kind == "c" else ["SUM", "MIN", "MAX"]


@FEW
@given(
    dtype=st.sampled_from(WIRE_DTYPES),
    size=st.one_of(st.integers(0, 40), st.integers(0, 30_000)),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_equals_numpys_everywhere(
    allreduce: Callable[..., None], dtype: np.dtype[Any], size: int, seed: int, data: st.DataObject
) -> None:
    op = data.draw(st.sampled_from(operations(dtype)))
    values = [value_of(rank, dtype, (size,), seed) for rank in RANKS]  # floats whose sums are exact in any order
    result = values[RANK].copy()
    allreduce(result, op)
    np.testing.assert_array_equal(result, reference(op, values))
    assert same_everywhere(result)


def test_without_shared_memory_the_node_talks_by_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_nodes(RANK % 2)
    monkeypatch.setattr(made, "shared", private_memory)
    values = [value_of(rank, "float64", (9000,), 5) for rank in RANKS]
    result = values[RANK].copy()
    made.allreduce(result, by_lanes=True)
    np.testing.assert_array_equal(result, reference("SUM", values))
    made.free()


PRETENDED = {
    "odd and even": {"MPIR_CVAR_NUM_CLIQUES": "2"},
    "blocks, uneven": {"MPIR_CVAR_NUM_CLIQUES": "2", "MPIR_CVAR_CLIQUES_BY_BLOCK": "1"},
    "three": {"MPIR_CVAR_NUM_CLIQUES": "3"},
    "every rank": {"MPIR_CVAR_NOLOCAL": "1"},
}
PROGRAM = """
import numpy as np
import mpistrategy as ms

for algorithm in (ms.MpiAllReduce(), ms.HierarchicalCopyAllReduce()):
    with ms.MirroredStrategy(cross_device_ops=algorithm) as strategy:
        communicator = strategy.extended.communicator
        assert max(communicator.node_of) > 0, communicator.node_of
        n = communicator.size

        def step():
            context = ms.get_replica_context()
            values = [np.full(size, communicator.rank + 1.0) for size in (3, 70_000, 1_000_000)]
            handles = [context.all_reduce_async("SUM", value) for value in values]
            return [context.all_reduce("SUM", value) for value in values] + [handle.wait() for handle in handles]

        for result in strategy.run(step):
            assert (result == n * (n + 1) / 2).all()
"""


@pytest.mark.each_mpi
@pytest.mark.skipif(not launching.LIBRARY.startswith("MPICH"), reason="only MPICH pretends to run on several nodes")
@pytest.mark.parametrize("nodes", PRETENDED)
@pytest.mark.slow
def test_on_nodes_that_the_mpi_tells_apart(launch: launching.Launch, nodes: str) -> None:
    finished = launch(3, PROGRAM, env=PRETENDED[nodes])
    assert finished.returncode == 0, finished


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nodes", [1, 2])
def test_sums_of_an_mpi_whose_bits_differ_go_by_one_rank(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """Ranks of one node that share no memory use MPI's sums, too."""
    monkeypatch.setattr(mpi_channel, "zlib", SimpleNamespace(crc32=lambda data: crc32(data) + (RANK == SIZE - 1)))
    if nodes == 1:
        monkeypatch.setattr(over_mpi, "share", lambda nbytes, *_, **options: (private_memory(nbytes), ""))
    with pytest.warns(FallbackWarning, match="different bits") if RANK == 0 else nullcontext():
        made = on_nodes(RANK % nodes)
    for size in (2, 9000, 300_000):
        values = [value_of(rank, "float64", (size,), 5) for rank in RANKS]
        result = np.empty(size)
        made.allreduce(result, source=values[RANK])
        np.testing.assert_array_equal(result, reference("SUM", values))
        assert made.route(result.nbytes, result.dtype, "SUM") == "root"
    assert made.first_message is None
    made.free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:MPI's Allreduce gives")
def test_nor_by_an_algorithm_that_has_lanes_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_channel, "zlib", SimpleNamespace(crc32=lambda data: crc32(data) + (RANK == SIZE - 1)))
    monkeypatch.setattr(MpiRanks, "begin_allreduce_over", None)
    with OnNodes([rank % 2 for rank in RANKS], ms.HierarchicalCopyAllReduce()) as strategy:
        assert strategy.run(lambda: context().all_reduce("SUM", np.ones(9000)))[0] == SIZE
