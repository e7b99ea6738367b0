"""Many arrays copied at once on a GPU: the kernel's source by nvcc and by g++, and the whole way with a CuPy double."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cupy_double
import kernels_on_cpu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import SIZE, part_of

from mpistrategy.cli.bench import shapes
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.routes import gpu as gpu_route
from mpistrategy.reduction.routes.gpu import gpu_packs

pytestmark = pytest.mark.skipif(SIZE > 1, reason="one rank's own work")
PLAIN = [np.dtype(name) for name in ("int8", "float16", "float32", "float64", "complex128", "bool", "bfloat16")]
HARD = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 65504.0, 65519.9, 65520.0, 6e-8, 2e-8, 3e-8, -2.98e-8, 1.00048828125]
HARD += [6.1e-5, 6.097e-5, 1.00146484375, 3.4e38, 1e-40, 2049.0, 2051.0, 1 / 3]


@pytest.fixture
def cupy() -> Iterator[ModuleType]:
    with cupy_double.installed() as module:
        yield module


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not kernels_on_cpu.HAS_COMPILER:
        pytest.skip("there is no g++")
    return kernels_on_cpu.compiled(tmp_path_factory.mktemp("kernel"))


def misaligned(size: int, dtype: np.dtype[Any], offset: int) -> np.ndarray:
    """Return an array that starts `offset` elements after an address that 64 divides."""
    memory = np.zeros(size * dtype.itemsize + offset * dtype.itemsize + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset * dtype.itemsize
    return memory[start : start + size * dtype.itemsize].view(dtype)


def memory_of(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def filled(size: int, dtype: np.dtype[Any], offset: int, seed: int) -> np.ndarray:
    array = misaligned(size, dtype, offset)
    random = np.random.default_rng(seed)
    if dtype.kind in "iu":
        array[:] = random.integers(-(2**40), 2**40, size).astype(dtype)
    elif dtype.kind == "b":
        array[:] = random.integers(0, 2, size)
    else:
        with np.errstate(all="ignore"):
            array[:] = (random.standard_normal(size) * 10.0 ** random.integers(-9, 6, size)).astype(dtype)
            array[: len(HARD)] = np.array(HARD[:size]).astype(dtype)
    return array


one_array = st.tuples(
    st.sampled_from(PLAIN),
    st.one_of(st.integers(0, 40), st.sampled_from([1023, 4095, 4096, 4097, 8200, 16384, 16399, 33000])),
    st.integers(0, 17),
    st.integers(0, 17),
)


@settings(max_examples=part_of(60), deadline=None, derandomize=True)
@given(arrays=st.lists(one_array, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_the_kernel_copies_every_bit(library: Any, arrays: Any, seed: int) -> None:
    sources = [filled(size, dtype, offset, seed) for dtype, size, offset, _ in arrays]
    targets = [misaligned(size, dtype, offset) for dtype, size, _, offset in arrays]
    kernels_on_cpu.move(library, sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert target.tobytes() == source.tobytes()
        everything, own = (memory.astype(int).sum() for memory in (memory_of(target), target.view(np.uint8)))
        assert everything == own, "something was written outside"


def test_the_gradients_of_resnet50_are_one_launch() -> None:
    sizes = [4 * int(np.prod(shape)) for shape in shapes.resnet50()]
    _, blocks, count = gpu_route.launch([(0, 0, size) for size in sizes])
    assert count == len(sizes) == 161
    assert blocks == sum(-(-size // gpu_route.BLOCK_BYTES) for size in sizes)


def test_lists_of_any_length_are_cut_into_launches(library: Any) -> None:
    sources = [filled(7, np.dtype("float16"), number % 5, number) for number in range(400)]
    targets = [misaligned(7, np.dtype("float16"), number % 3) for number in range(400)]
    assert kernels_on_cpu.move(library, sources, targets) == 3
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(sources, targets, strict=True))


def test_arrays_that_are_too_long_for_the_kernel_are_copied_one_by_one(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_route, "LONGEST", 40)
    arrays = [cupy.asarray(np.arange(float(size))) for size in (5, 6, 3, 0, 7, 2)]
    targets = [cupy.empty(each.shape) for each in arrays]
    before = cupy_double.counts["kernels"]
    gpu_route.move(arrays, targets)
    assert cupy_double.counts["kernels"] == before + 1
    assert [each.get().tolist() for each in targets] == [list(range(size)) for size in (5, 6, 3, 0, 7, 2)]


def test_the_argument_is_laid_out_as_cpp_does_and_small_enough_for_every_gpu() -> None:
    assert gpu_route.MOVES.itemsize + 4 <= 4096
    offsets = [gpu_route.MOVES.fields[name][1] for name in gpu_route.MOVES.names]
    assert offsets == sorted(offsets)
    assert gpu_route.MOVES.itemsize % 8 == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_nvcc_compiles_the_kernel_and_it_needs_no_memory_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "move.cu"
    source.write_text(gpu_route.SOURCE)
    command = ["nvcc", "-std=c++14", "-arch=sm_80", "-Werror=all-warnings", "-Xptxas=-v", "-cubin"]
    told = subprocess.run(
        [*command, "-o", tmp_path / "move.cubin", source], capture_output=True, text=True, timeout=100, check=False
    )
    assert told.returncode == 0, told.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in told.stderr


def packed(cupy: Any, arrays: list[Any]) -> list[np.ndarray]:
    """Return what lies in each bucket, without the gaps."""
    buckets = []
    for pack in gpu_packs(packing.layouts_of(arrays), 0, 0):
        bucket = cupy.empty(pack.size, pack.dtype)
        gpu_route.fill(pack, arrays, bucket)
        buckets.append((pack, bucket))
    return [without_gaps(pack, bucket.get()) for pack, bucket in buckets]


def without_gaps(pack: packing.Pack, bucket: np.ndarray) -> np.ndarray:
    assert not any(start * pack.dtype.itemsize % 16 for start in pack.starts.tolist())
    return np.concatenate([view.ravel() for _, view in pack.views(bucket)])


@settings(max_examples=part_of(30), deadline=None, derandomize=True)
@given(
    arrays=st.lists(
        st.tuples(
            st.sampled_from(["float32", "float16", "bfloat16", "int8", "uint16", "int32", "float64"]),
            st.sampled_from([(), (0,), (3,), (2, 5), (70,), (4, 3, 2)]),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_a_list_is_packed_as_on_the_host(arrays: Any) -> None:
    with cupy_double.installed() as cupy:
        on_host = [
            np.arange(1 + np.prod(shape, dtype=int))[1:].reshape(shape).astype(getattr(ml_dtypes, name, name))
            for name, shape, _ in arrays
        ]
        on_device = [
            cupy.asarray(np.ascontiguousarray(array.T)).T if transposed else cupy.asarray(array) * 1
            for array, (_, _, transposed) in zip(on_host, arrays, strict=True)
        ]
        found = packed(cupy, on_device)
        expected = [pack.fill(on_host) for pack in packing.plan(packing.layouts_of(on_host), wire=lambda own: own)]
        assert [a.tolist() for a in found] == [b.tolist() for b in expected]


def test_one_kernel_packs_a_list_and_waits_for_what_is_still_computed(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = [cupy.asarray(np.full((3, 2), number, np.float32)) * 2 for number in range(161)]
        (pack,) = gpu_packs(packing.layouts_of(arrays), 0, 0)
        bucket = cupy.empty(pack.size, pack.dtype)
        before = cupy_double.counts["kernels"]
        gpu_route.fill(pack, arrays, bucket)
        assert cupy_double.counts["kernels"] == before + 1
        assert cupy_double.pending(bucket)
        assert all(map(cupy_double.pending, arrays))
        del arrays  # their memory belongs to work that comes later on the stream
        later = [cupy.asarray(np.full((3, 2), -1, np.float32)) for _ in range(161)]
        found = without_gaps(pack, bucket.get(stream=stream))
        assert found.tolist() == [2.0 * number for number in range(161) for _ in range(6)]
        assert len(later) == 161


def test_a_lone_array_is_a_plain_copy(cupy: Any) -> None:
    before = cupy_double.counts["kernels"]
    assert packed(cupy, [cupy.asarray(np.arange(5.0))])[0].tolist() == [0, 1, 2, 3, 4]
    assert cupy_double.counts["kernels"] == before


def test_results_are_scattered_by_one_kernel_but_for_those_that_need_more(cupy: Any) -> None:
    results = [cupy.asarray(np.arange(6.0).reshape(2, 3) + number) for number in range(9)]
    targets = [cupy.empty((2, 3)) for _ in range(7)] + [cupy.empty((3, 2)).T, cupy.empty((2, 3), "float32")]
    before = cupy_double.counts["kernels"]
    gpu_route.move(results, targets)
    assert cupy_double.counts["kernels"] == before + 1
    for number, target in enumerate(targets):
        assert np.array_equal(target.get(), np.arange(6.0).reshape(2, 3) + number)
