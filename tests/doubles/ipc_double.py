"""What CUDA offers for the memory of other processes, over files in /dev/shm; and CUDA kernels, run by the processor.

Kernels are compiled as C++ with words for what CUDA adds to it, and are as lazy as all work of `cupy_double`: each
thread of each block runs, one after the other, when somebody waits for the stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cupy_double
import numpy as np

from mpistrategy.mpi.gpu.transports import ipc_kernels

COMPILER = shutil.which("g++") or shutil.which("c++")
_HANDLE_BYTES = 64
_SHIM = """
struct Dim { unsigned int x, y, z; };
static Dim blockIdx, threadIdx, blockDim, gridDim;
#define __global__
#define __device__
#define __forceinline__ inline
"""
_LAUNCH = """
extern "C" void launch(void (*kernel)(void*, const u64*, int, u64, u64, u64), unsigned int blocks, unsigned int threads,
                       void* out, const u64* ranks, int count, u64 offset, u64 packs, u64 size) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(out, ranks, count, offset, packs, size);
}
"""
#: What shall fail on this rank: names of the functions below.
failing: set[str] = set()
#: What was launched: the names of the kernels.
launched: list[str] = []
_mine: dict[int, tuple[str, mmap.mmap]] = {}
_others: dict[int, tuple[int, mmap.mmap]] = {}
_count = [0]


def _may_fail(name: str) -> None:
    if name in failing:
        raise RuntimeError(f"cudaErrorInvalidResourceHandle: {name}")


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def malloc(size: int) -> int:
    _may_fail("malloc")
    _count[0] += 1
    path = f"/dev/shm/mpistrategy-double-{os.getpid()}-{_count[0]}"
    with open(path, "xb+") as file:
        file.truncate(size)
        mapped = mmap.mmap(file.fileno(), size)
    _mine[_address(mapped)] = path, mapped
    return _address(mapped)


def free(address: int) -> None:
    path, _ = _mine.pop(address)
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a peer has it open
    os.unlink(path)


def ipcGetMemHandle(address: int) -> bytes:  # noqa: N802
    _may_fail("ipcGetMemHandle")
    return _mine[address][0].encode().ljust(_HANDLE_BYTES, b"\0")


def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:  # noqa: N802
    _may_fail("ipcOpenMemHandle")
    path = handle.rstrip(b"\0").decode()
    assert len(handle) == _HANDLE_BYTES
    assert path not in [mine for mine, _ in _mine.values()], "CUDA opens no memory of the process itself"
    file = os.open(path, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_SH)
    mapped = mmap.mmap(file, 0)
    _others[_address(mapped)] = file, mapped
    return _address(mapped)


def ipcCloseMemHandle(address: int) -> None:  # noqa: N802
    file, _ = _others.pop(address)
    os.close(file)


def deviceCanAccessPeer(device: int, peer: int) -> int:  # noqa: N802
    return int("deviceCanAccessPeer" not in failing)


def library(code: str) -> Any:
    """Return the kernels of `code`, compiled for the processor; kept for other ranks and later tests."""
    assert COMPILER is not None
    text = f"{_SHIM}{code}{_LAUNCH}"
    folder = Path(tempfile.gettempdir()) / f"mpistrategy-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone: nothing is loaded from there")
    made = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    if not made.exists():
        own = folder / f"{made.stem}-{os.getpid()}.so"
        options = ["-x", "c++", "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", str(own), "-"]
        subprocess.run([COMPILER, *options], input=text, text=True, check=True, timeout=120)
        own.replace(made)
    return ctypes.CDLL(str(made))


class RawModule:
    """CuPy's, for kernels with the arguments of `mpistrategy.mpi.gpu.transports.ipc_kernels`."""

    def __init__(self, code: str, options: Sequence[str] = ()) -> None:
        _may_fail("RawModule")
        self._library = library(code)

    def get_function(self, name: str) -> Any:
        """Return a kernel."""
        kernel, launch = getattr(self._library, name), self._library.launch

        def put(grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
            out, table, *numbers = args
            assert [type(each) for each in numbers] == [np.int32, np.uint64, np.uint64, np.uint64]
            launched.append(name)
            words = [ctypes.c_void_p(each.data.ptr) for each in (out, table)]
            words += [ctypes.c_int(int(numbers[0])), *(ctypes.c_ulonglong(int(each)) for each in numbers[1:])]
            cupy_double.get_current_stream().put(
                lambda: launch(kernel, ctypes.c_uint(grid[0]), ctypes.c_uint(block[0]), *words), out._view, table._view
            )

        return put


@contextlib.contextmanager
def added_to(cupy: ModuleType) -> Iterator[None]:
    """Let the double of CuPy have what is here meanwhile; no memory may be left afterwards."""
    added = (malloc, free, ipcGetMemHandle, ipcOpenMemHandle, ipcCloseMemHandle, deviceCanAccessPeer)
    failing.clear()
    launched.clear()
    others = cupy.RawModule
    cupy.RawModule = lambda code, options: (RawModule if code == ipc_kernels.SOURCE else others)(code, options=options)
    for each in added:
        setattr(cupy.cuda.runtime, each.__name__, each)
    try:
        yield
    finally:
        cupy.RawModule = others
        for each in added:
            delattr(cupy.cuda.runtime, each.__name__)
        left = [path for path, _ in _mine.values()]
        for path in left:
            os.unlink(path)
        _mine.clear()
        assert not left
        assert not _others
