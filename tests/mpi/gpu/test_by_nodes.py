"""Arrays in GPU memory on several nodes: each node's GPUs read each other, MPI or the host carries parts between nodes.

Every collective of these paths against NumPy: test_device_collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda_counts
import cupy_here
import ipc_double
import numpy as np
import pytest
from gpus_on_nodes import PATHS, on_nodes
from replicas import RANK, SIZE, context, in_step, outcomes, still_works

import mpistrategy as ms
from mpistrategy.errors import CollectiveMismatchError
from mpistrategy.mpi.gpu.transports import by_nodes, ipc
from mpistrategy.mpi.gpu.transports.setup import device_path
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.options import GPU_PATH
from mpistrategy.reduction.routes.gpu_operations import BY_SHARES

#: The node of each rank, by the number of ranks: nodes of 2 and 1, and of 2 and 2.
NODES = {3: "001", 4: "0011"}
pytestmark = pytest.mark.skipif(SIZE not in NODES, reason="nodes of several ranks take three or four")
#: By path and call: as the columns say, at most; on rank 0 of two nodes of two.
BUDGETS = {
    ("ipc+mpi", "all_reduce in place"): (1, 3, 0, 0, 5, 2, 3),
    ("ipc+mpi", "all_reduce MAX"): (3, 4, 0, 0, 5, 2, 3),
    ("ipc+mpi", "reduce to rank 0"): (1, 4, 0, 0, 5, 2, 3),
    ("ipc+mpi", "broadcast"): (0, 2, 0, 0, 2, 1, 2),
    ("ipc+staged", "all_reduce in place"): (1, 3, 1, 1, 8, 5, 3),
    ("ipc+staged", "all_reduce MAX"): (1, 4, 1, 1, 8, 5, 3),
    ("ipc+staged", "reduce to rank 0"): (1, 4, 1, 1, 8, 5, 3),
    ("ipc+staged", "broadcast"): (0, 2, 1, 0, 5, 4, 2),
}
#: On one node of four.
ON_ONE_NODE = {("ipc", "all_reduce in place"): (1, 5, 0, 0, 4, 2, 2)}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MPISTRATEGY_CUDA_AWARE", "1" if request.param == "ipc+mpi" else "0")
    monkeypatch.setattr(ipc, "SLOT_BYTES", 2**20)
    return str(request.param)


@pytest.fixture
def strategy(path: str, cupy: ModuleType) -> Iterator[ms.Strategy]:
    """All ranks, whose path the environment does not name."""
    with on_nodes(NODES[SIZE]) as made:
        yield made


def numbers(dtype: str = "float32", size: int = 400_003) -> np.ndarray:
    random = np.random.default_rng(RANK)
    exponents = 4 if dtype == "float16" else 20
    return (random.standard_normal(size) * np.exp2(random.integers(-exponents, exponents, size))).astype(dtype)


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.FallbackWarning")
def test_it_is_chosen_on_several_nodes_and_explain_says_so(path: str, strategy: Any, cupy: Any) -> None:
    value = cupy.asarray(np.ones(400_003, np.float32))
    assert in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value)).get().tolist() == [SIZE] * value.size
    assert list(device_paths(strategy.extended.communicator).by_name) == [path]
    told = str(strategy.explain(value))
    assert "each GPU reading its part from those of its node" in told
    assert f"({path}: " in told
    assert ("nodes have 1 to 2 ranks" in told) == (SIZE == 3)
    assert ("pip install nvidia-nccl" in told) == (path == "ipc+staged")


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.FallbackWarning")
def test_all_ranks_get_the_same_bits_and_a_nan_wins(strategy: Any, cupy: Any) -> None:
    everyone = strategy.extended.communicator.allgather_text
    for dtype in ("float32", "float64", "float16", "complex64"):
        mine = numbers(dtype)
        mine[[0, 200_001, -1]] = [np.nan if each == RANK else 1 for each in range(3)]
        for op in ("SUM", "MEAN", *(("MIN", "MAX") if dtype in ("float32", "float64") else ())):
            here = cupy.asarray(mine)
            found = in_step(strategy, lambda ctx, op=op, here=here: ctx.all_reduce(op, here, out=here)).get()
            assert np.isnan(found[[0, 200_001, -1]]).all()
            assert dtype == "float16" or np.isnan(found).sum() == 3
            assert len(set(everyone(hashlib.sha256(np.nan_to_num(found).tobytes()).hexdigest()))) == 1
            later = strategy.run(lambda op=op, mine=mine: context().all_reduce_async(op, cupy.asarray(mine)).wait())
            assert np.array_equal(later.get(), found, equal_nan=True)


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.FallbackWarning")
def test_sums_by_shares_are_sums_by_nodes(path: str, strategy: Any, cupy: Any) -> None:
    ranks = strategy.extended.communicator
    here = cupy.asarray(np.full(400_003, RANK + 1.0))
    BY_SHARES.run(device_path(ranks, path, here.nbytes), ranks, here, "SUM", None)
    assert set(here.get().tolist()) == {SIZE * (SIZE + 1) / 2}


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.FallbackWarning")
def test_a_wire_is_made_on_the_host(strategy: Any, cupy: Any) -> None:
    pytest.importorskip("ml_dtypes")
    options = ms.CommunicationOptions(wire="bfloat16")
    value = cupy.asarray(np.full(400_003, 0.3, np.float32))
    found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value, options)).get()
    assert len(set(found.tolist())) == 1
    assert 0 < abs(found[0] - np.float32(0.3) * SIZE) < 2**-6
    assert "since the wire's dtype is made on the host" in str(strategy.explain(value, options=options))


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.FallbackWarning")
def test_another_call_on_one_rank_raises_on_all(strategy: Any, cupy: Any) -> None:
    def reduce(size: int) -> Any:
        value = cupy.asarray(np.ones(size))
        return in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value)).get()[-1]

    reduce(300_000)
    for one in outcomes(lambda: reduce(300_000 + (RANK == SIZE - 1))):
        assert one.error is CollectiveMismatchError
    assert reduce(300_001) == SIZE
    assert still_works(strategy)


@pytest.mark.skipif(cupy_here.IS_REAL, reason="the double's IPC can be told to fail")
@pytest.mark.parametrize("path", ["ipc+mpi"], indirect=True)
@pytest.mark.parametrize("what", ["no ipc", "unequal bits"])
def test_ranks_that_cannot_have_it_take_another_way_together(
    what: str, strategy: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "no ipc" and RANK == 0:
        ipc_double.failing.add("ipcOpenMemHandle")
    if what == "unequal bits":
        digest = by_nodes.digest_of
        monkeypatch.setattr(by_nodes, "digest_of", lambda sums: digest(sums) + RANK)
    value = cupy.asarray(np.ones(400_003))
    assert in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value)).get().tolist() == [SIZE] * value.size
    paths = device_paths(strategy.extended.communicator)
    assert list(paths.by_name) == ["mpi"]
    words = {"no ipc": "ipcOpenMemHandle", "unequal bits": f"the ranks get {SIZE} different results of one sum"}
    assert words[what] in paths.reasons["auto"]


def calls(cupy: Any, strategy: Any) -> dict[str, Callable[[], object]]:
    one = cupy.asarray(np.ones(2**18, np.float32))
    return {
        "all_reduce in place": lambda: in_step(strategy, lambda c: c.all_reduce("SUM", one, out=one)),
        "all_reduce MAX": lambda: in_step(strategy, lambda c: c.all_reduce("MAX", one)),
        "reduce to rank 0": lambda: strategy.extended.reduce_to("SUM", ms.PerReplica((one,)), "task:0"),
        "broadcast": lambda: strategy.broadcast(one),
    }


@pytest.mark.skipif(SIZE != 4, reason="the table is of two nodes of two ranks")
@pytest.mark.skipif(not cuda_counts.IS_COUNTED, reason="only tests/cuda_on_cpu counts")
def test_no_call_asks_for_more_than_the_table_says(path: str, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_PATH, path)
    with on_nodes(NODES[SIZE]) as strategy:
        over = []
        for name, call in calls(cupy, strategy).items():
            counts = cuda_counts.count_repeated(call)
            if RANK == 0 and (found := cuda_counts.over(counts, BUDGETS[path, name])):
                over.append(f"{name}: {found}")
            # Half of the array, which is this rank's part.
            assert counts["bytes_to_host"] <= (2**19 if path == "ipc+staged" else 0), name
        assert not over


@pytest.mark.skipif(SIZE != 4, reason="the table is of four ranks")
@pytest.mark.skipif(not cuda_counts.IS_COUNTED, reason="only tests/cuda_on_cpu counts")
def test_ranks_of_one_node_read_shares_of_large_arrays(cupy: Any) -> None:
    with on_nodes("0000") as strategy:
        counts = cuda_counts.count_repeated(calls(cupy, strategy)["all_reduce in place"])
        assert RANK or not cuda_counts.over(counts, ON_ONE_NODE["ipc", "all_reduce in place"])
        # All of the array and this rank's share are written to be read, and three shares are copied.
        assert counts["bytes_on_device"] == 2**20 * 2


def test_the_guide_has_the_table() -> None:
    text = (Path(ms.__file__).parent / "cli" / "guide" / "gpu-operations.md").read_text()
    assert cuda_counts.guide_rows(BUDGETS) in text
    assert cuda_counts.guide_rows(ON_ONE_NODE) in text
