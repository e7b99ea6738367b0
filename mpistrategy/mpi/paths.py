"""Which way a value takes, by its size: thresholds that were measured, one set for all ranks."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    cell_bytes: int = 32 * 2**10
    window_bytes: int = 8 * 2**10
    chunk_bytes: int = 256 * 2**10
    pack_bytes: int = 64 * 2**10
    piece_bytes: int = 2**20
    source: str = "the defaults"


DEFAULT = Paths()
