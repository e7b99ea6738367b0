"""Shared-memory segments: one for each rank of a node, mapped into every process of the node.

All segments lie in one file without a name (a memfd), so nothing is left behind however the job ends.  The first rank
of the node makes it; the others open it by that rank's table of descriptors in /proc, which only this user may.  So the
ranks of a node must see each other's processes.
Every rank reserves its own pages, which then lie near its own core.  It compares them with the free memory first: a
memory limit is an error here, not a killed process later.

The mapping lives as long as any array in it, also after the strategy is closed.  A forked child gets a private copy:
its writes are seen by itself and its own children only.  Where the system promises no memory for the copy
(vm.overcommit_memory=2), the child can only read: a write ends it (SIGSEGV).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory import memory_limits

#: Every segment starts on such a boundary: a cache line, and enough for any vector instruction.
ALIGNMENT = 64

#: Orders earlier writes and reads before later ones.
Fence = Callable[[], object]


def no_fence() -> None:
    """Do nothing: the processor keeps writes and reads in order by itself."""


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class SharedMemory:
    """One segment of zeroed bytes for each rank of a node.

    Attributes:
        segments: flat uint8 arrays, by local rank; where `is_shared` is False only this rank's own.
        local_rank: this rank's index among them.
        is_shared: whether the other ranks of the node see them.
        fence: orders earlier writes before later ones, and earlier reads before later ones.
    """

    segments: tuple[Array, ...]
    local_rank: int = 0
    is_shared: bool = False
    fence: Fence = no_fence

    @property
    def own_segment(self) -> Array:
        """This rank's own segment."""
        return self.segments[self.local_rank]


def part(memory: SharedMemory, start: int, length: int | None = None) -> SharedMemory:
    """Return the same part of every segment."""
    stop = None if length is None else start + length
    segments = tuple(segment[start:stop] for segment in memory.segments)
    return SharedMemory(segments, memory.local_rank, memory.is_shared, memory.fence)


def private_memory(nbytes: int) -> SharedMemory:
    """Return memory of the same alignment that only this rank sees."""
    block = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return SharedMemory((block[start : start + nbytes],))


def share(nbytes: int, ranks: Any, fence: Fence = no_fence, *, sparing: bool = False) -> tuple[SharedMemory, str]:
    """Return `nbytes` zeroed bytes for each rank of this node; else, on every rank, private memory and the same reason.

    Collective over all `ranks`; `nbytes` must be equal on the ranks of a node.  With `sparing`, half of the free memory
    stays free for others.
    """
    size = -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    limit, total = memory_limits.memory(), size * ranks.local_size  # before any rank takes memory
    handle, reason = _file_of_node(ranks)
    # The ranks of a node may be in control groups of their own, each with a limit for its own pages.
    demand, block = total if ranks.local_rank == 0 else size, None
    if limit is not None and demand > (limit.free // 2 if sparing else limit.free):
        reason = reason or (
            f"{demand / 2**20:.1f} MiB of shared memory{' for speed alone' if sparing else ''}, where "
            f"{limit.free / 2**20:.0f} MiB are free of {limit.of}"
        )
    try:
        if not reason and handle >= 0:
            os.posix_fallocate(handle, ranks.local_rank * size, size)
            block = _mapped(handle, total)
    except (OSError, MemoryError) as error:
        reason = f"{total / 2**20:.1f} MiB of shared memory: {_in_words(error)}"
    finally:
        if block is None and handle >= 0:
            os.close(handle)
    reason = next(filter(None, ranks.allgather_text(reason)), "")
    if reason or block is None:
        return private_memory(nbytes), reason
    memory_of_node = np.frombuffer(block, np.uint8)
    segments = tuple(memory_of_node[rank * size : rank * size + nbytes] for rank in range(ranks.local_size))
    return SharedMemory(segments, ranks.local_rank, True, fence), ""


# ------------------------------------------------------------------------------------------- files


def _file_of_node(ranks: Any) -> tuple[int, str]:
    """Return this rank's descriptor of a new file of the node, or -1, and why it has none.

    An error among the messages is raised: only this rank has left them, and would mistake the next messages for these.
    """
    handle, own_text, reason = -1, "", ""
    try:
        if ranks.local_rank == 0:
            handle = _new_file()
            own_text = f"{_identity(handle)} /proc/{os.getpid()}/fd/{handle}"
    except (OSError, AttributeError) as error:
        reason = f"no file for shared memory: {_in_words(error)}"
    leader = ranks.node_of.index(ranks.node_of[ranks.rank])
    identity, _, path = ranks.allgather_text(own_text)[leader].partition(" ")
    try:
        if ranks.local_rank and path:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if identity != _identity(handle):  # in another container the number means another process
                raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
    except OSError as error:
        reason = f"no file for shared memory that all ranks of a node can open: {_in_words(error)}"
    return handle, reason


def _identity(handle: int) -> str:
    """Return an identity of an open file, unique on the node."""
    state = os.fstat(handle)
    return f"{state.st_dev}:{state.st_ino}"


def _new_file() -> int:
    """Return the descriptor of a new file; by the C library, since the Python of conda has no os.memfd_create."""
    close_on_exec = 1
    handle: int = _libc().memfd_create(b"mpistrategy", close_on_exec)
    if handle < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return handle


def _in_words(error: BaseException) -> str:
    return getattr(error, "strerror", "") or type(error).__name__


# ------------------------------------------------------------------------------------------- mappings


#: The address, length and file of a mapping.
_Mapping: TypeAlias = tuple[int, int, int]
#: The mappings that a child must not write to, by the identity of the object that keeps them.
_mappings: dict[int, _Mapping] = {}


@cache
def _libc() -> Any:
    """Return the C library; from then on children make their mappings private."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    os.register_at_fork(after_in_child=_make_private)
    return libc


def _mapped(handle: int, nbytes: int) -> mmap.mmap:
    """Return the file as memory; it is unmapped, and the descriptor closed, after the last reference to it."""
    # Python's object keeps the addresses; the file is mapped over them by hand, so that a child can do it again.
    block = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping = np.frombuffer(block, np.uint8).ctypes.data, nbytes, handle
    if not _map(mapping, mmap.MAP_SHARED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mappings[id(block)] = mapping
    weakref.finalize(block, _forget, id(block), handle).atexit = False
    return block


def _forget(identity: int, handle: int) -> None:
    _mappings.pop(identity, None)
    os.close(handle)


def _map(mapping: _Mapping, kind: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> bool:
    """Map the file at its address, in place of the present mapping; return whether that was possible."""
    fixed, (address, nbytes, handle) = 0x10, mapping
    return bool(_libc().mmap(address, nbytes, access, kind | fixed, handle, 0) == address)


def _make_private() -> None:
    """Give a forked child private mappings: it reads the parent's data, and its writes stay with it.

    Its own children inherit them as they are; a new mapping would show the data of this child's parent.
    """
    for mapping in _mappings.values():
        if not _map(mapping, mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)):
            # At once: the old mapping may be gone, and nothing else may take its addresses.
            if not _map(mapping, mmap.MAP_SHARED, mmap.PROT_READ):
                os.write(2, b"mpistrategy: a forked child can have no memory of its own; it ends\n")
                os._exit(71)  # rather than write into its parent's variables
            os.write(2, b"mpistrategy: no memory for a forked child to write where its parent has shared memory\n")
    _mappings.clear()
