"""Files mapped into memory that need not stay open: a checkpoint has as many as there were ranks.

Python's mmap keeps a descriptor of each file (from 3.13 on it can do without), and a process may have few.  So the
system is asked directly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.storage.files import OpenFile
from mpistrategy.checkpoint.storage.shards import byte_count

#: Memory that is asked for when it is written to, and not before: Linux's number, where Python has no word for it.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FLAGS, _PROTECTION = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
#: So much of a file is copied, so that arrays are aligned which are not in the file (those of .npz files, often).
_MOST_COPIED_BYTES = 2**28

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = ctypes.CDLL(None).munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """The bytes of a file as memory, which NumPy knows how to look at, for as long as this object lives.

    Raises:
        OSError: when the system refuses.
    """

    def __init__(self, file: OpenFile) -> None:
        self._size = 0
        address = _mmap(None, file.size, _PROTECTION, _FLAGS, file.descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), file.path)
        self._address, self._size, self._unmap = address, file.size, _munmap
        self.__array_interface__ = {"data": (address, False), "shape": (file.size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self._size:
            self._unmap(self._address, self._size)


class Map:
    """A file in memory, for as long as an array lives that lies in it; writing into arrays does not change it.

    Args:
        file: open; may be closed afterwards.
    """

    def __init__(self, file: OpenFile) -> None:
        self._room = _MOST_COPIED_BYTES
        self._memory: Any = np.asarray(_Mapping(file)) if file.size else b""

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, order: Any = "C") -> Array:
        """Return the array that begins at a byte of the file: there, or a copy where that is no place for its dtype."""
        if not byte_count(shape, dtype):
            return np.empty(shape, dtype)
        found: Array = np.ndarray(shape, dtype, self._memory, start, order=order)
        if found.flags.aligned or found.nbytes > self._room:
            return found
        self._room -= found.nbytes
        return found.copy(order="K")
