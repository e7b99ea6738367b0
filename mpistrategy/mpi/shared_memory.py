"""Memory that all ranks of a node see: one segment for each rank, mapped into every process of the node.

It is a nameless file of the node's shared-memory file system: made by the first rank of the node, opened by the
others, and unlinked before anybody uses it, so that nothing is left behind however the job ends.  Every rank reserves
its own pages (they lie near its own core), which makes a full file system an error here instead of a killed process
later.  The mapping lives as long as any array in it, also after the strategy is closed.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mpistrategy.arrays import Array

#: Every segment starts on such a boundary: a cache line, and enough for any vector instruction.
ALIGNMENT = 64
#: Where Linux keeps shared memory.
FOLDER = "/dev/shm"

Fence = Callable[[], object]


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to where the next array may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass
class SharedMemory:
    """One block of zeroed bytes for each rank of a node.

    Attributes:
        segments: flat uint8 arrays, by local rank; where `is_shared` is False only this rank's own.
        local_rank: this rank's index among them.
        is_shared: whether the peers of the node see them.
        fence: orders the writes before it before those after it, where the processor does not do so by itself.
    """

    segments: tuple[Array, ...]
    local_rank: int = 0
    is_shared: bool = False
    fence: Fence | None = None

    @property
    def mine(self) -> Array:
        """This rank's own segment."""
        return self.segments[self.local_rank]


def part(memory: SharedMemory, start: int, length: int | None = None) -> SharedMemory:
    """Return the same part of every segment."""
    stop = None if length is None else start + length
    segments = tuple(segment[start:stop] for segment in memory.segments)
    return SharedMemory(segments, memory.local_rank, memory.is_shared, memory.fence)


def private_memory(nbytes: int) -> SharedMemory:
    """Return memory of the same alignment that this rank alone sees."""
    block = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return SharedMemory((block[start : start + nbytes],))


class NodePeers(Protocol):
    """What `share` needs from the ranks around it."""

    local_rank: int
    local_size: int

    def text_of_leader(self, text: str) -> str:
        """Return the text of the first rank of this node."""

    def any_reason(self, reason: str) -> str:
        """Return the first text that is not empty, of all ranks of the job; "" when all are."""


def share(nbytes: int, peers: NodePeers, fence: Fence | None = None, *, sparing: bool = False) -> SharedMemory | str:
    """Return `nbytes` for each rank of this node, or why they cannot be had: in words, the same on every rank.

    Collective over all ranks of the job; `nbytes` must be equal on the ranks of a node.  With `sparing`, half of the
    file system stays free for others.
    """
    size = -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    leads, path, reason = peers.local_rank == 0, "", ""
    if leads:
        try:
            path = _create(size * peers.local_size, sparing)
        except OSError as error:
            reason = _in_words(error, size * peers.local_size)
    try:
        reason = peers.any_reason(reason)
        if reason:
            return reason
        path = peers.text_of_leader(path)
        block: mmap.mmap | None = None
        try:
            block = _open(path, size, peers)
        except OSError as error:
            reason = _in_words(error, size * peers.local_size)
        reason = peers.any_reason(reason)
    finally:
        if leads and path:
            with contextlib.suppress(OSError):
                os.unlink(path)
    if reason or block is None:
        return reason
    everything = np.frombuffer(block, np.uint8)
    segments = tuple(everything[rank * size : rank * size + nbytes] for rank in range(peers.local_size))
    return SharedMemory(segments, peers.local_rank, True, fence)


def _create(total: int, sparing: bool) -> str:
    if sparing:
        state = os.statvfs(FOLDER)
        if state.f_bavail * state.f_frsize - total < state.f_blocks * state.f_frsize // 2:
            raise OSError(errno.ENOSPC, "more than half of it would be in use")
    import tempfile  # here, for the quick import

    handle, path = tempfile.mkstemp(prefix="mpistrategy-", dir=FOLDER)
    try:
        os.ftruncate(handle, total)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)
    return path


def _open(path: str, size: int, peers: NodePeers) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR)
    try:
        os.posix_fallocate(handle, peers.local_rank * size, size)
        return mmap.mmap(handle, peers.local_size * size)
    finally:
        os.close(handle)


def _in_words(error: OSError, total: int) -> str:
    room = ""
    with contextlib.suppress(OSError):
        state = os.statvfs(FOLDER)
        room = f", where {state.f_bavail * state.f_frsize / 2**20:.0f} MiB are free"
    return f"{total / 2**20:.1f} MiB of shared memory in {FOLDER}{room}: {error.strerror or error}"
