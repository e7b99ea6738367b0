"""Arrays in GPU memory by NCCL: results, nothing that waits, failures, and a peer that never comes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

import cuda_counts
import gpu_here
import numpy as np
import pytest
from replicas import RANK, SIZE, in_step, several
from replicas import numbers_of as values

import mpistrategy as ms
from mpistrategy.mpi.gpu.transports import nccl
from mpistrategy.mpi.interface.gpu_transport import chosen_path
from mpistrategy.mpi.watchdog import gpu_progress
from mpistrategy.options import GPU_PATH

cupy = gpu_here.cupy_or_skip()
pytestmark = pytest.mark.skipif(
    "nccl" not in gpu_here.PATHS or cupy.cuda.runtime.getDeviceCount() < SIZE, reason="NCCL wants a GPU for each rank"
)
#: Beyond those of reduction/test_gpu_reductions.py; one is in both.
DTYPES = ("float64", "complex128", "uint32")
OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")


@pytest.fixture(autouse=True)
def no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GPU_PATH, raising=False)


@pytest.fixture
def strategy() -> Iterator[ms.MirroredStrategy]:
    with closing(ms.MirroredStrategy("gpu", cross_device_ops=ms.NcclAllReduce())) as made:
        yield made


def summed(strategy: ms.Strategy, value: Any, op: Any = "SUM", options: Any = None) -> Any:
    return in_step(strategy, lambda ctx: ctx.all_reduce(op, value, options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_is_reduced_as_on_the_host(strategy: Any, dtype: str) -> None:
    shapes = [(3,), (), (2, 5), (0,), (70,)]
    arrays = [cupy.asarray(values(shape, dtype)) for shape in shapes]
    for op in OPS:
        if dtype.startswith("complex") and op in ("MIN", "MAX"):
            continue
        found = summed(strategy, arrays, op)
        on_host = summed(strategy, [values(shape, dtype) for shape in shapes], op)
        for array, expected in zip(found, on_host, strict=True):
            assert type(array) is cupy.ndarray
            assert array.dtype == expected.dtype
            assert np.allclose(array.get(), expected, rtol=1e-6 if dtype != "float16" else 1e-2)
    assert SIZE == 1 or chosen_path(strategy.extended.communicator).name == "nccl"


@several
@pytest.mark.skipif(not cuda_counts.IS_COUNTED, reason="only tests/cuda_on_cpu counts")
@pytest.mark.parametrize(("packs", "expected"), [(1, 1), (2, 2), (0, 4)])
def test_nothing_is_waited_for_and_num_packs_is_the_number_of_calls(packs: int, expected: int) -> None:
    with ms.MirroredStrategy("gpu", cross_device_ops=ms.NcclAllReduce(packs)) as strategy:
        arrays = [cupy.asarray(np.full(10, float(index))) for index in range(4)]
        options = ms.CommunicationOptions(bytes_per_pack=80)
        summed(strategy, arrays, options=options)
        with cuda_counts.counted() as counts:
            found = summed(strategy, arrays, options=options)
        assert (counts["host_waits"], counts["bytes_to_host"], counts["nccl_calls"]) == (0, 0, expected)
        assert [each.get()[0] for each in found] == [0.0, SIZE, 2.0 * SIZE, 3.0 * SIZE]


@several
def test_collectives_on_two_streams_come_one_after_the_other(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where more are under way than the watchdog can count."""
    monkeypatch.setattr(gpu_progress, "MOST", 8)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = []
    for step in range(20):
        with streams[step % 2]:
            results.append(summed(strategy, cupy.asarray(np.full(9, step + 1.0))))
    for step, result in enumerate(results):
        assert (result.get(stream=streams[step % 2]) == (step + 1.0) * SIZE).all()


@several
@pytest.mark.parametrize(("wire", "u"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11), (None, 0.0)])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_a_wire_is_what_nccl_adds(strategy: Any, monkeypatch: pytest.MonkeyPatch, wire: Any, u: float, op: Any) -> None:
    given = [np.random.default_rng(rank).standard_normal(23).astype(np.float32) for rank in range(SIZE)]
    options = ms.CommunicationOptions(wire=wire)
    monkeypatch.setattr(strategy.extended.communicator, "nodes", 2)
    found = summed(strategy, cupy.asarray(given[RANK]), op, options).get()
    whole = summed(strategy, cupy.asarray(np.arange(3)), op, options).get()
    divisor = SIZE if op == "MEAN" else 1
    error = np.abs(found - sum(each.astype(np.float64) for each in given) / divisor)
    bound = ((1 + max(u, 2.0**-23)) ** SIZE - 1) * sum(map(np.abs, given)) / divisor + 1e-7
    assert (error <= bound).all()
    assert (error > 1e-6).any() == (wire is not None)
    assert whole.tolist() == (np.arange(3) * SIZE / divisor).tolist()


@several
def test_an_arena_goes_by_nccl(strategy: Any) -> None:
    with strategy.scope():
        arena = strategy.arena({"w": cupy.asarray(np.ones(6, np.float32)), "b": cupy.asarray(np.ones(2, np.float32))})
    arena.values["w"][...] = RANK + 1.0
    assert summed(strategy, arena)["w"].get().tolist() == [SIZE * (SIZE + 1) / 2] * 6
    assert "by NCCL" in strategy.explain(arena)


# ------------------------------------------------------------------------------------------------------- failures


def failing_class() -> Any:
    """Return NCCL's communicator with faults; the class is found when NCCL is imported."""
    from cupy.cuda import nccl as real

    class Failing(real.NcclCommunicator):  # type: ignore[misc]
        wrong: ClassVar[bool] = False
        later: ClassVar[str] = ""

        def allReduce(self, sent: int, received: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802
            super().allReduce(sent, received, count, dtype, real.NCCL_MAX if self.wrong else op, stream)

        def check_async_error(self) -> None:
            if self.later:
                raise RuntimeError(self.later)

    return Failing


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = failing_class()
    monkeypatch.setattr(cupy.cuda.nccl, "NcclCommunicator", made)
    return made


@several
@pytest.mark.parametrize("fault", ["no id", "no start", "wrong"])
def test_an_nccl_that_does_not_work_gives_way_on_all_ranks(
    failing: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no network")

    if fault == "no id" and RANK == 0:
        monkeypatch.setattr(cupy.cuda.nccl, "get_unique_id", fails)
    if fault == "no start":
        monkeypatch.setattr(cupy.cuda.nccl, "NcclCommunicator", fails)
    failing.wrong = fault == "wrong"
    monkeypatch.setenv("MPISTRATEGY_CUDA_AWARE", "0")
    with warnings.catch_warnings(record=True) as caught, ms.MirroredStrategy("gpu") as strategy:
        warnings.simplefilter("always")
        assert summed(strategy, cupy.asarray(np.ones(3))).get().tolist() == [SIZE] * 3
        chosen: Any = chosen_path(strategy.extended.communicator)
        assert chosen.name == "staged"
        assert re.search("a wrong sum" if fault == "wrong" else "no network", chosen.reason)
    assert [each.category for each in caught] == [ms.errors.FallbackWarning] * (RANK == 0)


@several
def test_a_failure_found_later_is_raised_on_all_ranks_before_they_go_on(failing: Any) -> None:
    with ms.MirroredStrategy("gpu") as strategy:
        summed(strategy, cupy.asarray(np.ones(3))).get()
        failing.later = "remote process exited" if RANK == 0 else ""
        for _ in range(2):
            with pytest.raises(ms.errors.DeviceError, match="remote process exited"):
                summed(strategy, cupy.asarray(np.ones(3)))


@several
def test_arrays_on_another_gpu_than_before_are_refused_on_all_ranks(strategy: Any) -> None:
    summed(strategy, cupy.asarray(np.ones(3)))
    with cupy.cuda.Device((RANK + (RANK == 0)) % SIZE):
        elsewhere = cupy.asarray(np.ones(2))
        with pytest.raises(ms.errors.DeviceError, match="GPU:1"):
            summed(strategy, elsewhere)


def test_a_cupy_without_nccl_has_version_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl.version() == cupy.cuda.nccl.get_version()
    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    assert nccl.version() == 0


HANGS = """
import time
import cupy, numpy as np
from cupy.cuda import nccl
import mpistrategy as ms

kind = {kind!r}
if kind == "failed":
    class Failing(nccl.NcclCommunicator):
        later = ""
        def check_async_error(self):
            if self.later:
                raise RuntimeError(self.later)
    nccl.NcclCommunicator = Failing
strategy = ms.MirroredStrategy("gpu", communication_options=ms.CommunicationOptions(timeout_seconds=300))
options = ms.CommunicationOptions(timeout_seconds={seconds})  # of the call, which goes first
ones = cupy.asarray(np.ones(3))
def step():
    return ms.get_replica_context().all_reduce("SUM", ones, options)
with strategy.expect_long(100):
    strategy.run(step).get()
    strategy.barrier()
if strategy.rank == 1:
    cupy.cuda.get_current_stream().launch_host_func(time.sleep, 60)
result = strategy.run(step)
if strategy.rank == 1:
    time.sleep(60)
if kind == "failed":
    Failing.later = "NCCL_ERROR_REMOTE_ERROR: remote process exited"
result.get()
print("went on")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hangs", "failed"])
def test_a_result_that_never_comes_ends_the_job_with_a_roll_call(launch: Any, kind: str) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    job = launch(2, HANGS.format(kind=kind, seconds=3 if kind == "hangs" else 300), timeout=60)
    assert job.returncode
    assert "went on" not in job.stdout
    headline = "a collective is late: rank 0" if kind == "hangs" else "a collective has failed on a GPU: rank 0"
    assert f"roll call: {headline}" in job.stderr, job
    rows = [line.partition("]")[2].strip() for line in job.stderr.splitlines() if "on a GPU[3] (24 B)" in line]
    assert len(rows) == 2, job
    assert re.match(r"rank 0: waits in #\d+ ReplicaContext.all_reduce SUM float64 on a GPU\[3\]", rows[0]), rows
    assert ("on its GPU for 3." in rows[0]) == (kind == "hangs"), rows
    assert ("s, which has failed: NCCL_ERROR_REMOTE_ERROR: remote" in rows[0]) == (kind == "failed"), rows
    assert re.match(r"rank 1: has not come, is on its way: its GPU is still at what comes before #\d+ Replica", rows[1])
