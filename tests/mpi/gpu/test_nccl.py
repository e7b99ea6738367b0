"""Arrays in GPU memory by NCCL, with doubles of CuPy and of its NCCL: order, failures, and a peer that never comes."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import cupy_double
import nccl_double
import numpy as np
import pytest
from launching import HELPERS
from replicas import RANK, SIZE, in_step, outcomes
from replicas import numbers_of as values

import mpistrategy as ms
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.gpu.transports import by_mpi as staged_path
from mpistrategy.mpi.gpu.transports import nccl
from mpistrategy.mpi.gpu.transports.nccl import NcclPath
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.mpi.watchdog import gpu_progress
from mpistrategy.mpi.watchdog.gpu_progress import GpuProgress
from mpistrategy.options import GPU_PATH
from mpistrategy.reduction.routes import gpu

several = pytest.mark.skipif(SIZE == 1, reason="one rank needs no path")
DTYPES = ("float64", "float32", "float16", "complex64", "complex128", "int64", "uint32", "int16", "uint8")
OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.delenv(GPU_PATH, raising=False)
    monkeypatch.setattr(nccl_double, "faults", nccl_double.Faults())
    nccl_double.calls.clear()
    with cupy_double.installed(nccl_double.made()) as module:
        yield module


@pytest.fixture
def strategy(cupy: ModuleType) -> Iterator[ms.MirroredStrategy]:
    with closing(ms.MirroredStrategy(cross_device_ops=ms.NcclAllReduce())) as made:
        yield made


def path_of(strategy: Any) -> NcclPath:
    found = device_paths(strategy.extended.communicator).by_name["nccl"]
    assert isinstance(found, NcclPath)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_is_reduced_as_on_the_host(strategy: Any, cupy: Any, dtype: str) -> None:
    shapes = [(3,), (), (2, 5), (0,), (70,)]
    arrays = [cupy.asarray(values(shape, dtype)) for shape in shapes]
    for op in OPS:
        if dtype.startswith("complex") and op in ("MIN", "MAX"):
            continue
        found = in_step(strategy, lambda ctx, op=op: ctx.all_reduce(op, arrays))
        on_host = in_step(strategy, lambda ctx, op=op: ctx.all_reduce(op, [values(shape, dtype) for shape in shapes]))
        for array, expected in zip(found, on_host, strict=True):
            assert type(array) is cupy_double.ndarray
            assert array.dtype == expected.dtype
            assert np.allclose(array.get(), expected, rtol=1e-6 if dtype != "float16" else 1e-2)


@several
def test_all_is_done_by_nccl_as_on_the_host(strategy: Any, cupy: Any) -> None:
    def how_often(op: str, dtype: str) -> int:
        before = nccl_double.calls.count("allReduce")
        arrays = [cupy.asarray(np.ones(size, dtype)) for size in (5, 0)]
        in_step(strategy, lambda ctx: ctx.all_reduce(op, arrays))
        return nccl_double.calls.count("allReduce") - before

    how_often("SUM", "float32")
    found = {(op, dtype): how_often(op, dtype) for op in ("SUM", "MAX", "PROD") for dtype in (*DTYPES, "float16")
             if (op, dtype[:7]) != ("MAX", "complex")}  # fmt: skip
    products = {("PROD", "complex64"), ("PROD", "complex128")}  # of gathered values
    assert {key for key, count in found.items() if not count} == products
    lost = cupy.asarray(np.array([1.0, np.nan]) if RANK == 0 else np.array([np.nan, 2.0]))
    assert np.isnan(in_step(strategy, lambda ctx: ctx.all_reduce("MAX", lost)).get()).all()


@several
def test_the_watchdog_knows_the_limit_of_each_call(strategy: Any, cupy: Any) -> None:
    options = ms.CommunicationOptions(timeout_seconds=500)
    limits = []
    for each in (None, options, None):
        in_step(strategy, lambda ctx, each=each: ctx.all_reduce("SUM", cupy.asarray(np.ones(3)), options=each))
        flight = strategy.extended.communicator.guard.gpu_progress
        limits.append(flight._entries[flight._given][1])
    assert limits == [None, 500.0, None]


def test_nothing_is_waited_for(strategy: Any, cupy: Any) -> None:
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.ones(3))))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gradients = [cupy.asarray(np.full(1000, RANK + 1.0)) * 2 for _ in range(3)]
        before = dict(cupy_double.counts)
        sums = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", gradients))
        doubled = [each * 2 for each in sums]
        waits = [cupy_double.counts[each] - before[each] for each in ("synchronize", "event", "device")]
        assert waits == [0, 0, 0]
        assert all(map(cupy_double.pending, sums))
    expected = 4.0 * sum(range(1, SIZE + 1))
    assert all((each.get(stream=stream) == expected).all() for each in doubled)


@several
def test_collectives_on_two_streams_come_one_after_the_other(strategy: Any, cupy: Any) -> None:
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = []
    for step in range(6):
        with streams[step % 2]:
            array = cupy.asarray(np.full(9, step + 1.0))
            results.append(in_step(strategy, lambda ctx, array=array: ctx.all_reduce("SUM", array)))
    with streams[1]:
        assert (results[-1].get() == 6.0 * SIZE).all()
    assert not any(map(cupy_double.pending, results))
    assert not path_of(strategy)._progress.is_in_one


def test_num_packs_and_options(cupy: Any) -> None:
    arrays = [cupy.asarray(np.full(10, float(index))) for index in range(4)]
    for ops, expected in ((ms.NcclAllReduce(), 1), (ms.NcclAllReduce(2), 2), (ms.NcclAllReduce(0), 4)):
        with ms.MirroredStrategy(cross_device_ops=ops) as strategy:
            options = ms.CommunicationOptions(bytes_per_pack=80)
            in_step(strategy, lambda ctx: ctx.all_reduce("SUM", arrays, options))  # noqa: B023
            before = nccl_double.calls.count("allReduce")
            found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", arrays, options))  # noqa: B023
            assert nccl_double.calls.count("allReduce") - before == (expected if SIZE > 1 else 0)
            assert [each.get()[0] for each in found] == [0.0, SIZE, 2.0 * SIZE, 3.0 * SIZE]
    for wrong in (-1, float("nan")):
        with pytest.raises(ms.errors.OptionError, match="num_packs"):
            ms.NcclAllReduce(wrong)
    with pytest.raises(ms.errors.OptionTypeError, match="NcclAllReduce"):
        ms.NcclAllReduce("1")


@several
def test_options_ask_for_it(cupy: Any) -> None:
    with ms.MirroredStrategy() as strategy:
        options = ms.CommunicationOptions(implementation="NCCL")
        in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.ones(3)), options))
        assert device_paths(strategy.extended.communicator).reasons["nccl"] == "as asked for"


@several
@pytest.mark.parametrize(("wire", "u"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11), (None, 0.0)])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_a_wire_is_what_nccl_adds(cupy: Any, monkeypatch: pytest.MonkeyPatch, wire: Any, u: float, op: Any) -> None:
    nccl_double.calls.clear()
    given = [np.random.default_rng(rank).standard_normal(23).astype(np.float32) for rank in range(SIZE)]
    with ms.MirroredStrategy() as strategy:
        options = ms.CommunicationOptions(wire=wire)
        monkeypatch.setattr(strategy.extended.communicator, "nodes", 2)
        found = in_step(strategy, lambda ctx: ctx.all_reduce(op, cupy.asarray(given[RANK]), options)).get()
        whole = in_step(strategy, lambda ctx: ctx.all_reduce(op, cupy.asarray(np.arange(3)), options)).get()
    divisor = SIZE if op == "MEAN" else 1
    error = np.abs(found - sum(each.astype(np.float64) for each in given) / divisor)
    bound = ((1 + max(u, 2.0**-23)) ** SIZE - 1) * sum(map(np.abs, given)) / divisor + 1e-7
    assert (error <= bound).all()
    assert (error > 1e-6).any() == (wire is not None)
    assert whole.tolist() == (np.arange(3) * SIZE / divisor).tolist()


@several
def test_a_rank_without_memory_for_the_wire_is_heard_of(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options, take = ms.CommunicationOptions(wire="float16"), gpu.communication_memory

    def short(package: Any, size: int, dtype: np.dtype[Any]) -> Any:
        if RANK == 0 and dtype == np.float16:
            raise MemoryError("there is none left")
        return take(package, size, dtype)

    with ms.MirroredStrategy() as strategy:
        monkeypatch.setattr(strategy.extended.communicator, "nodes", 2)

        def reduce() -> Any:
            value = cupy.asarray(np.ones(9, np.float32))
            return in_step(strategy, lambda ctx: ctx.all_reduce("SUM", value, options)).get().tolist()

        assert reduce() == [SIZE] * 9
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "communication_memory", short)
            for one in outcomes(reduce):
                assert "there is none left" in one.text
        assert reduce() == [SIZE] * 9


@several
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_mean_has_the_bits_of_a_divided_sum(strategy: Any, cupy: Any, dtype: str) -> None:
    widest = "float32" if dtype == "float16" else dtype
    given = np.random.default_rng(RANK).standard_normal(99).astype(dtype)
    # NCCL adds in an order of its own, so the divided sum is NCCL's sum.
    total = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(given.astype(widest)))).get()
    expected = (total / total.dtype.type(SIZE)).astype(dtype)
    mine = cupy.asarray(given)
    for _ in range(2):  # the second call has a plan
        one, (packed, _) = in_step(strategy, lambda ctx: ctx.all_reduce("MEAN", [mine, [mine, mine]]))
        assert one.get().tobytes() == packed.get().tobytes() == expected.tobytes()


@several
@pytest.mark.parametrize("fault", ["no_id", "no_start", "wrong"])
def test_an_nccl_that_does_not_work_gives_way_on_all_ranks(cupy: Any, fault: str) -> None:
    setattr(nccl_double.faults, fault, (0 if fault == "no_id" else SIZE - 1) == RANK)
    with warnings.catch_warnings(record=True) as caught, ms.MirroredStrategy() as strategy:
        warnings.simplefilter("always")
        found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.ones(3))))
        assert found.get().tolist() == [SIZE] * 3
        paths = device_paths(strategy.extended.communicator)
        assert list(paths.by_name) == ["staged"]
        assert strategy.extended.communicator.guard.gpu_progress is None
        word = {"no_id": "no network", "no_start": "SYSTEM_ERROR|REMOTE_ERROR", "wrong": "a wrong sum"}[fault]
        assert re.search(word, paths.reasons["auto"])
    told = [str(each.message) for each in caught if each.category is ms.errors.FallbackWarning]
    assert len(told) == (RANK == 0)
    if fault == "wrong":
        assert nccl_double.calls.count("abort") == 1


@several
def test_a_failure_found_later_is_raised_on_all_ranks_before_they_go_on(strategy: Any, cupy: Any) -> None:
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.ones(3)))).get()
    nccl_double.faults.later = "remote process exited" if RANK == 0 else ""
    for _ in range(2):
        with pytest.raises(ms.errors.DeviceError, match="remote process exited"):
            in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.ones(3))))
    strategy.close()
    assert nccl_double.calls.count("abort") == 1
    assert "destroy" not in nccl_double.calls


@several
def test_arrays_on_another_gpu_than_before_are_refused_on_all_ranks(strategy: Any, cupy: Any) -> None:
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.ones(3))))
    with cupy.cuda.Device(int(RANK == 0)):
        elsewhere = cupy.asarray(np.ones(2))
    with pytest.raises(ms.errors.DeviceError, match="GPU:1"):
        in_step(strategy, lambda ctx: ctx.all_reduce("SUM", elsewhere))


@several
def test_close_waits_for_the_gpus_and_then_gives_nccl_back(cupy: Any) -> None:
    with ms.MirroredStrategy(cross_device_ops=ms.NcclAllReduce()) as strategy:
        result = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.ones(3))))
        assert cupy_double.pending(result)
    assert nccl_double.calls.count("destroy") == 1
    assert not cupy_double.pending(result)


@several
def test_a_wait_of_ours_has_a_limit(strategy: Any, cupy: Any) -> None:
    in_step(strategy, lambda ctx: ctx.all_reduce("SUM", cupy.asarray(np.ones(3)))).get()
    path, buffer = path_of(strategy), cupy.asarray(np.ones(3))
    nccl_double.faults.stuck = True
    path.reduce(strategy.extended.communicator, buffer, "SUM")
    began = time.monotonic()
    with pytest.raises(ms.errors.DeviceError, match=r"no result within 0\.2 s"):
        path._wait_for_all(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert nccl_double.calls[-1] == "abort"
    cupy_double.forget_all()


@several
def test_no_more_is_under_way_than_can_be_counted(strategy: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_progress, "MOST", 8)
    buffer = cupy.asarray(np.ones(3))
    for _ in range(10):
        result = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", buffer))
        progress = path_of(strategy)._progress
        assert (progress._given - progress._reached[0]) % gpu_progress._RING <= 8
    assert (result.get() == SIZE).all()


def test_the_watchdog_sees_how_far_the_gpu_is(cupy: Any) -> None:
    trouble: list[str] = []

    def check() -> None:
        if trouble:
            raise RuntimeError(trouble[0])

    flight = GpuProgress(cupy, check)
    stream, may_end, may_begin = cupy.cuda.get_current_stream(), [False], [False]
    flight.look(1.0)
    assert (flight.in_words(1.0), flight.wait(9.0, 0.0, 600.0)) == ("", (0.0, 600.0))
    stream.put(int, ready=lambda: may_begin[0])
    call = Call(Guard(), "all_reduce", anywhere=True)
    call.number = 7
    with flight.collective(call, 3.0):
        stream.put(int, ready=lambda: may_end[0])
    flight.look(2.0)
    assert flight.in_words(2.0) == "on its way: its GPU is still at what comes before #7 all_reduce"
    assert flight.wait(50.0, 0.0, 600.0)[0] == 0.0
    may_begin[0] = True
    assert not flight.is_over
    flight.look(5.0)
    flight.look(9.0)
    assert (flight.wait(9.0, 0.0, 600.0), flight.wait(9.0, 8.0, 600.0)) == ((4.0, 3.0), (1.0, 3.0))
    assert flight.in_words(9.0) == "in #7 all_reduce on its GPU for 4.0 s"
    trouble.append("remote process exited")
    flight.look(9.0)
    assert flight.failure == "remote process exited"
    assert flight.in_words(9.0).endswith("4.0 s, which has failed: remote process exited")
    may_end[0] = True
    assert flight.is_over
    flight.look(10.0)
    assert (flight.in_words(10.0), flight.failure, flight.wait(10.0, 0.0, 600.0)) == ("", "", (0.0, 600.0))


HANGS = """
import sys, time
sys.path[:0] = {tests!r}
import cupy_double, nccl_double, numpy as np
import mpistrategy as ms
kind = {kind!r}
with cupy_double.installed(nccl_double.made()) as cupy:
    strategy = ms.MirroredStrategy(communication_options=ms.CommunicationOptions(timeout_seconds={seconds}))
    rank = strategy.extended.communicator.rank
    def step():
        return ms.get_replica_context().all_reduce("SUM", cupy.asarray(np.ones(3)))
    strategy.run(step).get()
    nccl_double.faults.stuck = rank == 1
    result = strategy.run(step)
    if rank == 1:
        time.sleep(60)
    if kind == "failed":
        import mpi4py.MPI as MPI
        nccl_double.faults.later = "NCCL_ERROR_REMOTE_ERROR: remote process exited"
    result.get()  # here
    print("went on")
"""


@pytest.mark.parametrize("kind", ["hangs", "failed"])
def test_a_result_that_never_comes_ends_the_job_with_a_roll_call(launch: Any, kind: str) -> None:
    job = launch(2, HANGS.format(tests=HELPERS, kind=kind, seconds=3 if kind == "hangs" else 300))
    assert job.returncode
    assert job.seconds < 30
    assert "went on" not in job.stdout
    headline = "a collective is late: rank 0" if kind == "hangs" else "a collective has failed on a GPU: rank 0"
    assert f"roll call: {headline}" in job.stderr
    rows = [line.partition("]")[2].strip() for line in job.stderr.splitlines() if "on a GPU[3] (24 B)" in line]
    assert len(rows) == 2
    assert rows[0].startswith("rank 0: waits in #3 ReplicaContext.all_reduce SUM float64 on a GPU[3]")
    assert ("on its GPU for 3." in rows[0]) == (kind == "hangs")
    assert ("s, which has failed: NCCL_ERROR_REMOTE_ERROR: remote" in rows[0]) == (kind == "failed")
    assert rows[1].startswith("rank 1: has not come, is on its way: its GPU is still at what comes before #3 Replica")


def test_a_cupy_without_nccl_has_version_0(cupy: Any) -> None:
    assert nccl.version() == nccl_double.VERSION
    cupy.cuda.nccl.available = False
    assert nccl.version() == 0
    assert staged_path.CHUNK_BYTES


def test_every_name_that_we_use_is_in_cupy() -> None:
    real = pytest.importorskip("cupy_backends.cuda.libs.nccl", exc_type=ImportError)
    for name in ("int8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"):
        assert isinstance(getattr(real, f"NCCL_{name.upper()}"), int)
    for name in ("SUM", "PROD", "MIN", "MAX"):
        assert isinstance(getattr(real, f"NCCL_{name}"), int)
    for name in ("allReduce", "check_async_error", "abort", "destroy"):
        assert callable(getattr(real.NcclCommunicator, name))


@several
def test_an_arena_goes_by_nccl(strategy: Any, cupy: Any) -> None:
    with strategy.scope():
        arena = strategy.arena({"w": cupy.asarray(np.ones(6, np.float32)), "b": cupy.asarray(np.ones(2, np.float32))})
    arena.values["w"][...] = RANK + 1.0
    before = len(nccl_double.calls)
    found = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", arena))
    assert found["w"].get().tolist() == [SIZE * (SIZE + 1) / 2] * 6
    assert list(device_paths(strategy.extended.communicator).by_name) == ["nccl"]
    assert len(nccl_double.calls) > before
    assert "by NCCL" in strategy.explain(arena)
