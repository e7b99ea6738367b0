"""Which way a value takes, by its size: thresholds that were measured, one set for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Which way `Communicator.allreduce` takes: none (one rank), between threads, through the window of the node, within
#: and between nodes, by MPI's Allreduce; and by MPI's Reduce and Bcast, which an algorithm may want instead.
Way = Literal["none", "threads", "window", "blocks", "across", "mpi", "root", "exchange"]


@dataclass(frozen=True)
class Rates:
    """How fast the ways are, to tell beforehand how long a call will take; nothing else depends on them.

    Attributes:
        cell_seconds: a small call in the cells of the ranks of one node.
        message_seconds: the same call between nodes.
        window_bytes_per_second: a buffer through the node's window.
        arena_bytes_per_second: a bucket of an arena, in place.
        mpi_bytes_per_second: a buffer by MPI, within a node.
        link_bytes_per_second: what one node sends to the others, while as much arrives.
        copy_bytes_per_second: one rank copies arrays into a buffer.
    """

    cell_seconds: float = 2.5e-6
    message_seconds: float = 1e-4
    window_bytes_per_second: float = 8e9
    arena_bytes_per_second: float = 14e9
    mpi_bytes_per_second: float = 8e9
    link_bytes_per_second: float = 1.18e8  # 1 Gbit/s
    copy_bytes_per_second: float = 1e10


@dataclass(frozen=True)
class Paths:
    """The thresholds, in bytes.

    Attributes:
        cell_bytes: up to here a value travels in the cells of two ranks, together with the check of the call; of more
            ranks in proportion less, since every rank reads all cells.
        window_bytes: from here on a buffer is reduced through the node's window, in chunks; below it MPI does.
        chunk_bytes: what each rank has under way in the window at a time.
        pack_bytes: arrays below this are packed with others of their dtype.
        piece_bytes: MPI is given larger buffers in pieces of this.
        source: where the thresholds come from, in words.
        rates: how fast the ways are.
    """

    cell_bytes: int = 32 * 2**10
    window_bytes: int = 8 * 2**10
    chunk_bytes: int = 512 * 2**10
    pack_bytes: int = 64 * 2**10
    piece_bytes: int = 2**20
    source: str = "the defaults"
    rates: Rates = Rates()

    def thresholds(self) -> dict[str, int]:
        """Return the thresholds by name: what decides which way a value takes, and so the bits of its sum."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


DEFAULT = Paths()
