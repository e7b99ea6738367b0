"""Arrays in GPU memory within a node: kernels that read what all ranks wrote, and the order that makes it right."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from functools import reduce
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy_double
import ipc_double
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, in_step, part_of
from replicas import numbers_of as values

import mpistrategy as ms
from mpistrategy.arrays.dtypes import COMBINE
from mpistrategy.mpi.gpu import inventory
from mpistrategy.mpi.gpu.transports import ipc, ipc_kernels
from mpistrategy.mpi.gpu.transports.ipc import IpcPath
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.options import GPU_PATH

pytestmark = pytest.mark.skipif(ipc_double.COMPILER is None, reason="no C++ compiler")
several = pytest.mark.skipif(SIZE == 1, reason="one rank needs no path")
DTYPES = ("float64", "float32", "float16", "complex64", "complex128", "int64", "uint64", "int32", "int16", "uint8")
OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
SLOT_BYTES = 4096


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv(GPU_PATH, "ipc")
    monkeypatch.setattr(ipc, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(ipc, "SHARED_BYTES", 500)
    with cupy_double.installed() as module, ipc_double.added_to(module):
        yield module


@pytest.fixture
def strategy(cupy: ModuleType) -> Iterator[ms.MirroredStrategy]:
    with closing(ms.MirroredStrategy()) as made:
        yield made


def reduced(strategy: Any, value: Any, op: str = "SUM") -> Any:
    return in_step(strategy, lambda ctx: ctx.all_reduce(op, value))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_is_reduced_as_on_the_host(strategy: Any, cupy: Any, dtype: str) -> None:
    shapes = [(3,), (), (2, 5), (0,), (70,)]
    arrays = [cupy.asarray(values(shape, dtype)) for shape in shapes]
    for op in OPS:
        if dtype.startswith("complex") and op in ("MIN", "MAX"):
            continue
        found = reduced(strategy, arrays, op)
        on_host = reduced(strategy, [values(shape, dtype) for shape in shapes], op)
        for array, expected in zip(found, on_host, strict=True):
            assert array.dtype == expected.dtype
            assert np.array_equal(array.get(), expected)
    if SIZE > 1:
        assert list(device_paths(strategy.extended.communicator).by_name) == ["ipc"]
        assert len(ipc_double.launched) >= 3


@several
def test_what_has_no_kernel_is_staged_and_explain_says_so(strategy: Any, cupy: Any) -> None:
    reduced(strategy, cupy.asarray(np.ones(3)))
    for op, dtype in (("PROD", "float32"), ("SUM", "complex64"), ("MAX", "uint64"), ("MIN", "int16")):
        before, value = len(ipc_double.launched), cupy.asarray(np.full(3, 2, dtype))
        assert reduced(strategy, value, op).get().tolist() == [{"PROD": 2**SIZE, "SUM": 2 * SIZE}.get(op, 2)] * 3
        is_staged = dtype != "int16"
        assert len(ipc_double.launched) - before == (not is_staged)
        text = strategy.explain(value, op)
        assert ("three of them under way, since ipc knows no " + f"{op} of {dtype} (ipc:" in text) == is_staged


@several
def test_a_nan_wins_and_all_ranks_get_the_same_bits(strategy: Any, cupy: Any) -> None:
    mine = np.array([np.nan, 1.0, -0.0, np.inf, 2.0**60 if RANK else 1.0, 0.1 * (RANK + 1)] * 5)
    mine[1] = np.nan if RANK == SIZE - 1 else 1.0
    for op in ("SUM", "MIN", "MAX", "PROD"):
        found = reduced(strategy, cupy.asarray(mine), op).get()
        assert np.isnan(found[:2]).all()
        assert not np.isnan(found[6:]).all()
        texts = strategy.extended.communicator.allgather_text(found.tobytes().hex())
        assert len(set(texts)) == 1


@several
@settings(max_examples=part_of(30), deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 3 * SLOT_BYTES // 4 + 3), min_size=1, max_size=6),
    dtype=st.sampled_from(["float32", "float64", "int64", "int32"]),
    streams=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    shared_bytes=st.sampled_from([1, 2000]),
)
def test_many_calls_of_all_sizes_on_several_streams(
    sizes: list[int], dtype: str, streams: list[int], shared_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, cupy_double.installed() as cupy, ipc_double.added_to(cupy):
        patch.setattr(ipc, "SLOT_BYTES", SLOT_BYTES)
        patch.setattr(ipc, "SHARED_BYTES", shared_bytes)
        with ms.MirroredStrategy() as strategy:
            path = ipc.join(strategy.extended.communicator)
            assert isinstance(path, IpcPath)
            queues = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
            buffers = []
            for number, size in enumerate(sizes):
                with queues[streams[number]]:
                    buffer = cupy.asarray(values((size,), dtype)) + dtype_of(dtype)(number)
                    path.allreduce(strategy.extended.communicator, buffer, "SUM")
                    buffers.append(buffer)
            for number, size in enumerate(sizes):
                with queues[streams[number]]:
                    expected = sum(values((size,), dtype, rank) + dtype_of(dtype)(number) for rank in range(SIZE))
                    assert np.array_equal(buffers[number].get(), expected)
            path.free()


def dtype_of(name: str) -> Any:
    return np.dtype(name).type


def wrong_results(cupy: Any, missing: str = "") -> int:
    """Return how many of several calls, on several streams in turn, give wrong numbers on some rank.

    In each call rank 0 writes, and does what it can, before the others write; and so it does at the end.
    """
    with ms.MirroredStrategy() as strategy:
        communicator = strategy.extended.communicator
        path = IpcPath(communicator, SLOT_BYTES)
        path.open(communicator.allgather_text(path.offer()))
        cupy_double.device_synchronize()
        write, has_read, ranks = path._write_bytes, path._has_read, path._ranks

        def rank_0_first(address: int, nbytes: int) -> int:
            if missing == "turn":
                path._calls = 0
            if RANK > 0:
                communicator.allgather_text("it has written")
            offset = write(address, nbytes)
            if RANK == 0 and missing != "barrier":
                communicator.allgather_text("it has written")
            return offset

        def at_once() -> None:
            has_read()
            if RANK == 0 and missing == "barrier":
                cupy_double.device_synchronize()
                communicator.allgather_text("it has written, and more")

        path._write_bytes, path._has_read = rank_0_first, at_once  # type: ignore[method-assign]
        if missing == "barrier":
            path._ranks = SimpleNamespace(rank=RANK, size=SIZE, node_barrier=lambda: None, guard=ranks.guard)  # type: ignore[assignment]
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
        buffers = []
        for call in range(8):
            with streams[call % 4]:
                buffer = cupy.asarray(np.full(100, 1.0 + call)) * (RANK + 1.0)
                path.allreduce(communicator, buffer, "SUM")
                buffers.append(buffer)
        if RANK > 0:
            communicator.allgather_text("it has done all")
        cupy_double.device_synchronize()
        if RANK == 0:
            communicator.allgather_text("it has done all")
        right = SIZE * (SIZE + 1) / 2
        wrong = sum(int((buffer.get() != (1.0 + call) * right).any()) for call, buffer in enumerate(buffers))
        path._ranks = ranks
        path.free()
        return max(map(int, communicator.allgather_text(str(wrong))))


@several
@pytest.mark.parametrize("missing", ["", "wait for the copy", "wait for the last kernel", "barrier", "turn"])
@pytest.mark.parametrize("rounds", [1, 2] if SIZE > 2 else [1])
def test_without_any_of_its_waits_the_numbers_are_wrong(
    cupy: Any, missing: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The double finds a missing order: the tests above mean something."""
    monkeypatch.setattr(ipc, "SHARED_BYTES", 1 if rounds == 2 else 2**20)
    if missing == "wait for the copy":
        monkeypatch.setattr(cupy_double.Event, "synchronize", lambda self: None)
    if missing == "wait for the last kernel":
        monkeypatch.setattr(cupy_double.Stream, "wait_event", lambda self, event: None)
    assert (wrong_results(cupy, missing) > 0) == bool(missing)


@several
def test_nothing_waits_for_the_device_nor_for_other_streams(strategy: Any, cupy: Any) -> None:
    reduced(strategy, cupy.asarray(np.ones(10)))
    idle = cupy.cuda.Stream(non_blocking=True)
    with idle:
        elsewhere = cupy.asarray(np.ones(4)) + 1
    before = dict(cupy_double.counts)
    result = reduced(strategy, cupy.asarray(np.ones(10)))
    assert cupy_double.counts["device"] == before["device"]
    assert cupy_double.counts["event"] - before["event"] == 1
    assert cupy_double.pending(elsewhere)
    assert cupy_double.pending(result)


@several
@pytest.mark.parametrize("name", ["malloc", "ipcGetMemHandle", "ipcOpenMemHandle", "RawModule"])
def test_ranks_that_cannot_have_it_take_another_way_together(cupy: Any, name: str) -> None:
    if RANK == SIZE - 1:
        ipc_double.failing.add(name)
    with ms.MirroredStrategy() as strategy:
        if RANK == 0:
            with pytest.warns(ms.errors.FallbackWarning, match=f"is staged: ipc cannot be: .*{name}"):
                found = reduced(strategy, cupy.asarray(np.ones(3)))
        else:
            found = reduced(strategy, cupy.asarray(np.ones(3)))
        assert found.get().tolist() == [SIZE] * 3
        paths = device_paths(strategy.extended.communicator)
        assert list(paths.by_name) == ["staged"]
        assert f"(rank {SIZE - 1})" in paths.reasons["ipc"]


@several
def test_arrays_on_another_gpu_than_before_are_refused_on_all_ranks(strategy: Any, cupy: Any) -> None:
    reduced(strategy, cupy.asarray(np.ones(3)))
    with cupy.cuda.Device(int(RANK == 0)):
        elsewhere = cupy.asarray(np.ones(2))
    with pytest.raises(ms.errors.DeviceError, match="GPU:1"):
        reduced(strategy, elsewhere)


@several
def test_gpus_that_cannot_reach_each_other_are_found_before_it_is_tried(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "identity", lambda index: f"GPU-{index}")
    monkeypatch.setenv(GPU_PATH, "auto")
    ipc_double.failing.add("deviceCanAccessPeer")
    with ms.MirroredStrategy() as strategy, cupy.cuda.Device(RANK % 2):
        assert reduced(strategy, cupy.asarray(np.ones(3))).get().tolist() == [SIZE] * 3
        reasons = device_paths(strategy.extended.communicator).reasons
        assert "ipc (OSError: GPU:0 cannot read the memory of GPU:1, which rank 1 drives" in reasons["auto"]


def contributions(dtype: str, count: int, size: int, random: np.random.Generator) -> np.ndarray:
    made = random.integers(0, 255, (count, size * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    if made.dtype.kind == "f":
        made = random.normal(size=(count, size)).astype(dtype)
        made.flat[::7] = np.nan
        made.flat[3::11] = np.inf
        made.flat[5::14] = -made.dtype.type(np.nan)
        made.flat[1::6] = 0
        made.flat[2::10] = -0.0
    return made


def aligned_copy(values: np.ndarray, behind: int) -> np.ndarray:
    """Return the bytes of `values`, as many as `behind` after a 16-byte boundary."""
    memory = np.empty(values.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + behind
    view = memory[start : start + values.nbytes]
    view[...] = values.view(np.uint8)
    return view


@pytest.mark.parametrize("name", ipc_kernels.NAMES)
def test_kernels_do_as_numpy_does(name: str) -> None:
    library, random = ipc_double.library(ipc_kernels.SOURCE), np.random.default_rng(5)
    op, dtype = name.split("_")
    combine = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op]
    for count, size in ((1, 5), (2, 0), (2, 1), (3, 3), (3, 1000), (8, 4099)):
        values = contributions(dtype, count, size, random)
        with np.errstate(all="ignore"):
            expected = reduce(combine, values)
        offset = 32
        slots = [aligned_copy(np.concatenate([np.zeros(offset, np.uint8), row.view(np.uint8)]), 0) for row in values]
        table = np.array([slot.ctypes.data for slot in slots], np.uint64)
        for packs, behind in ((0, np.dtype(dtype).itemsize), (expected.nbytes // 16, 0)):
            memory = aligned_copy(np.full(expected.nbytes + 16, 0x55, np.uint8), behind % 16)
            out = memory[: expected.nbytes].view(dtype)
            words = [ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(table.ctypes.data), ctypes.c_int(count)]
            words += [ctypes.c_ulonglong(each) for each in (offset, packs, size)]
            library.launch(getattr(library, name), ctypes.c_uint(3), ctypes.c_uint(64), *words)
            assert (memory[expected.nbytes :] == 0x55).all()
            assert np.array_equal(out, expected, equal_nan=out.dtype.kind == "f"), (name, count, size)
            if op in ("min", "max"):
                with np.errstate(all="ignore"):
                    assert out.tobytes() == reduce(COMBINE[op.upper()], values).tobytes(), (name, count, size)


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None or SIZE > 1:
        pytest.skip("no nvcc, or done on one rank")
    (tmp_path / "kernels.cu").write_text(ipc_kernels.SOURCE)
    options = [each.replace("--std", "-std") for each in ipc_kernels.OPTIONS]
    command = [compiler, *options, "-arch=sm_80", "-ptx", "-o", "kernels.ptx", "kernels.cu"]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)
    made = (tmp_path / "kernels.ptx").read_text()
    assert all(f".visible .entry {name}(" in made for name in ipc_kernels.NAMES)
    assert "ld.global.nc" not in made
    assert "fma.rn" not in made


def test_every_name_that_we_use_is_in_cupy() -> None:
    real = pytest.importorskip("cupy_backends.cuda.api.runtime", exc_type=ImportError)
    for name in ("malloc", "free", "ipcGetMemHandle", "ipcOpenMemHandle", "ipcCloseMemHandle", "deviceCanAccessPeer"):
        assert callable(getattr(real, name))
