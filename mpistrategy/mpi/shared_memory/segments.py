"""Memory that all ranks of a node see: one segment for each rank, mapped into every process of the node.

It is a file without a name (a memfd), made by the first rank of the node and opened by the others through its
descriptor, so that nothing is left behind however the job ends.  Where a descriptor cannot be reached (ranks in
containers of their own, say), it is a file in the node's shared-memory file system whose name is gone before memory is
taken.  Every rank reserves its own pages (they lie near its own core), after a look at what may be taken: a file system
that is full, or a limit of memory, is an error here instead of a killed process later.  The mapping lives as long as
any array in it, also after the strategy is closed.  In a forked child it is the child's own: what it writes there stays
with it, and with the children that it forks.  Where the system promises no memory for that (vm.overcommit_memory=2), it
can only read: a write ends it (SIGSEGV).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory import memory_limits
from mpistrategy.mpi.shared_memory.memory_limits import Room

#: Every segment starts on such a boundary: a cache line, and enough for any vector instruction.
ALIGNMENT = 64
#: Where Linux keeps shared memory that has a name.
FOLDER = "/dev/shm"
_NAME = "mpistrategy"
_OUT_OF_REACH = "no file for shared memory that all ranks of a node can open"

Fence = Callable[[], object]


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to where the next array may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
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


def room() -> Room | None:
    """Return how much memory the ranks of a node may still share; None where the system says nothing."""
    return _least(memory_limits.memory(), None if hasattr(os, "memfd_create") else memory_limits.file_system(FOLDER))


def share(nbytes: int, peers: NodePeers, fence: Fence | None = None, *, sparing: bool = False) -> SharedMemory | str:
    """Return `nbytes` for each rank of this node, or why they cannot be had: in words, the same on every rank.

    Collective over all ranks of the job; `nbytes` must be equal on the ranks of a node.  With `sparing`, half of what
    may be taken stays free for others.
    """
    size = -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if peers.local_rank == 0:
        _remove_left_names()
    limit = memory_limits.memory()
    handle, _, reason = _opened_by_all(_memfd, peers)
    block, reason = _taken(handle, size, peers, limit, sparing) if not reason else (None, reason)
    reason = peers.any_reason(reason)
    if reason.startswith(_OUT_OF_REACH):
        block = None
        handle, reason = _file_that_had_a_name(peers)
        if reason:
            return reason
        block, reason = _taken(handle, size, peers, _least(limit, memory_limits.file_system(FOLDER)), sparing)
        reason = peers.any_reason(reason)
    if reason or block is None:
        return reason
    everything = np.frombuffer(block, np.uint8)
    segments = tuple(everything[rank * size : rank * size + nbytes] for rank in range(peers.local_size))
    return SharedMemory(segments, peers.local_rank, True, fence)


def _taken(handle: int, size: int, peers: NodePeers, limit: Room | None, sparing: bool) -> tuple[mmap.mmap | None, str]:
    """Return the file as memory of `size` bytes for each rank, this rank's own reserved; or None and why not."""
    total = size * peers.local_size
    # The ranks of a node may be in control groups of their own, each with a limit for its own pages.
    wanted = total if peers.local_rank == 0 else size
    reason, block = _refusal(wanted, limit, sparing), None
    try:
        if not reason:
            os.posix_fallocate(handle, peers.local_rank * size, size)
            block = _mapped(handle, total)
    except (OSError, MemoryError) as error:
        reason = f"{total / 2**20:.1f} MiB of shared memory: {getattr(error, 'strerror', '') or type(error).__name__}"
    finally:
        if block is None:
            os.close(handle)
    return block, reason


def _least(*rooms: Room | None) -> Room | None:
    return min((room for room in rooms if room is not None), key=lambda room: room.free, default=None)


def _refusal(wanted: int, limit: Room | None, sparing: bool) -> str:
    """Return why so many bytes cannot be taken; "" when they can."""
    if limit is None or wanted <= (limit.free // 2 if sparing else limit.free):
        return ""
    return (
        f"{wanted / 2**20:.1f} MiB of shared memory{' for speed alone' if sparing else ''}, where "
        f"{limit.free / 2**20:.0f} MiB are free of {limit.of}"
    )


# ------------------------------------------------------------------------------------------- files without names


def _file_that_had_a_name(peers: NodePeers) -> tuple[int, str]:
    """Return a descriptor of an empty file that all ranks of the node have open; or -1 and why not, on all ranks."""
    handle, path, reason = -1, "", ""
    try:
        handle, path, reason = _opened_by_all(_named_file, peers)
        reason = peers.any_reason(reason)
    finally:
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)
    if reason and handle >= 0:
        os.close(handle)
    if not reason:
        peers.text_of_leader("the name is gone")  # before any rank takes memory
    return handle, reason


def _opened_by_all(make: Callable[[], tuple[int, str]], peers: NodePeers) -> tuple[int, str, str]:
    """Return this rank's descriptor of a file of the node, on its first rank also the path, and why there is none.

    Args:
        make: called on the first rank; returns a descriptor of a new file and a path that leads to it.
        peers: the ranks.
    """
    handle, path, told, reason = -1, "", "", ""
    if peers.local_rank == 0:
        try:
            handle, path = make()
            told = f"{_identity(handle)} {path}"
        except (OSError, AttributeError, MemoryError) as error:
            reason = f"{_OUT_OF_REACH}: {error}"
    told = peers.text_of_leader(told)
    if peers.local_rank:
        try:
            handle = _opened(told)
        except OSError as error:
            reason = f"{_OUT_OF_REACH}: {error}"
    return handle, path, reason


def _identity(file: int | str) -> str:
    """Return what tells an open file, or what a path leads to, from all others; "" for what is no regular file."""
    state = os.stat(file)
    return f"{state.st_dev}:{state.st_ino}" if stat.S_ISREG(state.st_mode) else ""


def _opened(told: str) -> int:
    """Return a descriptor of the file of which another rank has told."""
    identity, _, path = told.partition(" ")
    # Ranks in containers have process numbers of their own: there the path may lead to a device, which notices an open.
    if _identity(path) == identity:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        if _identity(handle) == identity:
            return handle
        os.close(handle)
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _memfd() -> tuple[int, str]:
    handle = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    return handle, f"/proc/{os.getpid()}/fd/{handle}"


def _named_file() -> tuple[int, str]:
    """Return an empty file with a name, which is locked: one that nobody has locked was left by a killed process."""
    while True:
        path = os.path.join(FOLDER, f"{_NAME}-{os.urandom(8).hex()}")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.fstat(handle).st_nlink:
                    return handle, path
        except OSError:
            os.unlink(path)
            os.close(handle)
            raise
        os.close(handle)  # another process took it for one that was left, just before it was locked


_are_removed = False


def _remove_left_names() -> None:
    """Remove the empty files that processes of this user have left, killed before they could remove the name; once."""
    global _are_removed
    names: list[str] = []
    if not _are_removed:
        _are_removed = True
        with contextlib.suppress(OSError):
            names = os.listdir(FOLDER)
    for name in names:
        if not name.startswith(f"{_NAME}-"):
            continue
        path = os.path.join(FOLDER, name)
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                state = os.fstat(handle)
                if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_size:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
            finally:
                os.close(handle)


# ------------------------------------------------------------------------------------------- mappings


class _Mapping(NamedTuple):
    address: int
    nbytes: int
    handle: int
    is_private: bool = False


#: The shared memory of this process, by the identity of what keeps it mapped.
_mappings: dict[int, _Mapping] = {}
_libc: Any = None


def _mapped(handle: int, nbytes: int) -> mmap.mmap:
    """Return the file as memory that is unmapped, and the descriptor closed, when nobody refers to it any more."""
    global _libc
    import ctypes  # here, for the quick import

    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
        _libc.mmap.restype = ctypes.c_void_p
        _libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )
        os.register_at_fork(after_in_child=_make_private)
    # Python's object keeps the addresses; the file is mapped there by hand, so that a child can do it anew.
    block = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping = _Mapping(np.frombuffer(block, np.uint8).ctypes.data, nbytes, handle)
    if not _map(mapping, mmap.MAP_SHARED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mappings[id(block)] = mapping
    weakref.finalize(block, _forget, id(block)).atexit = False
    return block


def _map(mapping: _Mapping, kind: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> bool:
    """Map the file where its bytes are looked for, in place of what is there; return whether that was possible."""
    fixed = 0x10
    place = _libc.mmap(mapping.address, mapping.nbytes, access, kind | fixed, mapping.handle, 0)
    return bool(place == mapping.address)


def _forget(identity: int) -> None:
    os.close(_mappings.pop(identity).handle)


def _make_private() -> None:
    """Give a forked child mappings of its own: it reads what the parent has there, and what it writes stays with it.

    Its own children inherit them as they are; mapped once more, they would show what this child's parent has.
    """
    for identity, mapping in list(_mappings.items()):
        if mapping.is_private:
            continue
        if not _map(mapping, mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)):
            # At once: what was mapped there may be gone, and the place must not be taken for anything else.
            if not _map(mapping, mmap.MAP_SHARED, mmap.PROT_READ):
                os.write(2, b"mpistrategy: a forked child can have no memory of its own; it ends\n")
                os._exit(71)  # rather than write into its parent's variables
            os.write(2, b"mpistrategy: no memory for a forked child to write where its parent has shared memory\n")
        _mappings[identity] = mapping._replace(is_private=True)
