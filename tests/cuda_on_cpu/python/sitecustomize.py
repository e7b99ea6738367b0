"""Let CuPy call the stand-in for CUDA.

CuPy's wheels have the CUDA runtime inside: when they are loaded, its functions get to begin with a jump to ours.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import mmap
import os
import struct
import sys
from typing import Any

_RUNTIME = "cupy_backends.cuda.api.runtime"
_JUMP = b"\x48\xb8%b\xff\xe0"  # movabs rax, address; jmp rax


def _functions(path: str) -> dict[str, int]:
    """Return where a library has functions, by name: from the table that is not stripped."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        offset, _, _, _, _, size, count = struct.unpack_from("<QIHHHHH", data, 40)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
        for _, kind, _, _, start, length, link, *_ in sections:
            if kind == 2:
                names = sections[link][4]
                found = {}
                for name, info, _, section, value, _ in struct.iter_unpack("<IBBHQQ", data[start : start + length]):
                    if info & 15 == 2 and section:
                        begin = names + name
                        found[data[begin : data.find(b"\0", begin)].decode()] = value
                return found
    return {}


def _base(path: str) -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return min(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(path))


def redirect(path: str, ours: ctypes.CDLL) -> int:
    """Make the CUDA runtime inside a library call `ours`; return how many functions that are."""
    ctypes.PyDLL(path)
    path = os.path.realpath(path)
    base = _base(path)
    libc = ctypes.CDLL(None, use_errno=True)
    count = 0
    for name, value in _functions(path).items():
        if not name.startswith("cuda"):
            continue
        try:
            target = ctypes.cast(getattr(ours, name), ctypes.c_void_p).value
        except AttributeError:
            continue
        address = base + value
        page = address & -4096
        length = address + 12 - page
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(length), 7):
            raise OSError(ctypes.get_errno(), "mprotect")
        ctypes.memmove(address, _JUMP.replace(b"%b", struct.pack("<Q", target)), 12)
        libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(length), 5)
        count += 1
    return count


class _Finder:
    """Sees CuPy's runtime before it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == _RUNTIME:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.origin is not None:
                redirect(spec.origin, ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL))


sys.meta_path.insert(0, _Finder())
